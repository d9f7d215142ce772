// SPDX-License-Identifier: Apache-2.0
//
// Compares the primitives of the matrix path with plain loops, on every matrix unit of this processor.
#include "units.hpp"

#include <cmath>
#include <limits>
#include <random>

namespace tessera::cpu::matrix::matrix_primitives_test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

INSTANTIATE_TEST_SUITE_P(Cpu, MatrixPrimitives, testing::Values(Unit::dot, Unit::amx), unit_label);

void randomise(std::mt19937& rng, Bf16* x, std::int64_t n) {
    std::normal_distribution<double> normal;
    for (std::int64_t i = 0; i < n; ++i) x[i] = from_double<Bf16>(normal(rng));
}
void randomise(std::mt19937& rng, float* x, std::int64_t n, float width = 1) {
    std::normal_distribution<float> normal(0, width);
    for (std::int64_t i = 0; i < n; ++i) x[i] = normal(rng);
}

/// Element (row, depth) of row tiles, and (depth, lane) of pair tiles.
Bf16& in_row_tiles(const Tiles& t, std::int64_t row, std::int64_t depth) {
    return t.data[row / 16 * t.row_step + depth / 32 * t.column_step + row % 16 * 32 + depth % 32];
}
Bf16& in_pair_tiles(const Tiles& t, std::int64_t depth, std::int64_t lane) {
    return t
        .data[depth / 32 * t.row_step + lane / 16 * t.column_step + depth % 32 / 2 * 32 + lane % 16 * 2 + depth % 2];
}

TEST_P(MatrixPrimitives, packs_every_form_with_zeros_around) {
    std::mt19937 rng(1);
    for (const std::int64_t rows : {1, 15, 16, 33, 64}) {
        for (const std::int64_t dim : {1, 24, 32, 80, 129}) {
            for (const std::int64_t step : {1, 3}) {
                const std::int64_t stride = dim * step + 5;
                Array<Bf16> from((rows + 2) * stride);
                randomise(rng, from, (rows + 2) * stride);
                const HeadRows view{reinterpret_cast<char*>(static_cast<Bf16*>(from)), DType::bf16, stride, step};
                const std::int64_t row_tiles = (rows + 31) / 32 * 2, dim_tiles = (dim + 31) / 32 * 2;
                for (const Form form : {Form::rows, Form::columns, Form::row_pairs, Form::column_pairs}) {
                    Array<Bf16> to(row_tiles * dim_tiles * kTileElements, Bf16{0x7FFF});
                    const bool along_rows = form == Form::rows || form == Form::row_pairs;
                    const Tiles tiles{to, (along_rows ? dim_tiles : row_tiles) * kTileElements, kTileElements};
                    EXPECT_TRUE(primitives().pack({view, 2, rows, dim, form, tiles}));
                    const std::int64_t padded_rows = form == Form::rows || form == Form::column_pairs
                                                         ? (rows + 15) / 16 * 16
                                                         : (rows + 31) / 32 * 32;
                    const std::int64_t padded_dim =
                        form == Form::rows || form == Form::column_pairs ? (dim + 31) / 32 * 32 : (dim + 15) / 16 * 16;
                    for (std::int64_t r = 0; r < padded_rows; ++r) {
                        for (std::int64_t c = 0; c < padded_dim; ++c) {
                            const Bf16 got = form == Form::rows        ? in_row_tiles(tiles, r, c)
                                             : form == Form::columns   ? in_row_tiles(tiles, c, r)
                                             : form == Form::row_pairs ? in_pair_tiles(tiles, r, c)
                                                                       : in_pair_tiles(tiles, c, r);
                            const unsigned expected = r < rows && c < dim ? from[(r + 2) * stride + c * step].bits : 0U;
                            ASSERT_EQ(got.bits, expected) << rows << " x " << dim << " at " << r << ", " << c;
                        }
                    }
                }
            }
        }
    }
}

TEST_P(MatrixPrimitives, finite_only_packs_0_for_nan_and_infinity_and_says_so) {
    Array<Bf16> from(32 * 32, Bf16{0x3F80}), to(kTileElements * 4);
    from[5] = Bf16{0x7FC0}, from[40] = Bf16{0xFF80}, from[41] = Bf16{0x7F7F};
    const HeadRows view{reinterpret_cast<char*>(static_cast<Bf16*>(from)), DType::bf16, 32, 1};
    const Tiles tiles{to, kTileElements, kTileElements};
    EXPECT_FALSE(primitives().pack({view, 0, 16, 32, Form::rows, tiles, true}));
    EXPECT_EQ(to[5].bits, 0);
    EXPECT_EQ(to[40].bits, 0);
    EXPECT_EQ(to[41].bits, 0x7F7F);
    EXPECT_TRUE(primitives().pack({view, 2, 16, 32, Form::rows, tiles, true}));
}

TEST_P(MatrixPrimitives, multiplies_every_shape) {
    std::mt19937 rng(2);
    for (const std::int64_t m : {1, 2, 3}) {
        for (const std::int64_t n : {1, 2, 3}) {
            for (const std::int64_t k : {1, 4}) {
                for (const bool add : {false, true}) {
                    Array<Bf16> a(m * k * kTileElements), b(n * k * kTileElements);
                    Array<float> c(m * n * 256), before(m * n * 256), maximum(n * 16, -1.0F);
                    randomise(rng, a, m * k * kTileElements), randomise(rng, b, n * k * kTileElements);
                    randomise(rng, c, m * n * 256);
                    std::copy_n(static_cast<float*>(c), m * n * 256, static_cast<float*>(before));
                    const Tiles at{a, k * kTileElements, kTileElements}, bt{b, n * kTileElements, kTileElements};
                    primitives().multiply({1, m, n, k, at, bt, c, n * 16, add, false, maximum});
                    for (std::int64_t j = 0; j < 16 * n; ++j) {
                        float largest = -1;
                        for (std::int64_t i = 0; i < 16 * m; ++i) {
                            double sum = add ? before[i * n * 16 + j] : 0;
                            for (std::int64_t d = 0; d < 32 * k; ++d)
                                sum += to_double(in_row_tiles(at, i, d)) * to_double(in_pair_tiles(bt, d, j));
                            ASSERT_NEAR(c[i * n * 16 + j], sum, 2e-5) << m << n << k << " at " << i << ", " << j;
                            largest = std::max(largest, c[i * n * 16 + j]);
                        }
                        ASSERT_EQ(maximum[j], largest);
                    }
                }
            }
        }
    }
}

TEST_P(MatrixPrimitives, rows_in_place_give_the_bits_of_packed_ones) {
    std::mt19937 rng(3);
    constexpr std::int64_t kRows = 48, kDim = 96, kStride = 160;
    Array<Bf16> from(kRows * kStride), packed(3 * 3 * kTileElements), b(3 * 2 * kTileElements);
    randomise(rng, from, kRows * kStride), randomise(rng, b, 3 * 2 * kTileElements);
    const HeadRows rows{reinterpret_cast<char*>(static_cast<Bf16*>(from)), DType::bf16, kStride, 1};
    const Tiles tiles{packed, 3 * kTileElements, kTileElements}, bt{b, 2 * kTileElements, kTileElements};
    primitives().pack({rows, 0, kRows, kDim, Form::rows, tiles});
    Array<float> expected(kRows * 32), got(kRows * 32);
    TileProduct product{.m = 3, .n = 2, .k = 3, .a = tiles, .b = bt, .c = expected, .c_stride = 32};
    primitives().multiply(product);
    product.a = {from, 16 * kStride, 32};
    product.a_stride = kStride;
    product.c = got;
    primitives().multiply(product);
    for (std::int64_t i = 0; i < kRows * 32; ++i) ASSERT_EQ(got[i], expected[i]) << i;
}

/// bf16 holds 8 bits: half a unit in the last place is up to 2^-8 of the value.
void expect_rounded(Bf16 got, double exact) { EXPECT_NEAR(to_double(got), exact, 0x1.01p-8 * std::abs(exact)); }

TEST_P(MatrixPrimitives, weights_alone_and_beside_a_product) {
    std::mt19937 rng(3);
    for (const std::int64_t keys : {1, 30, 32, 77, 512}) {
        for (const std::int64_t lanes : {16, 32}) {
            for (const bool drop : {false, true}) {
                Array<float> s(keys * lanes), factors(keys * lanes, 1.0F), m(lanes), l(lanes);
                randomise(rng, s, keys * lanes, 9);
                s[0] = -kInf;                                                      // one hidden key
                for (std::int64_t j = 0; j < keys; ++j) s[j * lanes + 1] = -kInf;  // a row without keys
                s[(keys - 1) * lanes + 2] = std::numeric_limits<float>::quiet_NaN();
                for (std::int64_t i = 0; drop && i < keys * lanes; i += 3) factors[i] = 0;
                const std::int64_t rows = (keys + 31) / 32 * 32;
                Array<Bf16> p(rows * lanes), p2(rows * lanes), a(4 * kTileElements), b(4 * kTileElements);
                Array<float> c(32 * 32), c2(32 * 32);
                randomise(rng, a, 4 * kTileElements), randomise(rng, b, 4 * kTileElements);
                Array<float> maximum(lanes, -kInf);
                primitives().maximum(s, keys, lanes, maximum);
                WeightsJob job{
                    .s = s, .keys = keys, .lanes = lanes, .scale = 0.25F, .maximum = maximum, .m = m, .l = l, .p = p};
                if (drop) job.factors = factors;
                primitives().weights(job);
                const Tiles tiles{p, lanes / 16 * kTileElements, kTileElements};
                for (std::int64_t i = 0; i < lanes; ++i) {
                    double sum = 0;
                    for (std::int64_t j = 0; j < rows; ++j) {
                        const bool none = j >= keys || s[j * lanes + i] == -kInf;
                        const double weight = none ? 0 : std::exp(0.25 * s[j * lanes + i] - m[i]);
                        sum += weight;
                        const Bf16 got = in_pair_tiles(tiles, j, i);
                        if (std::isnan(weight)) EXPECT_TRUE(std::isnan(to_float(got)));
                        else expect_rounded(got, drop && j < keys ? weight * factors[j * lanes + i] : weight);
                    }
                    if (std::isnan(sum)) EXPECT_TRUE(std::isnan(l[i]));
                    else EXPECT_NEAR(l[i], sum, 1e-6 * sum);
                }
                EXPECT_EQ(m[1], -kInf);
                const TileProduct product{1, 2, 2, 2, {a, 1024, 512}, {b, 1024, 512}, c, 32};
                primitives().multiply(product);
                TileProduct again = product;
                again.c = c2;
                job.p = p2;
                primitives().multiply_beside_weights({&again, 1}, job);
                EXPECT_EQ(std::memcmp(p, p2, static_cast<std::size_t>(rows * lanes) * sizeof(Bf16)), 0);
                EXPECT_EQ(std::memcmp(c, c2, 32 * 32 * sizeof(float)), 0);
            }
        }
    }
}

TEST_P(MatrixPrimitives, gradient_of_the_scores) {
    std::mt19937 rng(4);
    const std::int64_t keys = 45, rows = 64, lanes = 64;
    Array<float> s(keys * lanes), dp(keys * lanes), lse(lanes, 3.0F), delta(lanes), norm(lanes), factors(keys * lanes),
        slope(keys * lanes), visible(keys * lanes, 1.0F);
    randomise(rng, s, keys * lanes, 2), randomise(rng, dp, keys * lanes), randomise(rng, delta, lanes);
    randomise(rng, norm, lanes), randomise(rng, slope, keys * lanes);
    for (std::int64_t i = 0; i < keys * lanes; i += 2) factors[i] = 1;
    for (std::int64_t i = 0; i < lanes; i += 3) lse[i] = -0.5F;  // below many scores, whose weights are cut to 1
    for (std::int64_t i = 0; i < keys * lanes; i += 5) visible[i] = 0, s[i] = dp[i] = std::nanf("");
    Array<Bf16> p(rows * lanes), ds(rows * lanes), pairs(rows * lanes);
    const Tiles p_rows{p, 2 * kTileElements, kTileElements}, ds_rows{ds, 2 * kTileElements, kTileElements};
    const Tiles ds_pairs{pairs, 4 * kTileElements, kTileElements};
    for (const bool all : {false, true}) {
        GradientJob job{.s = s, .dp = dp, .keys = keys, .lanes = lanes, .scale = 0.5F, .lse = lse, .delta = delta};
        job.visible = visible;
        if (all) job.norm = norm, job.factors = factors, job.kept = 1.25F, job.cap_slope = slope;
        job.p_rows = p_rows, job.ds_rows = ds_rows, job.ds_pairs = ds_pairs;
        primitives().gradient(job);
        for (std::int64_t j = 0; j < rows; ++j) {
            for (std::int64_t i = 0; i < lanes; ++i) {
                const std::int64_t at = j * lanes + i;
                double weight = 0, slope_of_s = 0;
                if (j < keys && visible[at] != 0) {
                    weight = std::exp(std::min(0.0, 0.5 * s[at] - lse[i])) * (all ? norm[i] : 1);
                    slope_of_s = weight * (dp[at] * (all ? 1.25 * factors[at] : 1) - delta[i]) * (all ? slope[at] : 1);
                    weight *= all ? factors[at] : 1;
                }
                expect_rounded(in_row_tiles(p_rows, j, i), weight);
                EXPECT_NEAR(to_double(in_row_tiles(ds_rows, j, i)), slope_of_s, 0x1.1p-8 * std::abs(slope_of_s) + 1e-6);
                EXPECT_EQ(in_row_tiles(ds_rows, j, i).bits, in_pair_tiles(ds_pairs, j, i).bits);
            }
        }
    }
}

TEST_P(MatrixPrimitives, weighted_sums_of_visible_keys) {
    std::mt19937 rng(5);
    const std::int64_t keys = 29, lanes = 64;
    Array<float> s(keys * lanes), dp(keys * lanes), lse(lanes, 3.0F), norm(lanes), factors(keys * lanes),
        visible(keys * lanes, 1.0F);
    randomise(rng, s, keys * lanes, 2), randomise(rng, dp, keys * lanes), randomise(rng, norm, lanes);
    for (std::int64_t i = 0; i < keys * lanes; i += 2) factors[i] = 1;
    for (std::int64_t i = 0; i < lanes; i += 3) lse[i] = -0.5F;  // below many scores, whose weights are cut to 1
    for (std::int64_t i = 0; i < keys * lanes; i += 5) visible[i] = 0, s[i] = dp[i] = std::nanf("");
    for (const bool all : {false, true}) {
        GradientJob job{.s = s, .dp = dp, .keys = keys, .lanes = lanes, .scale = 0.5F, .lse = lse, .visible = visible};
        if (all) job.norm = norm, job.factors = factors, job.kept = 1.25F;
        Array<double> weights(lanes, 2.0), products(lanes, 2.0);
        primitives().add_weighted_sums(job, weights, products);
        for (std::int64_t i = 0; i < lanes; ++i) {
            double sum = 2, product = 2;
            for (std::int64_t at = i; at < keys * lanes; at += lanes) {
                if (visible[at] == 0) continue;
                const double weight = std::exp(std::min(0.0, 0.5 * s[at] - lse[i])) * (all ? norm[i] : 1);
                sum += weight;
                product += weight * dp[at] * (all ? 1.25 * factors[at] : 1);
            }
            EXPECT_NEAR(weights[i], sum, 1e-5);
            EXPECT_NEAR(products[i], product, 1e-5);
        }
    }
}

/// The number that the parts of an element add up to.
double sum_of_parts(const Tiles& tiles, Form form, std::int64_t row, std::int64_t column) {
    double sum = 0;
    for (int part = 0; part < 3; ++part) {
        Tiles of_part = tiles;
        of_part.data += part * kTileElements;
        const bool transposed = form == Form::columns || form == Form::column_pairs;
        const std::int64_t i = transposed ? column : row, j = transposed ? row : column;
        const bool rows = form == Form::rows || form == Form::columns;
        sum += to_double(rows ? in_row_tiles(of_part, i, j) : in_pair_tiles(of_part, i, j));
    }
    return sum;
}

TEST_P(MatrixPrimitives, parts_of_fp32_add_up_to_it_exactly) {
    constexpr std::int64_t kRows = 37, kDim = 45, kTiles = 4 * 4;
    for (const std::int64_t step : {1, 3}) {
        Array<float> from(kRows * kDim * step);
        std::mt19937 rng(6);
        randomise(rng, from, kRows * kDim * step);
        for (std::int64_t i = 0; i < kRows * kDim * step; i += 7)
            from[i] *= std::ldexp(1.0F, static_cast<int>(i % 200) - 100);
        from[0] = 0x1.fffffep126F, from[step] = -0x1.010101p-100F, from[2 * step] = 1.0F + 0x1p-23F;
        const HeadRows view{reinterpret_cast<char*>(static_cast<float*>(from)), DType::fp32, kDim * step, step};
        for (const Form form : {Form::rows, Form::columns, Form::row_pairs, Form::column_pairs}) {
            Array<Bf16> to(3 * kTiles * kTileElements, Bf16{0x7FFF});
            const Tiles tiles{to, 4 * 3 * kTileElements, 3 * kTileElements};
            EXPECT_TRUE(primitives().pack({view, 0, kRows, kDim, form, tiles}));
            for (std::int64_t r = 0; r < kRows; ++r) {
                for (std::int64_t c = 0; c < kDim; ++c) {
                    ASSERT_EQ(sum_of_parts(tiles, form, r, c), from[(r * kDim + c) * step]) << r << ", " << c;
                }
            }
        }
    }
}

TEST_P(MatrixPrimitives, unpackable_fp32_becomes_0_and_is_told) {
    for (const float bad : {kInf, -kInf, std::nanf(""), 0x1p127F, -0x1.8p127F}) {
        Array<float> from(32 * 32, 1.5F);
        Array<Bf16> to(2 * 3 * kTileElements);
        from[33] = bad;
        const HeadRows view{reinterpret_cast<char*>(static_cast<float*>(from)), DType::fp32, 32, 1};
        const Tiles tiles{to, 3 * kTileElements, 3 * kTileElements};
        EXPECT_FALSE(primitives().pack({view, 0, 32, 32, Form::rows, tiles}));
        EXPECT_EQ(sum_of_parts(tiles, Form::rows, 1, 1), 0);
        EXPECT_EQ(sum_of_parts(tiles, Form::rows, 1, 2), 1.5);
        EXPECT_TRUE(primitives().pack({view, 2, 30, 32, Form::rows, tiles}));
    }
}

TEST_P(MatrixPrimitives, a_product_of_parts_is_an_fp32_product) {
    std::mt19937 rng(7);
    constexpr std::int64_t kDepth = 128;
    Array<float> x(32 * kDepth), y(32 * kDepth);
    randomise(rng, x, 32 * kDepth), randomise(rng, y, 32 * kDepth);
    Array<Bf16> a(3 * 8 * kTileElements), b(3 * 8 * kTileElements);
    const Tiles at{a, 4 * 3 * kTileElements, 3 * kTileElements}, bt{b, 2 * 3 * kTileElements, 3 * kTileElements};
    const auto rows_of = [](float* data) { return HeadRows{reinterpret_cast<char*>(data), DType::fp32, kDepth, 1}; };
    primitives().pack({rows_of(x), 0, 32, kDepth, Form::rows, at});
    primitives().pack({rows_of(y), 0, 32, kDepth, Form::column_pairs, bt, false, 0.5F});
    for (const bool small_first : {false, true}) {
        Array<float> c(32 * 32);
        primitives().multiply({3, 2, 2, kDepth / 32, at, bt, c, 32, false, small_first});
        double worst = 0;
        for (std::int64_t i = 0; i < 32; ++i) {
            for (std::int64_t j = 0; j < 32; ++j) {
                double sum = 0, size = 0;
                for (std::int64_t d = 0; d < kDepth; ++d) {
                    const double term = 0.5 * x[i * kDepth + d] * y[j * kDepth + d];
                    sum += term, size += std::abs(term);
                }
                worst = std::max(worst, std::abs(c[i * 32 + j] - sum) / size);
            }
        }
        EXPECT_LT(worst, small_first ? 0x1p-22 : 0x1p-21);
    }
}

TEST_P(MatrixPrimitives, weights_in_parts_are_fp32_weights) {
    std::mt19937 rng(8);
    for (const std::int64_t keys : {1, 40, 64}) {
        constexpr std::int64_t kLanes = 32;
        Array<float> s(keys * kLanes), m(kLanes), l(kLanes), maximum(kLanes, -kInf);
        randomise(rng, s, keys * kLanes, 5);
        s[0] = -200;
        Array<Bf16> p(3 * 64 * kLanes);
        primitives().maximum(s, keys, kLanes, maximum);
        primitives().weights(
            {.s = s, .keys = keys, .lanes = kLanes, .maximum = maximum, .m = m, .l = l, .parts = 3, .p = p});
        const Tiles tiles{p, 2 * 3 * kTileElements, 3 * kTileElements};
        for (std::int64_t i = 0; i < kLanes; ++i) {
            double sum = 0;
            for (std::int64_t j = 0; j < keys; ++j) {
                const double weight = std::exp(static_cast<double>(s[j * kLanes + i]) - m[i]);
                EXPECT_NEAR(sum_of_parts(tiles, Form::row_pairs, j, i), weight, 4e-6 * weight + 0x1p-100);
                sum += weight;
            }
            EXPECT_NEAR(l[i], sum, 1e-6 * sum);
        }
    }
}

}  // namespace
}  // namespace tessera::cpu::matrix::matrix_primitives_test
