// SPDX-License-Identifier: Apache-2.0
//
// Gradients in bf16 and fp16 where V, K or dO has a mean. There delta = rowsum(dO * O) with the O that the forward
// rounded is off by far more than the gradients may be: RMSE up to 30 times that of the unfused computation, whose
// delta is a sum of its own weights (docs/decisions/delta-of-rounded-output.md).
#include <cmath>
#include <functional>
#include <utility>

#include "check/unfused.hpp"
#include "kernels/support.hpp"
#include "units.hpp"

namespace tessera::check::delta_test {
namespace {

constexpr DType kRoundedTypes[] = {DType::bf16, DType::fp16};

void change(Tensor& t, const std::function<double(double)>& to) {
    for_each_element(t.view, [&](std::int64_t, std::byte* element) {
        store_from_double(element, t.view.dtype, to(load_as_double(element, t.view.dtype)));
    });
}

void shift(Tensor& t, double mean, double deviation = 1) {
    change(t, [&](double x) { return mean + deviation * x; });
}

/// Each row less its mean, as a gradient that came through a normalisation is.
void remove_row_means(Tensor& t, std::int64_t columns) {
    double* row = nullptr;
    Packed copy = packed_copy(t.view);
    for (std::size_t at = 0; at < copy.data.size(); ++at) {
        if (static_cast<std::int64_t>(at) % columns != 0) continue;
        row = &copy.data[at];
        const double mean = std::accumulate(row, row + columns, 0.0) / static_cast<double>(columns);
        for (std::int64_t c = 0; c < columns; ++c) row[c] -= mean;
    }
    for_each_element(t.view, [&](std::int64_t flat, std::byte* element) {
        store_from_double(element, t.view.dtype, copy.data[static_cast<std::size_t>(flat)]);
    });
}

struct Inputs {
    const char* name;
    std::function<void(Attention&)> make;
};

const Inputs kInputs[] = {
    {"K and V about 1", [](Attention& a) { shift(a.k, 1), shift(a.v, 1); }},
    {"all uniform",
     [](Attention& a) {
         std::uint64_t seed = 100;
         for (Tensor* t : {&a.q, &a.k, &a.v, &a.d_o}) {
             const Random random(++seed);
             std::uint64_t index = 0;
             change(*t, [&](double) { return random.uniform(index++); });
         }
     }},
    {"V 3 +- 0.1, dO orthogonal to its mean",
     [](Attention& a) { shift(a.v, 3, 0.1), remove_row_means(a.d_o, a.problem.head_dim_v); }},
};

Attention make_attention(const std::string& feature, DType dtype) {
    Problem p = make_problem(1, 70, 300, 2, feature == "grouped" ? 1 : 2, 32, dtype);
    if (feature == "causal") p.mask.causal = Causal::bottom_right;
    if (feature == "window") p.mask = {.window_left = 40, .window_right = 3};
    if (feature == "dropout") p.dropout = {.probability = 0.2, .seed = 7};
    if (feature == "softcap") p.softcap = 3;
    if (feature == "bias") p.bias = p.bias_gradient = true;
    if (feature == "short") p.len_kv = 5;
    if (feature != "ragged") return Attention(p);
    return Attention(make_ragged({33, 0, 70}, {200, 9, 65}, 2, 2, 32, dtype), 1, {33, 0, 70}, {200, 9, 65});
}

struct Errors {
    double rmse = 0;
    double largest = 0;
};

Errors errors_of(const TensorView& got, const TensorView& right) {
    Errors e;
    const auto* values = static_cast<const double*>(right.data);
    for_each_element(got, [&](std::int64_t flat, const std::byte* element) {
        const double error = std::abs(load_as_double(element, got.dtype) - values[flat]);
        e.rmse += error * error;
        e.largest = std::max(e.largest, error);
    });
    e.rmse = std::sqrt(e.rmse / static_cast<double>(got.size()));
    return e;
}

/// The gradients of a finished call keep to docs/numerics.md, with no allowance.
class UnfusedRatios {
 public:
    explicit UnfusedRatios(const Attention& a)
        : right_(a.problem, a.backward_args()),
          dq_("dq", a.q.view),
          dk_("dk", a.k.view),
          dv_("dv", a.v.view),
          dbias_("dbias", a.dbias.view) {
        const PackedCall<BackwardArgs> packed = pack(a.problem, a.backward_args());
        add_unfused(packed, a.problem.dtype, {&dq_, &dk_, &dv_, a.dbias.view.given() ? &dbias_ : nullptr});
    }

    void expect_kept(const Attention& a) const {
        expect("dq", a.dq.view, right_.dq(), dq_);
        expect("dk", a.dk.view, right_.dk(), dk_);
        expect("dv", a.dv.view, right_.dv(), dv_);
        if (a.dbias.view.given() && a.dbias.view.dtype == a.problem.dtype) {
            expect("dbias", a.dbias.view, right_.dbias(), dbias_);
        }
    }

 private:
    static void expect(const char* name, const TensorView& got, const TensorView& right, const TensorGold& gold) {
        const Errors of_kernel = errors_of(got, right);
        const Errors of_unfused = errors_of(gold.unfused.view, right);
        EXPECT_LE(of_kernel.rmse, 1.1 * of_unfused.rmse) << name;
        EXPECT_LE(of_kernel.largest, 1.5 * of_unfused.largest) << name;
    }

    BackwardGold right_;
    TensorGold dq_, dk_, dv_, dbias_;
};

/// Runs f() on the fp32 words and on every matrix unit of this processor, with the unit in messages.
void on_every_unit(const std::function<void()>& f) {
    using cpu::matrix::Unit;
    for (const Unit unit : {Unit::none, Unit::dot, Unit::amx}) {
        if (!cpu::matrix::has_unit(unit)) continue;
        SCOPED_TRACE(testing::Message() << "unit " << static_cast<int>(unit));
        const cpu::matrix::OnlyUnit only(unit);
        f();
    }
}

class RoundedOutput : public testing::TestWithParam<std::tuple<DType, const char*>> {};

TEST_P(RoundedOutput, does_not_spoil_gradients_of_inputs_with_a_mean) {
    const auto [dtype, feature] = GetParam();
    for (const Inputs& inputs : kInputs) {
        SCOPED_TRACE(inputs.name);
        Attention a = make_attention(feature, dtype);
        inputs.make(a);
        if (std::string(feature) == "dlse") {
            a.dlse = a.lse;
            fill(a.dlse.view, Fill::normal, 9);
        }
        if (a.problem.bias) {
            a.bias = Tensor(dtype, {1, 2, 70, 300});
            fill(a.bias.view, Fill::normal, 8);
            a.dbias = a.bias;
        }
        a.prepare_backward();
        const UnfusedRatios ratios(a);
        on_every_unit([&] {
            for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                if (kernel.backend != Backend::cpu) return;
                ASSERT_TRUE(a.backward(kernel, {.threads = 2}));
                ratios.expect_kept(a);
            });
        });
    }
}

INSTANTIATE_TEST_SUITE_P(Cpu, RoundedOutput,
                         testing::Combine(testing::ValuesIn(kRoundedTypes),
                                          testing::Values("plain", "causal", "window", "grouped", "dropout", "softcap",
                                                          "bias", "dlse", "short", "ragged")),
                         [](const auto& which) {
                             return std::string(name_of(std::get<0>(which.param))) + "_" + std::get<1>(which.param);
                         });

/// Delta is a sum over keys: over those that the row sees, and in one order.
TEST(SummedDelta, takes_no_bit_from_hidden_keys_nor_from_threads) {
    for (const DType dtype : kRoundedTypes) {
        Problem p = make_problem(1, 130, 300, 2, 1, 24, dtype);
        p.mask = {.causal = Causal::bottom_right, .window_left = 100};
        Attention clean(p);
        shift(clean.v, 1);
        clean.prepare_backward();
        Attention dirty(clean);
        constexpr std::int64_t kHidden = 250;  // from queries 0 .. 79, and nothing sees keys 0 .. 69
        for (std::int64_t c = 0; c < 24; ++c) {
            for (const std::int64_t key : {std::int64_t{3}, kHidden}) {
                dirty.k.set(std::nan(""), 0, key, 0, c);
                dirty.v.set(std::nan(""), 0, key, 0, c);
            }
        }
        on_every_unit([&] {
            for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
                if (kernel.backend != Backend::cpu) return;
                ASSERT_TRUE(clean.backward(kernel) && dirty.backward(kernel, {.threads = 3}));
                for (std::int64_t i = 0; i < 80; ++i) {
                    for (std::int64_t h = 0; h < 2; ++h) {
                        ASSERT_EQ(clean.dq.get(0, i, h, 5), dirty.dq.get(0, i, h, 5)) << i << " " << h;
                    }
                }
                EXPECT_TRUE(std::isnan(dirty.dq.get(0, 80, 0, 5)));
                const Tensor once = clean.dq;
                ASSERT_TRUE(clean.backward(kernel, {.threads = 5}));
                EXPECT_TRUE(clean.dq.same_bits(once));
            });
        });
    }
}

}  // namespace
}  // namespace tessera::check::delta_test
