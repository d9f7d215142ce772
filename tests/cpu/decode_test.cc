// SPDX-License-Identifier: Apache-2.0
//
// Few queries on a matrix unit: the kernel, and its GEMM with V whose rows are queries, on every matrix unit of this
// processor.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "check/run_case.hpp"
#include "kernels/support.hpp"
#include "long_run.hpp"
#include "units.hpp"

namespace tessera::cpu::matrix::decode_test {
namespace {

class DecodeWords : public MatrixPrimitives {};
INSTANTIATE_TEST_SUITE_P(Cpu, DecodeWords, testing::Values(Unit::dot, Unit::amx), unit_label);

/// P [keys, 16] as pair tiles and V [keys, dim] with gaps between rows, for both forms of the GEMM.
struct Operands {
    std::int64_t keys;
    std::int64_t dim;
    DType dtype;
    int parts = parts_of(dtype);
    std::int64_t key_tiles = (keys + 31) / 32;
    std::int64_t dim_tiles = (dim + 15) / 16;
    std::int64_t stride = dim + 3;
    Array<float> v_fp32{keys * stride};
    Array<Bf16> v_bf16{keys * stride};
    Array<Bf16> p{key_tiles * parts * kTileElements};

    Operands(const Primitives& primitives, std::int64_t n, std::int64_t d, DType type) : keys(n), dim(d), dtype(type) {
        std::mt19937 rng(11);
        std::normal_distribution<float> normal;
        for (std::int64_t i = 0; i < keys * stride; ++i) {
            v_fp32[i] = normal(rng);
            v_bf16[i] = from_double<Bf16>(v_fp32[i]);
        }
        Array<float> s(keys * 16), m(16), l(16), maximum(16, -std::numeric_limits<float>::infinity());
        for (std::int64_t i = 0; i < keys * 16; ++i) s[i] = normal(rng);
        primitives.maximum(s, keys, 16, maximum);
        primitives.weights(
            {.s = s, .keys = keys, .lanes = 16, .maximum = maximum, .m = m, .l = l, .parts = parts, .p = p});
    }
    HeadRows v() {
        char* data = dtype == DType::fp32 ? reinterpret_cast<char*>(static_cast<float*>(v_fp32))
                                          : reinterpret_cast<char*>(static_cast<Bf16*>(v_bf16));
        return {data, dtype, stride, 1};
    }
    /// O^T = V^T P: [16 * dim_tiles, 16]
    bool columns(const Primitives& primitives, float* o_t) {
        Array<Bf16> packed(dim_tiles * key_tiles * parts * kTileElements);
        const Tiles tiles{packed, parts * kTileElements, dim_tiles * parts * kTileElements};
        const bool all = primitives.pack({v(), 0, keys, dim, Form::columns, tiles, true});
        primitives.multiply({parts, dim_tiles, 1, key_tiles, tiles, {p, parts * kTileElements, 0}, o_t, 16});
        return all;
    }
    /// O = P V: [16, 16 * dim_tiles]; P becomes row tiles.
    bool rows(const Primitives& primitives, float* o, bool from_memory) {
        Array<Bf16> buffer(kRowsBuffer * dim_tiles * parts * kTileElements);
        return primitives.multiply_rows({parts,
                                         p,
                                         {.from = v(),
                                          .rows = keys,
                                          .dim = dim,
                                          .form = Form::row_pairs,
                                          .to = {buffer, 0, 0},
                                          .finite_only = true,
                                          .from_memory = from_memory},
                                         o,
                                         dim_tiles * 16});
    }
};

TEST_P(DecodeWords, product_of_rows_has_the_bits_of_that_of_columns) {
    for (const DType dtype : {DType::bf16, DType::fp32}) {
        for (const std::int64_t keys : {1, 31, 32, 70, 512}) {
            for (const std::int64_t dim : {1, 16, 40, 64, 80, 128, 200}) {
                for (const bool special : {false, true}) {
                    Operands x(primitives(), keys, dim, dtype);
                    if (special) {
                        x.v_fp32[(keys - 1) * x.stride] = std::numeric_limits<float>::quiet_NaN();
                        x.v_bf16[(keys - 1) * x.stride] = Bf16{0xFF80};
                    }
                    Array<float> o_t(x.dim_tiles * 256), o(x.dim_tiles * 256, 7.0F);
                    EXPECT_EQ(x.columns(primitives(), o_t), !special);
                    EXPECT_EQ(x.rows(primitives(), o, keys % 2 == 0), !special);
                    for (std::int64_t q = 0; q < 16; ++q) {
                        for (std::int64_t c = 0; c < dim; ++c) {
                            ASSERT_EQ(o[q * x.dim_tiles * 16 + c], o_t[c * 16 + q])
                                << name_of(dtype) << " " << keys << " keys, " << dim << " columns: " << q << ", " << c;
                        }
                    }
                }
            }
        }
    }
}

TEST_P(DecodeWords, transpose_makes_row_tiles_of_pair_tiles_and_back) {
    Array<Bf16> from(kTileElements), to(kTileElements);
    for (int i = 0; i < kTileElements; ++i) from[i] = Bf16{static_cast<std::uint16_t>(i)};
    primitives().transpose(from, 16, to, 16);
    for (int depth = 0; depth < 32; ++depth) {
        for (int lane = 0; lane < 16; ++lane) {
            ASSERT_EQ(to[lane * 32 + depth].bits, from[depth / 2 * 32 + lane * 2 + depth % 2].bits);
        }
    }
    primitives().transpose(to, 16, to, 16);
    for (int i = 0; i < kTileElements; ++i) ASSERT_EQ(to[i].bits, from[i].bits);
}

/// Up to 16 queries on each kv head: whole and by blocks, in place and packed, with keys that not all queries see.
TEST(MatrixKernels, few_queries_are_right_on_every_unit) {
    for (const Unit chosen : {Unit::dot, Unit::amx}) {
        if (!has_unit(chosen)) continue;
        const OnlyUnit only(chosen);
        int ran = 0;
        for (std::uint64_t index = 0; index < 120; ++index) {
            check::Case c = check::random_case(random_seed(77), index);
            Problem& p = c.problem;
            constexpr std::int64_t kQueries[] = {1, 2, 7, 8, 15, 16};
            constexpr std::int64_t kKeys[] = {1, 33, 500, 513, 1300};
            constexpr std::int64_t kDims[] = {1, 32, 40, 64, 80, 128, 256};
            if (p.ragged || p.kv_lengths || p.dtype == DType::fp16) continue;
            p.batch = 1 + static_cast<std::int64_t>(index % 2);
            p.len_q = kQueries[index % 6];
            p.len_kv = kKeys[index % 5];
            p.head_dim = kDims[index % 7];
            p.head_dim_v = kDims[index / 7 % 7];
            p.heads_kv = 2;
            p.heads_q = p.len_q == 1 ? 16 : 2;  // one query per head: the heads of a group are stacked
            c.tile.reset();
            c.threads = index % 3 == 0 ? 1 : 16;
            check::CaseRunner runner(c);
            for (const KernelInfo& kernel : kernels()) {
                if (kernel.name != "cpu.fa2.forward") continue;
                const check::Outcome outcome = runner.run(kernel);
                ran += outcome.refusal ? 0 : 1;
                EXPECT_TRUE(outcome.pass()) << "unit " << static_cast<int>(chosen) << ", case " << index << "\n"
                                            << outcome.report.describe();
            }
        }
        EXPECT_GT(ran, 50);
    }
}

KernelInfo kernel(const std::string& name) {
    for (const KernelInfo& info : kernels()) {
        if (info.name == name) return info;
    }
    ADD_FAILURE() << "no kernel " << name;
    return {};
}

/// One query head on a kv head takes rows, two take columns. Whole and by blocks, O and LSE have the same bits.
TEST(MatrixKernels, few_queries_have_the_bits_of_many_heads) {
    const KernelInfo forward = kernel("cpu.fa2.forward");
    for (const Unit chosen : {Unit::dot, Unit::amx}) {
        if (!has_unit(chosen)) continue;
        const OnlyUnit only(chosen);
        for (const DType dtype : {DType::bf16, DType::fp32}) {
            for (const std::int64_t len_kv : {40, 513, 2100}) {
                for (const double special : {0.0, std::nan(""), HUGE_VAL, 0x1p-126}) {
                    Problem p = check::make_problem(2, 7, len_kv, 2, 1, 40, dtype);
                    p.mask.window_left = len_kv / 2;
                    check::Attention two(p, 3);
                    if (special != 0) two.k.set(special, 0, len_kv - 1, 0, 3), two.v.set(special, 1, len_kv - 2, 0, 5);
                    if (special != 0) two.q.set(special, 1, 2, 0, 0);
                    ASSERT_TRUE(two.forward(forward));
                    p.heads_q = 1;
                    check::Attention one(p, 3);
                    one.k = two.k, one.v = two.v;
                    for (std::int64_t b = 0; b < 2; ++b) {
                        for (std::int64_t i = 0; i < 7; ++i) {
                            for (std::int64_t c = 0; c < 40; ++c) one.q.set(two.q.get(b, i, 0, c), b, i, 0, c);
                        }
                    }
                    for (const int threads : {1, 16}) {
                        ASSERT_TRUE(one.forward(forward, {.threads = threads}));
                        const auto same = [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); };
                        for (std::int64_t b = 0; b < 2; ++b) {
                            for (std::int64_t i = 0; i < 7; ++i) {
                                EXPECT_TRUE(same(one.lse.get(b, 0, i), two.lse.get(b, 0, i))) << special;
                                for (std::int64_t c = 0; c < 40; ++c) {
                                    ASSERT_TRUE(same(one.o.get(b, i, 0, c), two.o.get(b, i, 0, c)))
                                        << name_of(dtype) << " " << len_kv << " keys, " << threads << " threads, "
                                        << special << ": " << one.o.get(b, i, 0, c) << ", " << two.o.get(b, i, 0, c);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A panel with a NaN takes another store path. Its other rows keep their bits, including subnormal ones, whichever
/// panels share the task.
TEST(MatrixKernels, subnormal_results_do_not_depend_on_neighbours) {
    for (const Unit chosen : {Unit::dot, Unit::amx}) {
        if (!has_unit(chosen)) continue;
        const OnlyUnit only(chosen);
        check::Attention x(check::make_problem(1, 2, 20000, 1, 1, 16, DType::bf16));
        x.q.fill_value(0);
        x.v.fill_value(0);
        for (std::int64_t key = 1; key < 20000; key += 2) x.v.set(0x1p-126, 0, key, 0, 0);
        x.q.set(std::nan(""), 0, 1, 0, 0);
        for (const int threads : {1, 16}) {
            ASSERT_TRUE(x.forward(kernel("cpu.fa2.forward"), {.threads = threads}));
            EXPECT_EQ(x.o.get(0, 0, 0, 0), 0x1p-127) << threads << " threads";
        }
    }
}

/// Memory filled with 0xFF holds NaNs whose bits become 0 under an integer addition.
TEST(MatrixKernels, nan_of_any_bits_is_told) {
    for (const Unit chosen : {Unit::none, Unit::dot, Unit::amx}) {
        if (!has_unit(chosen)) continue;
        const OnlyUnit only(chosen);
        for (const std::int64_t len_q : {2, 40}) {
            Problem p = check::make_problem(1, len_q, 64, 1, 1, 16, DType::bf16);
            p.bias = true;
            check::Attention x(p);
            std::memset(x.bias.view.at<float>(0, 0, 1, 9), 0xFF, sizeof(float));
            check::Attention y = x;
            ASSERT_TRUE(x.forward(kernel("cpu.fa2.forward")));
            EXPECT_TRUE(std::isnan(x.lse.get(0, 0, 1)));
            y.prepare_backward();
            std::memset(y.lse.view.at<float>(0, 0, 1), 0xFF, sizeof(float));
            ASSERT_TRUE(y.backward(kernel("cpu.fa2.backward")));
            for (std::int64_t c = 0; c < 16; ++c) {
                EXPECT_TRUE(std::isnan(x.o.get(0, 1, 0, c)));
                EXPECT_FALSE(std::isnan(x.o.get(0, 0, 0, c)));
                EXPECT_TRUE(std::isnan(y.dq.get(0, 1, 0, c)));
                EXPECT_FALSE(std::isnan(y.dq.get(0, 0, 0, c)));
            }
        }
    }
}

/// Blocks beyond a sequence's own keys are no tiles.
TEST(MatrixKernels, ragged_sequences_count_their_own_tiles) {
    const std::vector<std::int64_t> of_q = {4, 4, 4}, of_kv = {1300, 40, 0};
    check::Attention x(check::make_ragged(of_q, of_kv, 1, 1, 16, DType::bf16), 1, of_q, of_kv);
    for (const Unit chosen : {Unit::none, Unit::dot, Unit::amx}) {
        if (!has_unit(chosen)) continue;
        const OnlyUnit only(chosen);
        for (const int threads : {1, 16}) {
            TileCounters counters;
            ASSERT_TRUE(x.forward(kernel("cpu.fa2.forward"),
                                  {.threads = threads, .tile = Tile{32, 512}, .how = {.counters = &counters}}));
            EXPECT_EQ(counters.full, 4) << static_cast<int>(chosen);
            EXPECT_EQ(counters.partial, 0);
            EXPECT_EQ(counters.skipped, 0);
            EXPECT_EQ(counters.computed_pairs, 4 * 1340);
        }
    }
}

}  // namespace
}  // namespace tessera::cpu::matrix::decode_test
