// SPDX-License-Identifier: Apache-2.0
//
// The residual of O on a GPU: the forward writes the right one, and gradients with it are right. Skipped without a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "core/o_residual.hpp"
#include "kernels/rounded_output.hpp"
#include "registry.hpp"

namespace tessera::check::cuda_o_residual_test {
namespace {

using namespace rounded_output;

class CudaResidualOfO : public testing::Test {
 protected:
    void SetUp() override {
        if (const auto reason = unavailable({DeviceType::cuda, 0})) GTEST_SKIP() << *reason;
    }
};

bool knows(const KernelInfo& kernel, const Problem& p) {
    return kernel.backend == Backend::cuda && knows_o_residual(kernel_of(kernel), p);
}

template <class F>
void for_each_that_knows(Pass pass, const Problem& p, const F& f) {
    for_each_kernel(pass, [&](const KernelInfo& kernel) {
        if (knows(kernel, p)) f(kernel);
    });
}

/// O + residual of an element, and the unit in the last place of O.
struct Restored {
    double value;
    double ulp;
};

Restored restored(float o, std::int8_t rest, DType dtype) {
    const bool bf16 = dtype == DType::bf16;
    const int exponent = o == 0 ? -14 : std::max(std::ilogb(o), -14);
    return {bf16 ? with_residual<DType::bf16>(o, rest) : with_residual<DType::fp16>(o, rest),
            std::ldexp(1.0, exponent - (bf16 ? 7 : 10))};
}

/// If all weights are equal, only fp32 sums and O are rounded in P V: O + residual is the right O to a 256th of its
/// last place.
void expect_rest_right(const Attention& a) {
    const ForwardGold gold(a.problem, a.forward_args());
    const auto* right = static_cast<const double*>(gold.o().data);
    const auto* rests = reinterpret_cast<const std::int8_t*>(a.o_residual.memory.data());
    std::int64_t used = 0;
    int wrong = 0;
    for_each_element(a.o.view, [&](std::int64_t flat, const std::byte* element) {
        const auto o = static_cast<float>(load_as_double(element, a.problem.dtype));
        const auto [value, ulp] = restored(o, rests[flat], a.problem.dtype);
        used += rests[flat] != 0;
        const double allowed = ulp / 256 + 0x1p-17 * std::max(1.0, std::abs(right[flat]));
        if (std::abs(value - right[flat]) <= allowed || ++wrong > 5) return;
        ADD_FAILURE() << index_text(a.o.view, flat) << ": O " << o << ", rest " << static_cast<int>(rests[flat])
                      << ", together " << value << ", expected " << right[flat];
    });
    EXPECT_EQ(wrong, 0) << a.problem.describe();
    EXPECT_GT(used, a.o.view.size() / 2) << a.problem.describe();
}

Attention make_equal_weights(const std::string& feature, Dims dims, DType dtype) {
    const bool ragged = feature.starts_with("ragged"), grouped = feature.ends_with("grouped");
    Problem p = ragged ? make_ragged({33, 0, 150}, {200, 9, 165}, grouped ? 8 : 2, 2, dims.qk, dtype)
                       : make_problem(2, 150, 300, 2, grouped ? 1 : 2, dims.qk, dtype);
    if (feature == "16 heads, few queries") p = make_problem(2, 5, 300, 16, 1, dims.qk, dtype);
    p.head_dim_v = dims.v;
    if (feature == "causal") p.mask.causal = Causal::bottom_right;
    if (feature == "window") p.mask = {.window_left = 40, .window_right = 3};
    if (feature == "dropout") p.dropout = {.probability = 0.2, .seed = 7};
    if (feature == "softcap") p.softcap = 3;
    Attention a = ragged ? Attention(p, 1, {33, 0, 150}, {200, 9, 165}) : Attention(p);
    a.q.fill_value(0);
    shift(a.v, 1);
    return a;
}

TEST_F(CudaResidualOfO, is_what_rounding_took_off) {
    for (const DType dtype : kRoundedTypes) {
        for (const char* feature : {"plain", "causal", "window", "grouped", "dropout", "softcap", "ragged",
                                    "ragged, grouped", "16 heads, few queries"}) {
            for (const Dims dims :
                 {Dims{24, 20}, {64, 64}, {72, 40}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}}) {
                Attention a = make_equal_weights(feature, dims, dtype);
                for_each_that_knows(Pass::forward, a.problem, [&](const KernelInfo& kernel) {
                    SCOPED_TRACE(feature);
                    a.o_residual = {};
                    if (!a.forward(kernel)) return;
                    const Attention without(a);
                    a.keep_residual();
                    ASSERT_TRUE(a.forward(kernel));
                    EXPECT_TRUE(a.o.same_bits(without.o) && a.lse.same_bits(without.lse));
                    expect_rest_right(a);
                });
            }
        }
    }
}

const Inputs kMeanOfKeysToo{"V 3 +- 0.1, K about 2", [](Attention& a) { shift(a.v, 3, 0.1), shift(a.k, 2); }};

/// Runs the forward, then the backward, by every pair of kernels that supports the residual.
class CudaResidualGradients : public testing::TestWithParam<std::tuple<DType, const char*>> {
 protected:
    void SetUp() override {
        if (const auto reason = unavailable({DeviceType::cuda, 0})) GTEST_SKIP() << *reason;
    }
};

TEST_P(CudaResidualGradients, keep_to_the_limits_with_no_allowance) {
    const auto [dtype, feature] = GetParam();
    std::vector<Inputs> all(std::begin(kInputs), std::end(kInputs));
    all.push_back(kMeanOfKeysToo);
    for (const Inputs& inputs : all) {
        SCOPED_TRACE(inputs.name);
        Attention a = make_call(feature, dtype, inputs);
        const UnfusedRatios ratios(a);
        for_each_that_knows(Pass::forward, a.problem, [&](const KernelInfo& kernel) {
            a.keep_residual();
            if (!a.forward(kernel)) return;
            for_each_kernel(Pass::backward, [&](const KernelInfo& second) {
                if (second.backend == Backend::cuda && a.backward(second)) ratios.expect_kept(a);
            });
        });
    }
}

INSTANTIATE_TEST_SUITE_P(AllKernels, CudaResidualGradients,
                         testing::Combine(testing::ValuesIn(kRoundedTypes),
                                          testing::Values("plain", "causal", "window", "grouped", "dropout", "softcap",
                                                          "bias", "dlse", "short", "ragged")),
                         [](const auto& which) {
                             return std::string(name_of(std::get<0>(which.param))) + "_" + std::get<1>(which.param);
                         });

/// Calls f(kernel) for backwards, with O, LSE and the residual of the first forward that supports it and takes the
/// problem.
void with_forward_and_residual(Attention& a, const std::function<void(const KernelInfo&)>& f) {
    a.keep_residual();
    bool ran = false;
    for_each_that_knows(Pass::forward, a.problem, [&](const KernelInfo& kernel) { ran = ran || a.forward(kernel); });
    ASSERT_TRUE(ran);
    for_each_that_knows(Pass::backward, a.problem, f);
}

/// Rows whose |LSE| is too large for fp32 get P from their scores, as without the residual; others do not.
TEST_F(CudaResidualOfO, leaves_large_scores_to_the_sum) {
    for (const std::int64_t dim : {64, 128}) {
        Problem p = make_problem(1, 300, 300, 2, 1, dim, DType::bf16);
        p.mask.causal = Causal::bottom_right;
        Attention a(p);
        for (std::int64_t row = 0; row < 300; row += row < 150 ? 7 : 1) {
            for (std::int64_t c = 0; c < dim; ++c) a.q.set(600 * a.q.get(0, row, 0, c), 0, row, 0, c);
        }
        with_forward_and_residual(a, [&](const KernelInfo& kernel) {
            ASSERT_TRUE(a.backward(kernel));
            const Report report = a.check_backward();
            EXPECT_TRUE(report.pass()) << p.describe() << "\n" << report.describe();
        });
    }
}

/// NaN reaches the rows that see it and no others, and hidden elements change no bit.
TEST_F(CudaResidualOfO, knows_hidden_nan_from_seen) {
    Problem p = make_problem(1, 200, 300, 2, 1, 64, DType::bf16);
    p.mask = {.causal = Causal::bottom_right, .window_left = 60};
    for (const double softcap : {0.0, 4.0}) {
        p.softcap = softcap;
        Attention clean(p);
        Attention dirty(clean);
        for (std::int64_t c = 0; c < 64; ++c) {
            dirty.k.set(std::nan(""), 0, 3, 0, c), dirty.v.set(std::nan(""), 0, 3, 0, c);  // no query sees key 3
            dirty.v.set(INFINITY, 0, 250, 0, c);  // queries 150 .. 199 see this one
        }
        with_forward_and_residual(dirty, [&](const KernelInfo& kernel) {
            ASSERT_TRUE(dirty.backward(kernel));
            const Report report = dirty.check_backward();
            EXPECT_TRUE(report.pass()) << p.describe() << "\n" << report.describe();
        });
        clean.keep_residual();
        for_each_that_knows(Pass::forward, p, [&](const KernelInfo& kernel) {
            ASSERT_TRUE(clean.forward(kernel) && dirty.forward(kernel));
            for_each_that_knows(Pass::backward, p, [&](const KernelInfo& second) {
                ASSERT_TRUE(clean.backward(second) && dirty.backward(second));
                for (std::int64_t i = 0; i < 150; ++i) {
                    for (std::int64_t c = 0; c < 64; ++c) {
                        ASSERT_EQ(clean.dq.get(0, i, 1, c), dirty.dq.get(0, i, 1, c)) << i << " " << c;
                    }
                }
            });
        });
    }
}

/// Sequences lie one after the other, so a tile's last rows may belong to the next sequence. A NaN there must not
/// reach this one.
TEST_F(CudaResidualOfO, stays_with_its_sequence) {
    for (const DType dtype : kRoundedTypes) {
        for (const auto& shape : {std::pair<std::int64_t, bool>{64, false},
                                  {64, true},
                                  {128, false},
                                  {128, true},
                                  {192, false},
                                  {256, false}}) {
            const auto dim = shape.first;
            Problem p = make_ragged({74, 112}, {90, 130}, 2, 2, dim, dtype);
            p.alibi = shape.second;
            Attention clean(p, 1, {74, 112}, {90, 130});
            with_forward_and_residual(clean, [&](const KernelInfo& kernel) {
                ASSERT_TRUE(clean.backward(kernel));
                for (Tensor Attention::*which : {&Attention::q, &Attention::d_o}) {
                    Attention dirty = clean;
                    for (std::int64_t c = 0; c < dim; ++c) (dirty.*which).set(std::nan(""), 80, 1, c);  // query 6
                    ASSERT_TRUE(dirty.backward(kernel));
                    for (std::int64_t i = 0; i < 90; ++i) {
                        SCOPED_TRACE(i);
                        if (i < 74) {
                            ASSERT_EQ(clean.dq.get(i, 1, 5), dirty.dq.get(i, 1, 5)) << p.describe();
                        }
                        ASSERT_EQ(clean.dk.get(i, 1, 5), dirty.dk.get(i, 1, 5)) << p.describe();
                        ASSERT_EQ(clean.dv.get(i, 1, 5), dirty.dv.get(i, 1, 5)) << p.describe();
                    }
                }
            });
        }
    }
}

/// Rows that see no key, and a Problem without queries or keys.
TEST_F(CudaResidualOfO, of_nothing_is_nothing) {
    for (const auto& [len_q, len_kv] : {std::pair<std::int64_t, std::int64_t>{150, 40}, {0, 70}, {70, 0}}) {
        Problem p = make_problem(2, len_q, len_kv, 2, 2, 64, DType::bf16);
        p.mask.causal = Causal::bottom_right;  // 110 queries come before every key
        Attention a(p);
        with_forward_and_residual(a, [&](const KernelInfo& kernel) {
            ASSERT_TRUE(a.backward(kernel));
            const Report report = a.check_backward();
            EXPECT_TRUE(report.pass()) << p.describe() << "\n" << report.describe();
        });
        if (len_q == 0) continue;
        for (std::int64_t c = 0; c < 64; ++c)
            EXPECT_EQ(std::to_integer<int>(a.o_residual.memory[static_cast<std::size_t>(c)]), 0);
    }
}

}  // namespace
}  // namespace tessera::check::cuda_o_residual_test
