// SPDX-License-Identifier: Apache-2.0
//
// Compares each tile primitive with plain loops, on every instruction set that this processor has.
#include "cpu/simd/primitives.hpp"

#include <cmath>
#include <limits>
#include <random>

#include "core/numeric.hpp"
#include "floats.hpp"
#include "targets.hpp"

namespace tessera::cpu::simd_primitives_test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

class LaneWords : public EachTarget {};
INSTANTIATE_TEST_SUITE_P(Cpu, LaneWords, testing::ValuesIn(usable_targets()), target_label);

TEST_P(LaneWords, runs_on_the_target_it_is_told) { EXPECT_EQ(simd::target_name(), hwy::TargetName(GetParam())); }

TEST_P(LaneWords, matmul_every_shape_into_every_mode) {
    std::mt19937 rng(1);
    for (const std::int64_t m : {1, 5, 6, 7, 64}) {
        for (const std::int64_t n : {16, 32, 48, 64, 80, 144}) {
            for (const std::int64_t k : {0, 1, 3, 64}) {
                for (const bool transposed : {false, true}) {
                    for (const simd::Into into : {simd::Into::overwrite, simd::Into::add, simd::Into::scaled_add}) {
                        Floats a(m * k + 1), b(k * n), c(m * n), scale(n);
                        a.randomise(rng, m * k), b.randomise(rng, k * n), c.randomise(rng, m * n),
                            scale.randomise(rng, n);
                        std::vector<double> expected(static_cast<std::size_t>(m * n));
                        for (std::int64_t i = 0; i < m; ++i) {
                            for (std::int64_t j = 0; j < n; ++j) {
                                double sum = into == simd::Into::overwrite ? 0 : c[i * n + j];
                                if (into == simd::Into::scaled_add) sum *= scale[j];
                                for (std::int64_t kk = 0; kk < k; ++kk) {
                                    sum +=
                                        static_cast<double>(transposed ? a[kk * m + i] : a[i * k + kk]) * b[kk * n + j];
                                }
                                expected[static_cast<std::size_t>(i * n + j)] = sum;
                            }
                        }
                        simd::matmul({.m = m,
                                      .n = n,
                                      .k = k,
                                      .a = a,
                                      .a_row = transposed ? 1 : k,
                                      .a_k = transposed ? m : 1,
                                      .b = b,
                                      .b_stride = n,
                                      .c = c,
                                      .c_stride = n,
                                      .into = into,
                                      .lane_scale = scale});
                        for (std::int64_t i = 0; i < m * n; ++i) {
                            ASSERT_NEAR(c[i], expected[static_cast<std::size_t>(i)], 2e-5)
                                << m << " " << n << " " << k << " at " << i;
                        }
                    }
                }
            }
        }
    }
}

TEST_P(LaneWords, hidden_pairs_add_nothing_and_visible_ones_the_same_bits) {
    std::mt19937 rng(2);
    constexpr std::int64_t kKeys = 20, kLanes = 32, kDim = 7;
    const simd::TilePosition position{Mask{.causal = Causal::bottom_right}.bind(32, 30), 0, 4};
    Floats p(kKeys * kLanes), v(kKeys * kDim), o(kDim * kLanes), with_nan(kDim * kLanes);
    p.randomise(rng, kKeys * kLanes), v.randomise(rng, kKeys * kDim);
    simd::fill_masked(position, kKeys, p, kLanes, 0.0F);
    simd::Product product{.m = kDim,
                          .n = kLanes,
                          .k = kKeys,
                          .a = v,
                          .a_row = 1,
                          .a_k = kDim,
                          .b = p,
                          .b_stride = kLanes,
                          .c = o,
                          .c_stride = kLanes};
    simd::matmul(product);
    for (std::int64_t c = 0; c < kDim; ++c)
        v[15 * kDim + c] = c % 2 ? std::nanf("") : kInf;  // key 19: hidden from queries < 21
    product.c = with_nan;
    simd::matmul_hidden_keys(product, position);
    for (std::int64_t c = 0; c < kDim; ++c) {
        for (std::int64_t i = 0; i < kLanes; ++i) {
            const bool sees = position.band.visible(i, position.kv + 15);
            ASSERT_EQ(std::isfinite(with_nan[c * kLanes + i]), !sees) << c << " " << i;
            ASSERT_TRUE(sees || with_nan[c * kLanes + i] == o[c * kLanes + i]);
        }
    }
}

TEST_P(LaneWords, loads_and_stores_round_like_the_scalar_conversions) {
    std::mt19937 rng(3);
    constexpr std::int64_t kRows = 21, kDim = 37;
    std::vector<float> values(kRows * kDim);
    for (float& x : values) {
        x = std::bit_cast<float>(static_cast<std::uint32_t>(rng()));
        if (rng() % 2) x = std::ldexp(std::normal_distribution<float>()(rng), static_cast<int>(rng() % 40) - 30);
    }
    Floats rows(kRows * simd::padded(kDim)), lanes(kDim * simd::padded(kRows)), ones(simd::padded(kRows), 1.0F);
    const HeadRows source{reinterpret_cast<char*>(values.data()), DType::fp32, kDim, 1};
    simd::load_rows(source, 0, kRows, kDim, rows, simd::padded(kDim));
    simd::load_transposed(source, 0, kRows, kDim, 1.0F, lanes, simd::padded(kRows));
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16, DType::fp64}) {
        for (const std::int64_t column_stride : {1, 3}) {
            std::vector<std::byte> a(kRows * kDim * 3 * 8, std::byte{0x5A}), b = a;
            const HeadRows by_rows{reinterpret_cast<char*>(a.data()), dtype, kDim * column_stride, column_stride};
            const HeadRows by_lanes{reinterpret_cast<char*>(b.data()), dtype, kDim * column_stride, column_stride};
            simd::store_rows(rows, simd::padded(kDim), kRows, kDim, 1.0F, by_rows, 0);
            simd::store_transposed(lanes, simd::padded(kRows), kRows, kDim, ones, by_lanes, 0);
            for (std::int64_t r = 0; r < kRows; ++r) {
                for (std::int64_t c = 0; c < kDim; ++c) {
                    double expected = 0;
                    store_from_double(&expected, dtype, values[static_cast<std::size_t>(r * kDim + c)]);
                    expected = load_as_double(&expected, dtype);
                    for (const HeadRows& rows_of : {by_rows, by_lanes}) {
                        const double got = load_as_double(rows_of.at(r, c), dtype);
                        ASSERT_TRUE(got == expected || (std::isnan(got) && std::isnan(expected)))
                            << name_of(dtype) << " " << r << " " << c;
                    }
                }
            }
            Floats back(kRows * simd::padded(kDim), std::nanf(""));
            simd::load_rows(by_rows, 0, kRows, kDim, back, simd::padded(kDim));
            for (std::int64_t r = 0; r < kRows; ++r) {
                for (std::int64_t c = 0; c < simd::padded(kDim); ++c) {
                    const float expected =
                        c < kDim ? static_cast<float>(load_as_double(by_rows.at(r, c), dtype)) : 0.0F;
                    const float got = back[r * simd::padded(kDim) + c];
                    ASSERT_TRUE(got == expected || (std::isnan(got) && std::isnan(expected)));
                }
            }
        }
    }
}

TEST_P(LaneWords, load_transposed_zeroes_lanes_without_a_row) {
    std::vector<float> values(3 * 300, 2.0F);
    Floats lanes(300 * 16, std::nanf(""));
    simd::load_transposed({reinterpret_cast<char*>(values.data()), DType::fp32, 300, 1}, 0, 3, 300, 0.5F, lanes, 16);
    for (std::int64_t c = 0; c < 300; ++c) {
        for (std::int64_t i = 0; i < 16; ++i) ASSERT_EQ(lanes[c * 16 + i], i < 3 ? 1.0F : 0.0F);
    }
}

TEST_P(LaneWords, all_finite_finds_a_single_bad_element) {
    Floats x(4 * 48, 3e38F);
    EXPECT_TRUE(simd::all_finite(x, 48, 4, 37));
    for (const float bad : {kInf, -kInf, std::nanf("")}) {
        for (const std::int64_t at : {0, 36, 48 + 16, 3 * 48 + 36}) {
            const float kept = std::exchange(x[at], bad);
            EXPECT_FALSE(simd::all_finite(x, 48, 4, 37)) << at;
            x[at] = kept;
        }
        const float kept = std::exchange(x[37], bad);  // beyond dim, so not read
        EXPECT_TRUE(simd::all_finite(x, 48, 4, 37));
        x[37] = kept;
    }
}

TEST_P(LaneWords, exp_is_exact_to_a_few_units_in_the_last_place) {
    // One key per row: online_softmax leaves exp(s - m) with m given.
    constexpr std::int64_t kCount = 16 * 4096;
    Floats s(kCount), m(kCount, 0.0F), l(kCount, 0.0F), rescale(kCount);
    for (std::int64_t i = 0; i < kCount; ++i) s[i] = -87.3F * static_cast<float>(i) / kCount;
    s[1] = -kInf, s[2] = std::nanf(""), s[3] = -88.0F, s[4] = -1e30F;
    std::vector<float> x(static_cast<float*>(s), static_cast<float*>(s) + kCount);
    simd::online_softmax(s, 1, kCount, kCount, {m, l}, rescale);
    EXPECT_EQ(s[0], 1.0F);
    EXPECT_EQ(s[1], 0.0F);
    EXPECT_TRUE(std::isnan(s[2]));
    EXPECT_EQ(s[3], 0.0F);
    EXPECT_EQ(s[4], 0.0F);
    for (std::int64_t i = 5; i < kCount; ++i) {
        const double expected = std::exp(static_cast<double>(x[static_cast<std::size_t>(i)]));
        ASSERT_NEAR(s[i] / expected, 1.0, expected > 0x1p-20 ? 2e-7 : 4e-7) << x[static_cast<std::size_t>(i)];
    }
}

TEST_P(LaneWords, online_softmax_in_steps_is_softmax_at_once) {
    std::mt19937 rng(4);
    constexpr std::int64_t kKeys = 701, kLanes = 32;
    Floats all(kKeys * kLanes), part(kKeys * kLanes), m(kLanes), l(kLanes), m2(kLanes), l2(kLanes), rescale(kLanes);
    all.randomise(rng, kKeys * kLanes);
    for (std::int64_t j = 0; j < kKeys; ++j) all[j * kLanes + 3] = -kInf;  // a row without a key
    std::copy_n(static_cast<float*>(all), kKeys * kLanes, static_cast<float*>(part));
    simd::clear_state({m, l}, kLanes);
    simd::clear_state({m2, l2}, kLanes);
    simd::online_softmax(all, kKeys, kLanes, kLanes, {m, l}, rescale);
    for (std::int64_t first = 0; first < kKeys; first += 61) {
        simd::online_softmax(part + first * kLanes, std::min<std::int64_t>(61, kKeys - first), kLanes, kLanes, {m2, l2},
                             rescale);
    }
    for (std::int64_t i = 0; i < kLanes; ++i) {
        if (i == 3) {
            EXPECT_EQ(m[i], -kInf);
            EXPECT_EQ(l[i], 0.0F);
            continue;
        }
        EXPECT_EQ(m[i], m2[i]);
        EXPECT_NEAR(l[i] / l2[i], 1.0, 1e-6);
    }
}

TEST_P(LaneWords, weights_from_lse_are_at_most_1_and_keep_nan) {
    constexpr std::int64_t kLanes = 16;
    Floats s(kLanes, 2.0F), lse(kLanes, 2.0F);
    s[1] = std::nextafter(2.0F, 3.0F), s[2] = -kInf, s[3] = std::nanf(""), lse[4] = kInf, lse[5] = std::nanf(""),
    s[6] = 1, s[8] = 3, s[9] = 200;
    simd::weights_from_lse(s, lse, 1, kLanes, kLanes);
    for (const std::int64_t i : {0, 1, 7, 8, 9, 15}) EXPECT_EQ(s[i], 1.0F) << i;
    for (const std::int64_t i : {2, 4}) EXPECT_EQ(s[i], 0.0F) << i;
    for (const std::int64_t i : {3, 5}) EXPECT_TRUE(std::isnan(s[i])) << i;
    EXPECT_NEAR(s[6], std::exp(-1.0F), 1e-6F);
}

TEST_P(LaneWords, merge_with_nothing_changes_no_bit_and_nothing_with_nothing_is_nothing) {
    std::mt19937 rng(5);
    constexpr std::int64_t kLanes = 16, kDim = 5;
    Floats m(kLanes), l(kLanes), o(kDim * kLanes), empty_m(kLanes), empty_l(kLanes), zero(kDim * kLanes);
    m.randomise(rng, kLanes), l.randomise(rng, kLanes), o.randomise(rng, kDim * kLanes);
    std::vector<float> before(static_cast<float*>(o), static_cast<float*>(o) + kDim * kLanes);
    simd::clear_state({empty_m, empty_l}, kLanes);
    simd::merge({m, l}, o, {empty_m, empty_l}, zero, kDim, kLanes, kLanes);
    for (std::int64_t i = 0; i < kDim * kLanes; ++i) EXPECT_EQ(o[i], before[static_cast<std::size_t>(i)]);
    Floats target_m(kLanes), target_l(kLanes), target(kDim * kLanes);
    simd::clear_state({target_m, target_l}, kLanes);
    simd::merge({target_m, target_l}, target, {m, l}, o, kDim, kLanes, kLanes);
    for (std::int64_t i = 0; i < kDim * kLanes; ++i) EXPECT_EQ(target[i], o[i]);
    simd::clear_state({target_m, target_l}, kLanes);
    simd::merge({target_m, target_l}, zero, {empty_m, empty_l}, zero, kDim, kLanes, kLanes);
    for (std::int64_t i = 0; i < kLanes; ++i) {
        EXPECT_EQ(target_m[i], -kInf);
        EXPECT_EQ(target_l[i], 0.0F);
    }
}

TEST_P(LaneWords, merge_of_rows_has_the_bits_of_merge) {
    std::mt19937 rng(6);
    constexpr std::int64_t kLanes = simd::kLanes, kDim = 32;
    Floats m(kLanes), l(kLanes), o(kDim * kLanes), m_rows(kLanes), l_rows(kLanes), rows(kLanes * kDim);
    Floats other_m(kLanes), other_l(kLanes), other(kDim * kLanes), other_rows(kLanes * kDim);
    for (Floats* x : {&m, &other_m}) x->randomise(rng, kLanes);
    for (std::int64_t i = 0; i < kLanes; ++i) l[i] = 1 + m[i] * m[i], other_l[i] = 1 + other_m[i] * other_m[i];
    m[3] = other_m[5] = -kInf, l[3] = other_l[5] = 0;
    o.randomise(rng, kDim * kLanes), other.randomise(rng, kDim * kLanes);
    for (std::int64_t i = 0; i < kLanes; ++i) {
        m_rows[i] = m[i], l_rows[i] = l[i];
        for (std::int64_t c = 0; c < kDim; ++c) {
            rows[i * kDim + c] = o[c * kLanes + i];
            other_rows[i * kDim + c] = other[c * kLanes + i];
        }
    }
    Floats before(kLanes * kDim);
    std::copy_n(static_cast<float*>(rows), kLanes * kDim, static_cast<float*>(before));
    simd::merge({m, l}, o, {other_m, other_l}, other, kDim, kLanes, kLanes);
    simd::merge_rows({m_rows, l_rows}, rows, {other_m, other_l}, other_rows, {1, 9}, kDim);
    for (std::int64_t i = 0; i < kLanes; ++i) {
        EXPECT_EQ(m_rows[i], m[i]);
        EXPECT_EQ(l_rows[i], l[i]);
        for (std::int64_t c = 0; c < kDim; ++c) {
            EXPECT_EQ(rows[i * kDim + c], i >= 1 && i < 9 ? o[c * kLanes + i] : before[i * kDim + c]) << i << c;
        }
    }
}

TEST_P(LaneWords, fill_hidden_is_the_band) {
    for (const Mask mask : {Mask{.causal = Causal::bottom_right}, Mask{.causal = Causal::top_left},
                            Mask{.window_left = 3, .window_right = 2}}) {
        const simd::TilePosition position{mask.bind(40, 25), 7, 5};
        Floats s(18 * 32, 1.0F);
        simd::fill_masked(position, 18, s, 32, -5.0F);
        for (std::int64_t j = 0; j < 18; ++j) {
            for (std::int64_t i = 0; i < 32; ++i)
                ASSERT_EQ(s[j * 32 + i], position.band.visible(7 + i, 5 + j) ? 1.0F : -5.0F);
        }
    }
}

TEST_P(LaneWords, transform_scores_is_the_contract) {
    std::mt19937 rng(6);
    constexpr std::int64_t kKeys = 9, kLanes = 16, kLenQ = 14, kLenKv = 20;
    std::vector<float> bias(kLenQ * kLenKv);
    for (float& b : bias) b = std::normal_distribution<float>()(rng);
    const simd::ScoreRule rule{.scale = 2.5F,
                               .softcap = 3.0F,
                               .alibi = 0.25F,
                               .bias = {reinterpret_cast<char*>(bias.data()), DType::fp32, kLenKv, 1},
                               .diagonal = kLenKv - kLenQ};
    const simd::TilePosition position{Mask{}.bind(kLenQ, kLenKv), 2, 8};
    Floats s(kKeys * kLanes), scratch(kKeys * kLanes), slope(kKeys * kLanes);
    s.randomise(rng, kKeys * kLanes);
    std::vector<float> x(static_cast<float*>(s), static_cast<float*>(s) + kKeys * kLanes);
    simd::transform_scores(rule, position, kKeys, 12, s, kLanes, scratch, slope);
    for (std::int64_t j = 0; j < kKeys; ++j) {
        for (std::int64_t i = 0; i < 12; ++i) {
            const double t = std::tanh(2.5 * x[static_cast<std::size_t>(j * kLanes + i)] / 3);
            const double expected = 3 * t - 0.25 * std::abs(static_cast<double>(2 + i + rule.diagonal - 8 - j)) +
                                    bias[static_cast<std::size_t>((2 + i) * kLenKv + 8 + j)];
            ASSERT_NEAR(s[j * kLanes + i], expected, 2e-6);
            ASSERT_NEAR(slope[j * kLanes + i], 1 - t * t, 1e-6);
        }
    }
}

TEST_P(LaneWords, weighted_sums_of_a_tile_add_to_those_before) {
    std::mt19937 rng(11);
    constexpr std::int64_t kStride = 96;
    for (const std::int64_t lanes : {16, 48, 96}) {
        for (const std::int64_t keys : {0, 1, 2, 67}) {
            Floats p(keys * kStride + 1), x(keys * kStride + 1);
            p.randomise(rng, keys * kStride), x.randomise(rng, keys * kStride);
            std::vector<double> weights(static_cast<std::size_t>(lanes), 1e6), products(weights);
            simd::add_weighted_sums(p, x, keys, lanes, kStride, weights.data(), products.data());
            for (std::int64_t i = 0; i < lanes; ++i) {
                double sum = 1e6, product = 1e6;
                for (std::int64_t j = 0; j < keys; ++j) {
                    sum += p[j * kStride + i];
                    product += static_cast<double>(p[j * kStride + i]) * x[j * kStride + i];
                }
                ASSERT_NEAR(weights[static_cast<std::size_t>(i)], sum, 2e-5) << lanes << " " << keys;
                ASSERT_NEAR(products[static_cast<std::size_t>(i)], product, 2e-5) << lanes << " " << keys;
            }
        }
    }
}

}  // namespace
}  // namespace tessera::cpu::simd_primitives_test
