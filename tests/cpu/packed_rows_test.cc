// SPDX-License-Identifier: Apache-2.0
//
// Few queries on packed tiles: their product with V as rows, on every matrix unit of this processor, and the kernel.
#include <cmath>
#include <limits>
#include <random>

#include "check/run_case.hpp"
#include "packed.hpp"

namespace tessera::cpu::tile {
namespace {

class PackedRows : public Packed {};
INSTANTIATE_TEST_SUITE_P(Cpu, PackedRows, testing::Values(Unit::dot, Unit::amx), unit_label);

/// P [keys, 16] as pair tiles and V [keys, dim] with gaps between rows, for a product in both ways.
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

    Operands(const PackedWords& words, std::int64_t n, std::int64_t d, DType type) : keys(n), dim(d), dtype(type) {
        std::mt19937 rng(11);
        std::normal_distribution<float> normal;
        for (std::int64_t i = 0; i < keys * stride; ++i) {
            v_fp32[i] = normal(rng);
            v_bf16[i] = from_double<Bf16>(v_fp32[i]);
        }
        Array<float> s(keys * 16), m(16), l(16), maximum(16, -std::numeric_limits<float>::infinity());
        for (std::int64_t i = 0; i < keys * 16; ++i) s[i] = normal(rng);
        words.maximum(s, keys, 16, maximum);
        words.weights({.s = s, .keys = keys, .lanes = 16, .maximum = maximum, .m = m, .l = l, .parts = parts, .p = p});
    }
    HeadRows v() {
        char* data = dtype == DType::fp32 ? reinterpret_cast<char*>(static_cast<float*>(v_fp32))
                                          : reinterpret_cast<char*>(static_cast<Bf16*>(v_bf16));
        return {data, dtype, stride, 1};
    }
    /// O^T = V^T P: [16 * dim_tiles, 16]
    bool columns(const PackedWords& words, float* o_t) {
        Array<Bf16> packed(dim_tiles * key_tiles * parts * kTileElements);
        const Tiles tiles{packed, parts * kTileElements, dim_tiles * parts * kTileElements};
        const bool all = words.pack({v(), 0, keys, dim, Form::columns, tiles, true});
        words.multiply({parts, dim_tiles, 1, key_tiles, tiles, {p, parts * kTileElements, 0}, o_t, 16});
        return all;
    }
    /// O = P V: [16, 16 * dim_tiles]; P becomes row tiles.
    bool rows(const PackedWords& words, float* o, bool from_memory) {
        Array<Bf16> buffer(kRowsBuffer * dim_tiles * parts * kTileElements);
        return words.multiply_rows({parts,
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

TEST_P(PackedRows, product_of_rows_has_the_bits_of_that_of_columns) {
    for (const DType dtype : {DType::bf16, DType::fp32}) {
        for (const std::int64_t keys : {1, 31, 32, 70, 512}) {
            for (const std::int64_t dim : {1, 16, 40, 64, 80, 128, 200}) {
                for (const bool special : {false, true}) {
                    Operands x(words(), keys, dim, dtype);
                    if (special) {
                        x.v_fp32[(keys - 1) * x.stride] = std::numeric_limits<float>::quiet_NaN();
                        x.v_bf16[(keys - 1) * x.stride] = Bf16{0xFF80};
                    }
                    Array<float> o_t(x.dim_tiles * 256), o(x.dim_tiles * 256, 7.0F);
                    EXPECT_EQ(x.columns(words(), o_t), !special);
                    EXPECT_EQ(x.rows(words(), o, keys % 2 == 0), !special);
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

TEST_P(PackedRows, transpose_makes_row_tiles_of_pair_tiles_and_back) {
    Array<Bf16> from(kTileElements), to(kTileElements);
    for (int i = 0; i < kTileElements; ++i) from[i] = Bf16{static_cast<std::uint16_t>(i)};
    words().transpose(from, 16, to, 16);
    for (int depth = 0; depth < 32; ++depth) {
        for (int lane = 0; lane < 16; ++lane) {
            ASSERT_EQ(to[lane * 32 + depth].bits, from[depth / 2 * 32 + lane * 2 + depth % 2].bits);
        }
    }
    words().transpose(to, 16, to, 16);
    for (int i = 0; i < kTileElements; ++i) ASSERT_EQ(to[i].bits, from[i].bits);
}

/// Up to 16 queries on each head of keys: whole and by blocks, in place and packed, with keys that not all queries see.
TEST(PackedKernels, few_queries_are_right_on_every_unit) {
    for (const Unit chosen : {Unit::dot, Unit::amx}) {
        if (!has_unit(chosen)) continue;
        const OnlyUnit only(chosen);
        int ran = 0;
        for (std::uint64_t index = 0; index < 120; ++index) {
            check::Case c = check::random_case(77, index);
            Problem& p = c.problem;
            constexpr std::int64_t kQueries[] = {1, 2, 7, 8, 15, 16};
            constexpr std::int64_t kKeys[] = {1, 33, 500, 513, 1300};
            constexpr std::int64_t kDims[] = {1, 32, 40, 64, 80, 128, 256};
            if (p.ragged || p.dtype == DType::fp16) continue;
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

}  // namespace
}  // namespace tessera::cpu::tile
