// SPDX-License-Identifier: Apache-2.0
//
// The backward of one to eight queries per head on the CPU, on every matrix unit of this processor and without one. An
// observed call runs the tiles of the SIMD path (docs/numerics.md): its bits have to be equal.
#include <cmath>
#include <cstdint>

#include "kernels/row_bits.hpp"
#include "units.hpp"

namespace tessera::cpu::matrix::few_gradients_test {
namespace {

using check::Attention;
using check::Tensor;

struct Call {
    std::string name;
    std::int64_t heads_q, heads_kv, head_dim, head_dim_v;
    Mask mask{};
    double scale = 0;
    bool dlse = false;
    bool sinks = false;
};
void PrintTo(const Call& call, std::ostream* out) { *out << call.name; }

constexpr Mask kCausal{.causal = Causal::bottom_right};
constexpr Mask kTopLeft{.causal = Causal::top_left};
constexpr Mask kWindow{.causal = Causal::bottom_right, .window_left = 90};
const Call kCalls[] = {
    {"plain", 2, 2, 128, 128},
    {"causal", 2, 2, 64, 64, kCausal},
    {"few_keys_seen", 2, 1, 64, 64, kTopLeft},
    {"window", 4, 2, 64, 128, kWindow},
    {"two_sided_window", 2, 2, 32, 48, {.window_left = 70, .window_right = 3}},
    {"grouped_4_to_1", 4, 1, 128, 128},
    {"group_of_12", 12, 1, 64, 64, kCausal},
    {"group_of_40", 40, 1, 16, 16, kCausal},
    {"odd_dims", 3, 1, 20, 71, kCausal},
    {"widest", 2, 1, 256, 256},
    {"narrowest", 2, 1, 1, 1, kCausal},
    {"large_lse", 4, 2, 64, 64, kCausal, 1},
    {"negative_scale", 4, 2, 40, 64, {}, -0.3},
    {"gradient_of_lse", 4, 2, 64, 64, kCausal, 0, true},
    {"sinks", 4, 2, 64, 64, kCausal, 0, true, true},
    {"sinks_without_keys", 4, 1, 32, 32, {.causal = Causal::top_left, .window_left = 2}, 0, true, true},
    {"sinks_large_lse", 4, 2, 64, 64, kCausal, 1, false, true},
};

Problem problem_of(const Call& call, std::int64_t len_q, std::int64_t len_kv, DType dtype) {
    Problem p = check::make_problem(2, len_q, len_kv, call.heads_q, call.heads_kv, call.head_dim, dtype);
    p.head_dim_v = call.head_dim_v;
    p.mask = call.mask;
    if (call.scale != 0) p.scale = call.scale;
    p.sinks = call.sinks;
    return p;
}

/// A call with O and LSE of the reference. "large_lse": scores of some hundreds.
Attention attention_of(const Call& call, const Problem& problem) {
    Attention a(problem);
    if (call.scale == 1) a.q.scale_by(16);
    if (call.dlse) {
        a.dlse = a.lse;
        check::fill(a.dlse.view, check::Fill::normal, 5);
    }
    a.prepare_backward();
    return a;
}

KernelInfo backward_kernel() {
    for (const KernelInfo& info : kernels()) {
        if (info.name == "cpu.fa2.backward") return info;
    }
    ADD_FAILURE() << "no cpu.fa2.backward";
    return {};
}

struct Unobserving : TileObserver {
    void saw(const TileReport&) override {}
};

/// The number of elements that are not the same number; NaN is the same as NaN.
int others(const Tensor& x, const Tensor& y) {
    int count = 0;
    const std::int64_t elements = x.view.size();
    const std::int64_t size = size_of(x.view.dtype);
    for (std::int64_t i = 0; i < elements; ++i) {
        const double a = load_as_double(x.memory.data() + i * size, x.view.dtype);
        const double b = load_as_double(y.memory.data() + i * size, y.view.dtype);
        count += a == b || (std::isnan(a) && std::isnan(b)) ? 0 : 1;
    }
    return count;
}

void expect_same(const Attention& x, const Attention& y) {
    EXPECT_EQ(others(x.dq, y.dq), 0) << "dQ, " << x.problem.describe();
    EXPECT_EQ(others(x.dk, y.dk), 0) << "dK, " << x.problem.describe();
    EXPECT_EQ(others(x.dv, y.dv), 0) << "dV, " << x.problem.describe();
    if (x.problem.sinks) {
        EXPECT_EQ(others(x.dsinks, y.dsinks), 0) << "dsinks, " << x.problem.describe();
    }
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

/// Does such a call run on a matrix unit, which adds in another order? AMX takes all, others calls of more than 64
/// rows.
bool runs_on_a_unit(const Call& call, std::int64_t queries, DType dtype) {
    return packing_pays(dtype) && (unit() == Unit::amx || call.heads_q / call.heads_kv * queries > 64);
}

class FewGradients : public testing::TestWithParam<Call> {};

TEST_P(FewGradients, have_the_bits_of_the_tile_path) {
    const KernelInfo kernel = backward_kernel();
    on_every_unit([&] {
        for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
            for (const std::int64_t queries : {1, 2, 3, 5, 8}) {
                if (runs_on_a_unit(GetParam(), queries, dtype)) continue;
                Attention few = attention_of(GetParam(), problem_of(GetParam(), queries, 300, dtype));
                Attention tiles = few;
                Unobserving observer;
                ASSERT_TRUE(tiles.backward(kernel, {.how = {.observer = &observer}}));
                for (const int threads : {1, 3, 16}) {
                    ASSERT_TRUE(few.backward(kernel, {.threads = threads}));
                    expect_same(few, tiles);
                }
            }
        }
    });
}

TEST_P(FewGradients, are_right) {
    const KernelInfo kernel = backward_kernel();
    on_every_unit([&] {
        for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
            for (const std::int64_t queries : {1, 2, 4, 7, 8, 9}) {
                Attention call = attention_of(GetParam(), problem_of(GetParam(), queries, 100, dtype));
                ASSERT_TRUE(call.backward(kernel));
                const check::Report report = call.check_backward();
                EXPECT_TRUE(report.pass()) << call.problem.describe() << "\n" << report.describe();
            }
        }
    });
}

/// NaN and infinity in one key or value, which all queries see, some, or none.
TEST_P(FewGradients, have_the_bits_of_the_tile_path_beside_special_values) {
    const KernelInfo kernel = backward_kernel();
    on_every_unit([&] {
        for (const DType dtype : {DType::fp32, DType::bf16}) {
            if (runs_on_a_unit(GetParam(), 6, dtype)) continue;
            for (const double special : {std::nan(""), HUGE_VAL}) {
                for (const int where : {0, 1, 2, 3}) {
                    Attention few = attention_of(GetParam(), problem_of(GetParam(), 6, 200, dtype));
                    if (where == 0) few.k.set(special, 1, 197, 0, 0);
                    if (where == 1) few.v.set(special, 1, 197, 0, 0);
                    if (where == 2) few.q.set(special, 1, 1, 0, 0);
                    if (where == 3) few.d_o.set(special, 1, 1, 0, 0);
                    few.prepare_backward();
                    Attention tiles = few;
                    Unobserving observer;
                    ASSERT_TRUE(tiles.backward(kernel, {.how = {.observer = &observer}}));
                    ASSERT_TRUE(few.backward(kernel, {.threads = 3}));
                    expect_same(few, tiles);
                }
            }
        }
    });
}

/// A sequence has the bits that it has alone, beside few queries and beside many.
TEST_P(FewGradients, of_a_sequence_do_not_depend_on_its_neighbours) {
    const KernelInfo kernel = backward_kernel();
    const std::vector<std::int64_t> lengths_kv{70, 33, 300, 64};
    on_every_unit([&] {
        for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
            for (const std::int64_t neighbour : {0, 7, 45}) {
                const std::vector<std::int64_t> lengths_q{neighbour, 1, 8, neighbour};
                Problem p = check::make_ragged(lengths_q, lengths_kv, GetParam().heads_q, GetParam().heads_kv,
                                               GetParam().head_dim, dtype);
                p.head_dim_v = GetParam().head_dim_v;
                p.mask = GetParam().mask;
                p.sinks = GetParam().sinks;
                Attention batch(p, 1, lengths_q, lengths_kv);
                batch.prepare_backward();
                ASSERT_TRUE(batch.backward(kernel, {.threads = neighbour == 7 ? 16 : 1}));
                if (neighbour == 45) {
                    const check::Report report = batch.check_backward();
                    EXPECT_TRUE(report.pass()) << p.describe() << "\n" << report.describe();
                }
                Problem alone_of = check::make_problem(1, 8, 300, p.heads_q, p.heads_kv, p.head_dim, dtype);
                alone_of.head_dim_v = p.head_dim_v;
                alone_of.mask = p.mask;
                alone_of.sinks = p.sinks;
                Attention alone(alone_of);
                const auto copy = [](const Tensor& from, std::int64_t first, Tensor& to) {
                    std::copy_n(
                        from.memory.begin() + first * static_cast<std::int64_t>(to.memory.size()) / to.view.shape[1],
                        to.memory.size(), to.memory.begin());
                };
                const std::int64_t q = neighbour + 1;
                const std::int64_t k = 70 + 33;
                copy(batch.q, q, alone.q), copy(batch.d_o, q, alone.d_o), copy(batch.o, q, alone.o);
                copy(batch.k, k, alone.k), copy(batch.v, k, alone.v);
                for (std::int64_t h = 0; h < p.heads_q; ++h) {
                    for (std::int64_t i = 0; i < 8; ++i) alone.lse.set(batch.lse.get(h, q + i), 0, h, i);
                }
                ASSERT_TRUE(alone.backward(kernel));
                Attention part = alone;
                copy(batch.dq, q, part.dq), copy(batch.dk, k, part.dk), copy(batch.dv, k, part.dv);
                expect_same(part, alone);
            }
        }
    });
}

/// The caller wants only some gradients, and counts tiles.
TEST_P(FewGradients, may_be_wanted_one_by_one) {
    const KernelInfo kernel = backward_kernel();
    Attention all = attention_of(GetParam(), problem_of(GetParam(), 4, 150, DType::fp32));
    Attention tiles = all;
    Unobserving observer;
    TileCounters of_few, of_tiles;
    ASSERT_TRUE(all.backward(kernel, {.how = {.counters = &of_few}}));
    ASSERT_TRUE(tiles.backward(kernel, {.how = {.counters = &of_tiles, .observer = &observer}}));
    if (unit() != Unit::amx) {
        EXPECT_EQ(of_few.full, of_tiles.full);
        EXPECT_EQ(of_few.partial, of_tiles.partial);
        EXPECT_EQ(of_few.skipped, of_tiles.skipped);
        EXPECT_EQ(of_few.computed_pairs, of_tiles.computed_pairs);
    }
    for (Tensor Attention::*wanted : {&Attention::dq, &Attention::dk, &Attention::dv}) {
        Attention one = all;
        for (Tensor Attention::*other : {&Attention::dq, &Attention::dk, &Attention::dv}) {
            if (other != wanted) one.*other = Tensor();
        }
        ASSERT_TRUE(one.backward(kernel));
        EXPECT_EQ(others(one.*wanted, all.*wanted), 0);
    }
}

/// More than 256 tiles of keys: dQ is a sum of parts.
TEST(FewGradientsOfLongSequences, have_the_bits_of_the_tile_path) {
    const KernelInfo kernel = backward_kernel();
    const OnlyUnit only(Unit::none);
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        Attention few = attention_of({"", 2, 1, 16, 16}, problem_of({"", 2, 1, 16, 16, kCausal}, 3, 40000, dtype));
        Attention tiles = few;
        Unobserving observer;
        ASSERT_TRUE(tiles.backward(kernel, {.how = {.observer = &observer}}));
        for (const int threads : {1, 16}) {
            ASSERT_TRUE(few.backward(kernel, {.threads = threads}));
            expect_same(few, tiles);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Cpu, FewGradients, testing::ValuesIn(kCalls),
                         [](const auto& which) { return which.param.name; });

}  // namespace
}  // namespace tessera::cpu::matrix::few_gradients_test
