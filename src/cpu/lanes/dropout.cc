// SPDX-License-Identifier: Apache-2.0
//
// The dropout mask of a tile: Philox4x32-10 (core/philox.hpp) with consecutive queries in the lanes.
//
// A counter is {key / 4, query, head, batch}, and its four words are those of four keys. The query is in one of four
// words, so the first two rounds touch one lane-wise product, which no key changes, and the third one more: 15 of the
// 20 wide products are left for every four keys.
#include <algorithm>
#include <cstdint>

#include "core/philox.hpp"
#include "cpu/lanes/simd.hpp"
#include "cpu/lanes/words.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/lanes/dropout.cc"
#include <hwy/foreach_target.h>  // first: it compiles this file once for each target

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::lanes::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
using DU = hn::RebindToUnsigned<D>;
using VU = hn::Vec<DU>;

constexpr std::int64_t kWidth = static_cast<std::int64_t>(hn::MaxLanes(D()));
constexpr std::int64_t kQuads = 64;  // whose scalars are made at a time

/// What the rounds before the first full one leave of a quad of keys: the same for all queries.
struct Quad {
    std::uint32_t c2_before_third;  // ^ high product of the query
    std::uint32_t c0_after_third;   // ^ high product of c2
    std::uint32_t c2_after_third;   // ^ low product of the query
    std::uint32_t c2_after_fourth;  // ^ high product of c0
};

constexpr std::uint32_t low(std::uint64_t product) { return static_cast<std::uint32_t>(product); }
constexpr std::uint32_t high(std::uint64_t product) { return static_cast<std::uint32_t>(product >> 32); }

/// The rounds' keys.
struct Keys {
    std::uint32_t key0[philox::kRounds];
    std::uint32_t key1[philox::kRounds];

    explicit Keys(std::uint64_t seed) {
        for (int round = 0; round < philox::kRounds; ++round) {
            key0[round] = low(seed) + static_cast<std::uint32_t>(round) * philox::kWeyl0;
            key1[round] = high(seed) + static_cast<std::uint32_t>(round) * philox::kWeyl1;
        }
    }
};

Quad quad_of(const DropoutRule& rule, const Keys& keys, std::int64_t quad) {
    const std::uint64_t of_quad = std::uint64_t{philox::kMultiplier0} * static_cast<std::uint32_t>(quad);
    const std::uint64_t of_head = std::uint64_t{philox::kMultiplier1} * static_cast<std::uint32_t>(rule.head);
    // After the first round c1, c2 and c3 are the same for all queries, after the second c0 and c1.
    const std::uint32_t c2 = high(of_quad) ^ static_cast<std::uint32_t>(rule.batch) ^ keys.key1[0];
    const std::uint64_t second1 = std::uint64_t{philox::kMultiplier1} * c2;
    const std::uint32_t c0 = high(second1) ^ low(of_head) ^ keys.key0[1];
    const std::uint64_t third0 = std::uint64_t{philox::kMultiplier0} * c0;
    return {.c2_before_third = low(of_quad) ^ keys.key1[1],
            .c0_after_third = low(second1) ^ keys.key0[2],
            .c2_after_third = high(third0) ^ keys.key1[2],
            .c2_after_fourth = low(third0) ^ keys.key1[3]};
}

/// The counters of every second lane. The numbers are in the lower half of 64 bits, so that a product lies as the next
/// one takes it; what is above them means nothing.
struct Counters {
    VU c0;
    VU c1;
    VU c2;
    VU c3;
};

HWY_INLINE VU product_of(VU a, VU b) { return hn::BitCast(DU(), hn::MulEven(a, b)); }
HWY_INLINE VU high_half(VU product) { return hn::DupOdd(product); }

/// The first query-dependent product, of the second round.
HWY_INLINE VU query_product(const DropoutRule& rule, const Keys& keys, VU query) {
    const DU du;
    const std::uint64_t of_head = std::uint64_t{philox::kMultiplier1} * static_cast<std::uint32_t>(rule.head);
    return product_of(hn::Xor(query, hn::Set(du, high(of_head) ^ keys.key0[0])), hn::Set(du, philox::kMultiplier0));
}

/// After the fourth round.
HWY_INLINE Counters first_rounds(const Quad& quad, VU query_product, VU key0, VU multiplier0, VU multiplier1) {
    const DU du;
    const VU c2 = hn::Xor(high_half(query_product), hn::Set(du, quad.c2_before_third));
    const VU third = product_of(c2, multiplier1);
    const VU c0 = hn::Xor(high_half(third), hn::Set(du, quad.c0_after_third));
    const VU fourth0 = product_of(c0, multiplier0);
    const VU fourth1 = product_of(hn::Xor(query_product, hn::Set(du, quad.c2_after_third)), multiplier1);
    return {.c0 = hn::Xor3(high_half(fourth1), third, key0),
            .c1 = fourth1,
            .c2 = hn::Xor(high_half(fourth0), hn::Set(du, quad.c2_after_fourth)),
            .c3 = fourth0};
}

HWY_INLINE Counters next_round(const Counters& c, VU key0, VU key1, VU multiplier0, VU multiplier1) {
    const VU product0 = product_of(c.c0, multiplier0);
    const VU product1 = product_of(c.c2, multiplier1);
    return {.c0 = hn::Xor3(high_half(product1), c.c1, key0),
            .c1 = product1,
            .c2 = hn::Xor3(high_half(product0), c.c3, key1),
            .c3 = product0};
}

/// Lower halves of `even` and `odd` in turn; upper halves of both.
HWY_INLINE VU lower_of(VU even, VU odd) { return hn::OddEven(hn::DupEven(odd), even); }
HWY_INLINE VU upper_of(VU even, VU odd) { return hn::OddEven(odd, hn::DupOdd(even)); }

/// The last round, and all lanes together again: the words of the quad's four keys.
HWY_INLINE Counters last_round(const Counters& even, const Counters& odd, VU key0, VU key1, VU multiplier0,
                               VU multiplier1) {
    const VU even0 = product_of(even.c0, multiplier0), odd0 = product_of(odd.c0, multiplier0);
    const VU even1 = product_of(even.c2, multiplier1), odd1 = product_of(odd.c2, multiplier1);
    return {.c0 = hn::Xor3(upper_of(even1, odd1), lower_of(even.c1, odd.c1), key0),
            .c1 = lower_of(even1, odd1),
            .c2 = hn::Xor3(upper_of(even0, odd0), lower_of(even.c3, odd.c3), key1),
            .c3 = lower_of(even0, odd0)};
}

/// The words of a quad of keys, c0 .. c3, for one vector of queries.
HWY_INLINE Counters words_of(const Quad& quad, VU even_query, VU odd_query, const Keys& keys) {
    const DU du;
    const VU multiplier0 = hn::Set(du, philox::kMultiplier0);
    const VU multiplier1 = hn::Set(du, philox::kMultiplier1);
    const VU fourth_key0 = hn::Set(du, keys.key0[3]);
    Counters even = first_rounds(quad, even_query, fourth_key0, multiplier0, multiplier1);
    Counters odd = first_rounds(quad, odd_query, fourth_key0, multiplier0, multiplier1);
    constexpr int kLast = philox::kRounds - 1;
    TESSERA_UNROLL
    for (int round = 4; round < kLast; ++round) {
        const VU key0 = hn::Set(du, keys.key0[round]);
        const VU key1 = hn::Set(du, keys.key1[round]);
        even = next_round(even, key0, key1, multiplier0, multiplier1);
        odd = next_round(odd, key0, key1, multiplier0, multiplier1);
    }
    return last_round(even, odd, hn::Set(du, keys.key0[kLast]), hn::Set(du, keys.key1[kLast]), multiplier0,
                      multiplier1);
}

void DropoutFactors(const DropoutRule& rule, const Place& place, std::int64_t keys, float* factors,
                    std::int64_t stride) {
    const D d;
    const DU du;
    if (rule.threshold >> 32 != 0) {  // 2^32, "keep all", does not fit 32 bits
        std::fill_n(factors, keys * stride, rule.kept);
        return;
    }
    const V kept = hn::Set(d, rule.kept);
    const VU threshold = hn::Set(du, static_cast<std::uint32_t>(rule.threshold));
    const Keys round_keys(rule.seed);
    Quad quads[kQuads];
    const std::int64_t end = (place.kv + keys + 3) / 4;
    for (std::int64_t first = place.kv / 4; first < end; first += kQuads) {
        const std::int64_t count = std::min(kQuads, end - first);
        for (std::int64_t i = 0; i < count; ++i) quads[i] = quad_of(rule, round_keys, first + i);
        for (std::int64_t lane = 0; lane < stride; lane += kWidth) {
            const VU query = hn::Iota(du, static_cast<std::uint32_t>(place.q + lane));
            const VU even_query = query_product(rule, round_keys, query);
            const VU odd_query = query_product(rule, round_keys, hn::DupOdd(query));
            for (std::int64_t i = 0; i < count; ++i) {
                const Counters words = words_of(quads[i], even_query, odd_query, round_keys);
                const auto store = [&](std::int64_t j, VU word) HWY_ATTR {
                    if (j < 0 || j >= keys) return;
                    const auto keep = hn::RebindMask(d, hn::Lt(word, threshold));
                    hn::Store(hn::IfThenElseZero(keep, kept), d, factors + j * stride + lane);
                };
                const std::int64_t j = (first + i) * 4 - place.kv;
                store(j, words.c0);
                store(j + 1, words.c1);
                store(j + 2, words.c2);
                store(j + 3, words.c3);
            }
        }
    }
}

}  // namespace tessera::cpu::lanes::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::cpu::lanes {

HWY_EXPORT(DropoutFactors);

void dropout_factors(const DropoutRule& rule, const Place& place, std::int64_t keys, float* factors,
                     std::int64_t stride) {
    HWY_DYNAMIC_DISPATCH(DropoutFactors)(rule, place, keys, factors, stride);
}

}  // namespace tessera::cpu::lanes
#endif
