// SPDX-License-Identifier: Apache-2.0
#include "tessera/mask.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace tessera::mask_test {
namespace {

constexpr std::int64_t kLongest = 12;

// Band answers its three questions at compile time.
constexpr Band kCausal = Mask{.causal = Causal::bottom_right}.bind(2, 4);
static_assert(kCausal.visible(0, 2) && !kCausal.visible(0, 3) && kCausal.visible(1, 3));
static_assert(kCausal.row(0) == Range{0, 3} && kCausal.kv_range(0, 2) == Range{0, 4} &&
              kCausal.q_range(3, 4) == Range{1, 2});
static_assert(kCausal.coverage(0, 2, 0, 3) == Coverage::full && kCausal.coverage(0, 2, 3, 4) == Coverage::partial);
static_assert(kCausal.coverage(0, 1, 3, 4) == Coverage::empty && kCausal.visible_pairs() == 7);
static_assert(Mask{}.trivial() && !Mask{.window_left = 3}.trivial() && Mask{}.bind(3, 5).visible_pairs() == 15);
static_assert(Mask{.causal = Causal::top_left}.bind(2, 4).row(1) == Range{0, 2});

/// The contract's definition, word by word, with no Band in it.
bool visible_by_contract(const Mask& mask, std::int64_t len_q, std::int64_t len_kv, std::int64_t q, std::int64_t k) {
    const std::int64_t diagonal = q + len_kv - len_q;  // the key that query q meets on the bottom-right diagonal
    if (k < 0 || k >= len_kv) return false;
    if (mask.causal == Causal::bottom_right && k > diagonal) return false;
    if (mask.causal == Causal::top_left && k > q) return false;
    if (mask.window_left != unbounded && k < diagonal - mask.window_left) return false;
    if (mask.window_right != unbounded && k > diagonal + mask.window_right) return false;
    return true;
}

/// Calls f(mask) for every causal rule and every window of sides 0..4 and unbounded.
template <class F>
void for_each_mask(const F& f) {
    const std::int64_t sides[] = {0, 1, 2, 3, 4, unbounded};
    for (const Causal causal : {Causal::none, Causal::bottom_right, Causal::top_left}) {
        for (const std::int64_t left : sides) {
            for (const std::int64_t right : sides) f(Mask{causal, left, right});
        }
    }
}

template <class F>
void for_each_length(const F& f) {
    for (std::int64_t len_q = 0; len_q <= kLongest; ++len_q) {
        for (std::int64_t len_kv = 0; len_kv <= kLongest; ++len_kv) f(len_q, len_kv);
    }
}

std::string text(const Mask& m, std::int64_t len_q, std::int64_t len_kv) {
    const auto side = [](std::int64_t s) { return s == unbounded ? std::string("unbounded") : std::to_string(s); };
    return "causal " + std::to_string(static_cast<int>(m.causal)) + " window " + side(m.window_left) + "," +
           side(m.window_right) + " len " + std::to_string(len_q) + " x " + std::to_string(len_kv);
}

/// Visible pairs by brute force, with prefix sums that count those of a rectangle at once.
class Brute {
 public:
    Brute(const Mask& mask, std::int64_t len_q, std::int64_t len_kv) {
        for (std::int64_t q = 0; q < len_q; ++q) {
            for (std::int64_t k = 0; k < len_kv; ++k) {
                sums_[at(q + 1)][at(k + 1)] = sums_[at(q)][at(k + 1)] + sums_[at(q + 1)][at(k)] - sums_[at(q)][at(k)] +
                                              (visible_by_contract(mask, len_q, len_kv, q, k) ? 1 : 0);
            }
        }
    }
    std::int64_t count(std::int64_t q0, std::int64_t q1, std::int64_t k0, std::int64_t k1) const {
        return sums_[at(q1)][at(k1)] - sums_[at(q0)][at(k1)] - sums_[at(q1)][at(k0)] + sums_[at(q0)][at(k0)];
    }

 private:
    static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
    std::int64_t sums_[kLongest + 2][kLongest + 2] = {};
};

TEST(Mask, visible_rows_and_pairs_match_the_contract) {
    for_each_length([](std::int64_t len_q, std::int64_t len_kv) {
        for_each_mask([&](const Mask& mask) {
            const Band band = mask.bind(len_q, len_kv);
            std::int64_t pairs = 0;
            for (std::int64_t q = 0; q < len_q; ++q) {
                std::int64_t first = len_kv, last = -1;
                for (std::int64_t k = -2; k < len_kv + 2; ++k) {
                    const bool expected = visible_by_contract(mask, len_q, len_kv, q, k);
                    ASSERT_EQ(band.visible(q, k), expected) << text(mask, len_q, len_kv) << " at " << q << "," << k;
                    if (expected) first = std::min(first, k), last = k, ++pairs;
                }
                const Range expected = last < 0 ? Range{} : Range{first, last + 1};
                ASSERT_EQ(band.row(q), expected) << text(mask, len_q, len_kv) << " row " << q;
            }
            ASSERT_EQ(band.visible_pairs(), pairs) << text(mask, len_q, len_kv);
        });
    });
}

TEST(Mask, coverage_of_every_tile) {
    for_each_length([](std::int64_t len_q, std::int64_t len_kv) {
        for_each_mask([&](const Mask& mask) {
            const Band band = mask.bind(len_q, len_kv);
            const Brute brute(mask, len_q, len_kv);
            for (std::int64_t q0 = 0; q0 <= len_q; ++q0) {
                for (std::int64_t q1 = q0; q1 <= len_q; ++q1) {
                    for (std::int64_t k0 = 0; k0 <= len_kv; ++k0) {
                        for (std::int64_t k1 = k0; k1 <= len_kv; ++k1) {
                            const std::int64_t count = brute.count(q0, q1, k0, k1);
                            const Coverage expected = count == 0                       ? Coverage::empty
                                                      : count == (q1 - q0) * (k1 - k0) ? Coverage::full
                                                                                       : Coverage::partial;
                            if (band.coverage(q0, q1, k0, k1) == expected) continue;
                            FAIL() << text(mask, len_q, len_kv) << " tile " << q0 << ".." << q1 << " x " << k0 << ".."
                                   << k1;
                        }
                    }
                }
            }
        });
    });
}

TEST(Mask, a_tile_past_the_last_key_is_never_full) {
    for_each_length([](std::int64_t len_q, std::int64_t len_kv) {
        for_each_mask([&](const Mask& mask) {
            const Band band = mask.bind(len_q, len_kv);
            const Brute brute(mask, len_q, len_kv);
            for (std::int64_t k0 = 0; k0 <= len_kv; ++k0) {
                const Coverage expected = brute.count(0, len_q, k0, len_kv) == 0 ? Coverage::empty : Coverage::partial;
                ASSERT_EQ(band.coverage(0, len_q, k0, len_kv + 3), expected)
                    << text(mask, len_q, len_kv) << " from " << k0;
            }
        });
    });
}

TEST(Mask, ranges_are_the_smallest_hulls) {
    for_each_length([](std::int64_t len_q, std::int64_t len_kv) {
        for_each_mask([&](const Mask& mask) {
            const Band band = mask.bind(len_q, len_kv);
            const Brute brute(mask, len_q, len_kv);
            // The hull of the indices i for which some(i) holds.
            const auto hull = [](std::int64_t size, const auto& some) {
                Range range{};
                for (std::int64_t i = 0; i < size; ++i) {
                    if (some(i)) range = {range.empty() ? i : range.begin, i + 1};
                }
                return range;
            };
            for (std::int64_t a = 0; a <= kLongest; ++a) {
                for (std::int64_t b = a; b <= kLongest; ++b) {
                    if (b <= len_q) {
                        const Range expected =
                            hull(len_kv, [&](std::int64_t k) { return brute.count(a, b, k, k + 1) > 0; });
                        ASSERT_EQ(band.kv_range(a, b), expected)
                            << text(mask, len_q, len_kv) << " queries " << a << ".." << b;
                    }
                    if (b <= len_kv) {
                        const Range expected =
                            hull(len_q, [&](std::int64_t q) { return brute.count(q, q + 1, a, b) > 0; });
                        ASSERT_EQ(band.q_range(a, b), expected)
                            << text(mask, len_q, len_kv) << " keys " << a << ".." << b;
                    }
                }
            }
        });
    });
}

void expect_same_ranges(const Mask& x, const Mask& y, std::int64_t len_q, std::int64_t len_kv) {
    const Band a = x.bind(len_q, len_kv);
    const Band b = y.bind(len_q, len_kv);
    for (std::int64_t i = 0; i <= kLongest; ++i) {
        for (std::int64_t j = i; j <= kLongest; ++j) {
            const bool same_keys = j > len_q || a.kv_range(i, j) == b.kv_range(i, j);
            const bool same_queries = j > len_kv || a.q_range(i, j) == b.q_range(i, j);
            ASSERT_TRUE(same_keys && same_queries) << text(x, len_q, len_kv) << " blocks " << i << ".." << j;
        }
    }
    for (std::int64_t q = 0; q < len_q; ++q) {
        for (std::int64_t k = 0; k < len_kv; ++k) {
            ASSERT_EQ(a.coverage(q, len_q, k, len_kv), b.coverage(q, len_q, k, len_kv)) << text(x, len_q, len_kv);
        }
    }
}

TEST(Mask, causal_is_a_window) {
    for_each_length([](std::int64_t len_q, std::int64_t len_kv) {
        const Mask causal{.causal = Causal::bottom_right};
        expect_same_ranges(causal, {.window_right = 0}, len_q, len_kv);
        expect_same_ranges(causal, {.window_left = len_kv, .window_right = 0}, len_q, len_kv);
        expect_same_ranges({}, {.window_left = len_kv, .window_right = len_q}, len_q, len_kv);
    });
}

TEST(BugFamilies, causal_diagonal_is_top_left_or_bottom_right_bug_46) {
    const auto rows = [](Causal causal, std::int64_t len_q, std::int64_t len_kv) {
        std::vector<std::int64_t> sizes;
        for (std::int64_t q = 0; q < len_q; ++q)
            sizes.push_back(Mask{.causal = causal}.bind(len_q, len_kv).row(q).size());
        return sizes;
    };
    using Sizes = std::vector<std::int64_t>;
    EXPECT_EQ(rows(Causal::bottom_right, 2, 4), (Sizes{3, 4}));
    EXPECT_EQ(rows(Causal::top_left, 2, 4), (Sizes{1, 2}));
    EXPECT_EQ(rows(Causal::bottom_right, 4, 2), (Sizes{0, 0, 1, 2}));
    EXPECT_EQ(rows(Causal::top_left, 4, 2), (Sizes{1, 2, 2, 2}));
    EXPECT_EQ(rows(Causal::bottom_right, 3, 3), rows(Causal::top_left, 3, 3));
}

TEST(Mask, extreme_windows_and_lengths_do_not_overflow) {
    constexpr std::int64_t kHuge = unbounded - 1;
    constexpr std::int64_t kLong = std::int64_t{1} << 32;
    for_each_length([](std::int64_t len_q, std::int64_t len_kv) {
        expect_same_ranges({.window_left = kHuge, .window_right = kHuge}, {}, len_q, len_kv);
        expect_same_ranges({.window_left = kHuge, .window_right = 0}, {.causal = Causal::bottom_right}, len_q, len_kv);
        expect_same_ranges({.window_left = 2, .window_right = kHuge}, {.window_left = 2}, len_q, len_kv);
    });
    for (const std::int64_t side : {unbounded, kHuge}) {
        const Band band = Mask{.window_left = side, .window_right = side}.bind(kLong, kLong);
        EXPECT_EQ(band.kv_range(0, kLong), (Range{0, kLong}));
        EXPECT_EQ(band.q_range(kLong - 1, kLong), (Range{0, kLong}));
        EXPECT_EQ(band.coverage(0, kLong, 0, kLong), Coverage::full);
        EXPECT_TRUE(band.visible(0, kLong - 1) && band.visible(kLong - 1, 0));
    }
    EXPECT_EQ((Mask{.causal = Causal::bottom_right}.bind(1, kLong).row(0)), (Range{0, kLong}));
    EXPECT_EQ((Mask{.causal = Causal::bottom_right}.bind(kLong, 1).q_range(0, 1)), (Range{kLong - 1, kLong}));
}

}  // namespace
}  // namespace tessera::mask_test
