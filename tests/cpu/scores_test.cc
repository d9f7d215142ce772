// SPDX-License-Identifier: Apache-2.0
//
// Softcap, ALiBi, bias and dropout of a tile in hard cases: extreme arguments, odd sizes, offsets beyond 32 bits; on
// every instruction set that this processor has.
#include <bit>
#include <cmath>
#include <limits>

#include "core/dropout.hpp"
#include "core/numeric.hpp"
#include "cpu/simd/primitives.hpp"
#include "floats.hpp"
#include "targets.hpp"

namespace tessera::cpu::scores_test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class Scores : public EachTarget {};
INSTANTIATE_TEST_SUITE_P(Cpu, Scores, testing::ValuesIn(usable_targets()), target_label);

struct Capped {
    float score;
    float slope;
};

/// Softcap alone, of one score, `others` in all other lanes.
Capped softcap(float scale, float cap, float x, float others) {
    constexpr std::int64_t kLanes = 32;
    Floats s(kLanes, others), slope(kLanes), scratch(kLanes);
    s[5] = x;
    simd::transform_scores({.scale = scale, .softcap = cap}, {Mask{}.bind(32, 1), 0, 0}, 1, 32, s, kLanes, scratch,
                           slope);
    return {s[5], slope[5]};
}

TEST_P(Scores, softcap_is_exact_over_all_arguments) {
    for (const float cap : {30.0F, 1.0F, 1e-3F, 2e5F}) {
        for (const float scale : {1.0F, 0.125F, -3.0F}) {
            std::mt19937 rng(7);
            constexpr std::int64_t kCount = 16 * 2048;
            Floats s(kCount), slope(kCount), scratch(kCount);
            // Any exponent, and in half of the cases numbers near the cap, where tanh bends.
            for (std::int64_t i = 0; i < kCount; ++i) {
                const float mantissa = std::uniform_real_distribution<float>(1, 2)(rng);
                const int exponent = i % 2 == 0 ? static_cast<int>(rng() % 240) - 120 : static_cast<int>(rng() % 8) - 5;
                s[i] = std::ldexp(mantissa, exponent) * (i % 2 == 0 ? 1 : cap) * (rng() % 2 == 0 ? 1 : -1);
            }
            const std::vector<float> x(static_cast<float*>(s), static_cast<float*>(s) + kCount);
            simd::transform_scores({.scale = scale, .softcap = cap}, {Mask{}.bind(16, 2048), 0, 0}, 2048, 16, s, 16,
                                   scratch, slope);
            for (std::int64_t i = 0; i < kCount; ++i) {
                const double t = std::tanh(static_cast<double>(scale) * x[static_cast<std::size_t>(i)] / cap);
                ASSERT_NEAR(s[i], cap * t, 4e-7 * std::abs(cap * t)) << cap << " " << x[static_cast<std::size_t>(i)];
                ASSERT_NEAR(slope[i], 1 - t * t, 5e-7) << cap << " " << x[static_cast<std::size_t>(i)];
            }
        }
    }
}

TEST_P(Scores, softcap_of_special_values) {
    constexpr float kMax = std::numeric_limits<float>::max();
    for (const float others : {0.0F, 1e3F}) {
        for (const float cap : {30.0F, 1e-30F, 1e-40F, kMax}) {
            EXPECT_EQ(softcap(1, cap, 0.0F, others).score, 0.0F) << cap;
            EXPECT_EQ(softcap(1, cap, 0.0F, others).slope, 1.0F) << cap;
            EXPECT_EQ(softcap(1, cap, kInf, others).score, cap);
            EXPECT_EQ(softcap(1, cap, -kInf, others).score, -cap);
            EXPECT_EQ(softcap(1, cap, kInf, others).slope, 0.0F);
            EXPECT_TRUE(std::isnan(softcap(1, cap, kNan, others).score));
        }
        EXPECT_EQ(softcap(1, 30, kMax, others).score, 30.0F);
        EXPECT_EQ(softcap(1e10F, 30, -kMax, others).score, -30.0F);  // the scaled score would be infinite
        EXPECT_EQ(softcap(1, 30, 1e-38F, others).score, 1e-38F);
    }
}

TEST_P(Scores, softcap_of_one_score_does_not_depend_on_the_others) {
    for (float x = -100; x < 100; x += 0.37F) {
        const Capped alone = softcap(1, 20, x, 0.0F);
        for (const float others : {1.0F, 50.0F, -kInf, kNan}) {
            const Capped beside = softcap(1, 20, x, others);
            ASSERT_EQ(std::bit_cast<std::uint32_t>(beside.score), std::bit_cast<std::uint32_t>(alone.score)) << x;
            ASSERT_EQ(std::bit_cast<std::uint32_t>(beside.slope), std::bit_cast<std::uint32_t>(alone.slope)) << x;
        }
    }
}

TEST_P(Scores, alibi_is_the_distance_at_any_place) {
    constexpr std::int64_t kLanes = 48;
    for (const std::int64_t keys : {1, 3, 4, 7, 66}) {
        for (const std::int64_t q :
             {std::int64_t{0}, std::int64_t{100}, std::int64_t{1} << 24, std::int64_t{1} << 33}) {
            // The distance of the first key, up to the largest that fp32 counts.
            for (const std::int64_t ahead : {-1000000, -70, -5, 0, 5, 70, 1000000, -((1 << 24) - 49), (1 << 24) - 67}) {
                if (q + ahead < 0) continue;
                const simd::TilePosition position{Mask{}.bind(q + 48, q + (1 << 25)), q, q + ahead + 3};
                Floats s(keys * kLanes), scratch(keys * kLanes);
                simd::transform_scores({.alibi = 0.25F, .diagonal = 3}, position, keys, kLanes, s, kLanes, scratch,
                                       nullptr);
                for (std::int64_t j = 0; j < keys; ++j) {
                    for (std::int64_t i = 0; i < kLanes; ++i) {
                        ASSERT_EQ(s[j * kLanes + i], -0.25F * static_cast<float>(std::abs(i - ahead - j)))
                            << q << " " << ahead << " " << i << " " << j;
                    }
                }
            }
        }
    }
}

TEST_P(Scores, bias_of_any_dtype_and_broadcast) {
    std::mt19937 rng(9);
    constexpr std::int64_t kLenQ = 40, kLenKv = 50, kKeys = 21, kQueries = 19, kLanes = 32;
    std::vector<std::byte> bias(kLenQ * kLenKv * 8);
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        for (const std::int64_t row_stride : {kLenKv, std::int64_t{0}}) {
            for (const std::int64_t column_stride : {1, 0}) {
                const HeadRows rows{reinterpret_cast<char*>(bias.data()), dtype, row_stride, column_stride};
                for (std::int64_t i = 0; i < kLenQ * kLenKv; ++i) {
                    store_from_double(bias.data() + i * size_of(dtype), dtype, std::normal_distribution<>()(rng));
                }
                Floats s(kKeys * kLanes, 1.0F), scratch(kKeys * kLanes);
                simd::transform_scores({.bias = rows}, {Mask{}.bind(kLenQ, kLenKv), 11, 17}, kKeys, kQueries, s, kLanes,
                                       scratch, nullptr);
                for (std::int64_t j = 0; j < kKeys; ++j) {
                    for (std::int64_t i = 0; i < kQueries; ++i) {
                        const auto expected = static_cast<float>(load_as_double(rows.at(11 + i, 17 + j), dtype));
                        ASSERT_EQ(s[j * kLanes + i], 1.0F + expected) << name_of(dtype) << " " << i << " " << j;
                    }
                }
            }
        }
    }
}

/// Expects all factors to be those of core/dropout.hpp.
void expect_philox(const simd::DropoutRule& rule, std::int64_t first_query, std::int64_t first_key, std::int64_t keys,
                   std::int64_t lanes) {
    const simd::TilePosition position{Mask{}.bind(std::int64_t{1} << 40, std::int64_t{1} << 40), first_query,
                                      first_key};
    Floats factors(keys * lanes + 1, kNan);
    simd::dropout_factors(rule, position, keys, factors, lanes);
    for (std::int64_t j = 0; j < keys; ++j) {
        for (std::int64_t i = 0; i < lanes; ++i) {
            const bool kept =
                dropout_word(rule.seed, rule.batch, rule.head, first_query + i, first_key + j) < rule.threshold;
            ASSERT_EQ(factors[j * lanes + i], kept ? rule.kept : 0.0F)
                << "query " << first_query + i << " key " << first_key + j << " of " << keys << " x " << lanes;
        }
    }
    EXPECT_TRUE(std::isnan(factors[keys * lanes]));  // nothing beyond the tile
}

TEST_P(Scores, dropout_factors_are_the_philox_words) {
    constexpr std::int64_t k32 = std::int64_t{1} << 32;
    const simd::DropoutRule rule{.seed = 0xF123456789ABCDEFULL,
                                 .threshold = keep_threshold(0.3),
                                 .kept = 1 / 0.7F,
                                 .batch = 3,
                                 .head = 5,
                                 .active = true};
    for (const std::int64_t key : {std::int64_t{0}, std::int64_t{1}, std::int64_t{15}, std::int64_t{4095}, k32 - 50}) {
        for (const std::int64_t query : {std::int64_t{0}, std::int64_t{1}, std::int64_t{65530}, k32 - 5}) {
            for (const std::int64_t keys : {1, 2, 15, 16, 17, 33, 50}) expect_philox(rule, query, key, keys, 48);
        }
    }
    expect_philox(rule, 32, 2, 1037, 16);
    expect_philox(rule, 33, 7, 213, 32);
}

TEST_P(Scores, dropout_of_every_seed_head_and_rate) {
    for (const double p : {0.0, 1e-12, 1e-9, 0.1, 0.25, 0.5, 1 - 0x1p-5, 0.9, 0.999999, 1 - 1e-9}) {
        for (const std::uint64_t seed :
             {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32, ~std::uint64_t{0}}) {
            for (const std::int64_t head : {std::int64_t{0}, std::int64_t{70000}, (std::int64_t{1} << 32) - 1}) {
                const simd::DropoutRule rule{.seed = seed,
                                             .threshold = keep_threshold(p),
                                             .kept = 2.0F,
                                             .batch = 3 * head,
                                             .head = head,
                                             .active = true};
                expect_philox(rule, 18, 30, 9, 32);
            }
        }
    }
}

// The threshold is a weight's random word, which is then dropped, or one more: the comparison needs the last bit.
TEST_P(Scores, dropout_compares_whole_words) {
    simd::DropoutRule rule{.seed = 77, .kept = 2.0F, .batch = 1, .head = 2, .active = true};
    for (const std::int64_t key : {32, 47, 48, 63}) {
        for (const std::int64_t lane : {0, 1, 14, 31}) {
            for (const std::int64_t query : {6, 9}) {
                for (const std::uint64_t more : {0, 1}) {
                    rule.threshold = dropout_word(rule.seed, rule.batch, rule.head, query + lane, key) + more;
                    expect_philox(rule, query, 32, 32, 32);
                }
            }
        }
    }
}

}  // namespace
}  // namespace tessera::cpu::scores_test
