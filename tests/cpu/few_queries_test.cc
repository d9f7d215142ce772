// SPDX-License-Identifier: Apache-2.0
//
// One to nine queries per head on the CPU, on every matrix unit of this processor and without one. Their rows have the
// bits of a call of many queries, which runs other primitives, and are right.
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/row_bits.hpp"
#include "units.hpp"

namespace tessera::cpu::matrix::few_queries_test {
namespace {

using check::Attention;

constexpr std::int64_t kMany = 40;  // queries, more than a panel

struct Call {
    std::string name;
    std::int64_t heads_q, heads_kv, head_dim, head_dim_v;
    Mask mask{};
    double softcap = 0;
    bool alibi = false;
    bool bias = false;
    double scale = 0;

    Problem problem(std::int64_t len_q, std::int64_t len_kv, DType dtype) const {
        Problem p = check::make_problem(2, len_q, len_kv, heads_q, heads_kv, head_dim, dtype);
        p.head_dim_v = head_dim_v;
        p.mask = mask;
        p.softcap = softcap;
        p.alibi = alibi;
        p.bias = bias;
        if (scale != 0) p.scale = scale;
        return p;
    }
};
void PrintTo(const Call& call, std::ostream* out) { *out << call.name; }

constexpr Mask kCausal{.causal = Causal::bottom_right};
constexpr Mask kWindow{.causal = Causal::bottom_right, .window_left = 90};
const Call kCalls[] = {
    {"plain", 2, 2, 128, 128},
    {"causal", 2, 2, 64, 64, kCausal},
    {"window", 2, 2, 64, 64, kWindow},
    {"two_sided_window", 2, 2, 32, 48, {.window_left = 70, .window_right = 3}},
    {"grouped_4_to_1", 4, 1, 128, 128},
    {"grouped_causal", 6, 2, 64, 128, kCausal},
    {"grouped_window", 8, 2, 96, 64, kWindow},
    {"group_of_12", 12, 1, 64, 64, kCausal},
    {"odd_dims", 3, 1, 20, 71, kCausal},
    {"odd_dims_bf16", 2, 2, 72, 200, kCausal},
    {"widest", 2, 1, 256, 256, kCausal},
    {"narrowest", 2, 1, 1, 1, kCausal},
    {"softcap", 4, 2, 64, 64, kCausal, 3},
    {"alibi", 4, 2, 64, 64, kCausal, 0, true},
    {"bias", 4, 2, 40, 64, kCausal, 0, false, true},
    {"large_scale", 2, 2, 64, 64, kCausal, 0, false, false, 2.5},
};

/// The last `queries` queries of every sequence of a call, alone.
Attention last_queries(const Attention& whole, std::int64_t queries) {
    Problem p = whole.problem;
    const std::int64_t first = p.len_q - queries;
    p.len_q = queries;
    Attention part(p, 7);
    part.k = whole.k;
    part.v = whole.v;
    part.slopes = whole.slopes;
    for (std::int64_t b = 0; b < p.batch; ++b) {
        for (std::int64_t i = 0; i < queries; ++i) {
            for (std::int64_t h = 0; h < p.heads_q; ++h) {
                for (std::int64_t c = 0; c < p.head_dim; ++c) part.q.set(whole.q.get(b, first + i, h, c), b, i, h, c);
                for (std::int64_t j = 0; p.bias && j < p.len_kv; ++j)
                    part.bias.set(whole.bias.get(b, h, first + i, j), b, h, i, j);
            }
        }
    }
    return part;
}

/// NaN has many bits, which are not promised.
bool same(double x, double y) {
    return std::bit_cast<std::uint64_t>(x) == std::bit_cast<std::uint64_t>(y) || (std::isnan(x) && std::isnan(y));
}

/// How many elements of O and LSE differ from those of the whole call.
int others(const Attention& whole, const Attention& part) {
    const Problem& p = part.problem;
    const std::int64_t first = whole.problem.len_q - p.len_q;
    int count = 0;
    for (std::int64_t b = 0; b < p.batch; ++b) {
        for (std::int64_t i = 0; i < p.len_q; ++i) {
            for (std::int64_t h = 0; h < p.heads_q; ++h) {
                count += same(part.lse.get(b, h, i), whole.lse.get(b, h, first + i)) ? 0 : 1;
                for (std::int64_t c = 0; c < p.head_dim_v; ++c)
                    count += same(part.o.get(b, i, h, c), whole.o.get(b, first + i, h, c)) ? 0 : 1;
            }
        }
    }
    return count;
}

KernelInfo forward_kernel() {
    for (const KernelInfo& info : kernels()) {
        if (info.name == "cpu.fa2.forward") return info;
    }
    ADD_FAILURE() << "no cpu.fa2.forward";
    return {};
}

template <class Body>
void on_every_unit(const Body& body) {
    for (const Unit chosen : {Unit::none, Unit::dot, Unit::amx}) {
        if (!has_unit(chosen)) continue;
        SCOPED_TRACE(chosen == Unit::none ? "no unit" : name_of(chosen));
        const OnlyUnit only(chosen);
        body();
    }
}

class FewQueries : public testing::TestWithParam<Call> {};

TEST_P(FewQueries, have_the_bits_of_many) {
    const KernelInfo kernel = forward_kernel();
    on_every_unit([&] {
        for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
            Attention whole(GetParam().problem(kMany, 620, dtype));
            ASSERT_TRUE(whole.forward(kernel));
            for (std::int64_t queries = 1; queries <= 9; ++queries) {
                Attention part = last_queries(whole, queries);
                const int threads = queries % 2 == 0 ? 1 : 16;
                ASSERT_TRUE(part.forward(kernel, {.threads = threads}));
                EXPECT_EQ(others(whole, part), 0) << part.problem.describe() << ", " << threads << " threads";
            }
        }
    });
}

/// NaN and infinity in one key or value, seen by all queries or by the last ones only.
TEST_P(FewQueries, have_the_bits_of_many_beside_special_values) {
    const KernelInfo kernel = forward_kernel();
    on_every_unit([&] {
        for (const DType dtype : {DType::fp32, DType::bf16}) {
            for (const double special : {std::nan(""), HUGE_VAL}) {
                for (const bool in_k : {false, true}) {
                    Attention whole(GetParam().problem(kMany, 560, dtype));
                    for (const std::int64_t key : {3, 530, 557}) (in_k ? whole.k : whole.v).set(special, 1, key, 0, 0);
                    ASSERT_TRUE(whole.forward(kernel));
                    for (const std::int64_t queries : {1, 6}) {
                        Attention part = last_queries(whole, queries);
                        ASSERT_TRUE(part.forward(kernel));
                        EXPECT_EQ(others(whole, part), 0) << part.problem.describe() << ", " << special;
                    }
                }
            }
        }
    });
}

TEST_P(FewQueries, are_right) {
    const KernelInfo kernel = forward_kernel();
    on_every_unit([&] {
        for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
            for (std::int64_t queries = 1; queries <= 8; ++queries) {
                Attention call(GetParam().problem(queries, 100, dtype));
                ASSERT_TRUE(call.forward(kernel));
                const check::Report report = call.check_forward();
                EXPECT_TRUE(report.pass()) << call.problem.describe() << "\n" << report.describe();
            }
        }
    });
}

/// Rows that lie apart, backwards, or whose elements do.
TEST_P(FewQueries, have_the_bits_of_many_in_any_layout) {
    const KernelInfo kernel = forward_kernel();
    on_every_unit([&] {
        for (const DType dtype : {DType::fp32, DType::bf16}) {
            Attention packed(GetParam().problem(3, 200, dtype));
            ASSERT_TRUE(packed.forward(kernel));
            Attention apart = packed;
            for (check::Tensor* x : {&apart.k, &apart.v}) {
                const check::Tensor from = *x;
                const auto& shape = from.view.shape;
                *x = check::Tensor(dtype, {shape[0], shape[2], shape[3], shape[1] + 5});
                x->view.shape = shape;
                x->view.strides = {shape[2] * shape[3] * (shape[1] + 5), 1, shape[3] * (shape[1] + 5), shape[1] + 5};
                for (std::int64_t b = 0; b < shape[0]; ++b) {
                    for (std::int64_t j = 0; j < shape[1]; ++j) {
                        for (std::int64_t h = 0; h < shape[2]; ++h) {
                            for (std::int64_t c = 0; c < shape[3]; ++c) x->set(from.get(b, j, h, c), b, j, h, c);
                        }
                    }
                }
            }
            ASSERT_TRUE(apart.forward(kernel));
            EXPECT_EQ(others(packed, apart), 0) << packed.problem.describe();
        }
    });
}

INSTANTIATE_TEST_SUITE_P(Cpu, FewQueries, testing::ValuesIn(kCalls),
                         [](const auto& which) { return which.param.name; });

}  // namespace
}  // namespace tessera::cpu::matrix::few_queries_test
