// SPDX-License-Identifier: Apache-2.0
//
// The dropout mask of a tile (core/dropout.hpp): Philox4x32-10 with consecutive pairs of queries in the lanes.
//
// A counter is {query / 2, key / 16 + (block << 28), head, batch}; its four 32-bit outputs hold four bits for each pair
// of 2 queries and 16 keys. Wide products fill 64 bits, so a vector holds the counters of as many queries as it has
// floats. Key and block sit in one word, so the first two rounds share products: 15 of the 20 wide products remain.
// Three blocks are computed side by side, more only while some bits still equal the threshold's. Two vectors are packed
// into one before the last round.
#include <algorithm>
#include <cstdint>

#include "core/dropout.hpp"
#include "cpu/simd/primitives.hpp"
#include "cpu/simd/simd.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/dropout.cc"
#include <hwy/foreach_target.h>  // first: it compiles this file once for each target

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
using DU = hn::RebindToUnsigned<D>;
using VU = hn::Vec<DU>;
using DU64 = hn::RepartitionToWide<DU>;

constexpr std::int64_t kWidth = static_cast<std::int64_t>(hn::MaxLanes(D()));
constexpr std::int64_t kKeys = dropout::kPatchKeys;
constexpr int kFirstBlocks = 3;

constexpr std::uint32_t low(std::uint64_t product) { return static_cast<std::uint32_t>(product); }
constexpr std::uint32_t high(std::uint64_t product) { return static_cast<std::uint32_t>(product >> 32); }

/// The seed's round keys, the threshold and the head, broadcast for the lanes.
struct HeadRule {
    KeepRule rule;
    std::uint64_t of_head;  // product of the first round
    std::uint32_t batch;

    explicit HeadRule(const DropoutRule& dropout)
        : rule(dropout.seed, dropout.threshold),
          of_head(std::uint64_t{philox::kMultiplier1} * static_cast<std::uint32_t>(dropout.head)),
          batch(static_cast<std::uint32_t>(dropout.batch)) {}

    std::uint32_t key0(int round) const { return rule.keys.words[round][0]; }
    std::uint32_t key1(int round) const { return rule.keys.words[round][1]; }

    /// The second round's product of a key block and a block of bits. It is the same for all queries.
    std::uint64_t product_of(std::uint32_t keys, int block) const {
        const std::uint32_t c1 = DropoutPatch{.keys = keys}.counter(static_cast<std::uint32_t>(block))[1];
        return std::uint64_t{philox::kMultiplier0} * (high(of_head) ^ c1 ^ key0(0));
    }
};

// A pair of queries has 64 bits. Its number lies in the lower 32, which the next MulEven reads; the upper are
// undefined.

HWY_INLINE VU product_of(VU a, std::uint32_t b) { return hn::BitCast(DU(), hn::MulEven(a, hn::Set(DU(), b))); }
HWY_INLINE VU high_half(VU product) { return hn::DupOdd(product); }
HWY_INLINE VU with(VU a, std::uint32_t b) { return hn::Xor(a, hn::Set(DU(), b)); }

/// The part of the state that does not depend on the key, for a vector of query pairs.
struct Pairs {
    VU c2_before_third;  // ^ high product of the key block
    VU c0_after_third;   // ^ high product of c2
    VU c2_after_third;   // ^ low product of the key block
    VU c3_after_third;
};

HWY_INLINE Pairs pairs_of(const HeadRule& head, std::int64_t first) {
    const VU pair = hn::BitCast(DU(), hn::Iota(DU64(), static_cast<std::uint64_t>(first)));
    const VU first0 = product_of(pair, philox::kMultiplier0);
    const VU second1 = product_of(with(high_half(first0), head.batch ^ head.key1(0)), philox::kMultiplier1);
    const VU third0 = product_of(with(high_half(second1), low(head.of_head) ^ head.key0(1)), philox::kMultiplier0);
    return {.c2_before_third = with(first0, head.key1(1)),
            .c0_after_third = with(second1, head.key0(2)),
            .c2_after_third = with(high_half(third0), head.key1(2)),
            .c3_after_third = third0};
}

struct Counters {
    VU c0, c1, c2, c3;

    HWY_INLINE Counters() {}  // written out: GCC does not inline implicit constructors into code of another target
    HWY_INLINE Counters(VU word0, VU word1, VU word2, VU word3) : c0(word0), c1(word1), c2(word2), c3(word3) {}
};

HWY_INLINE Counters after_third_round(const Pairs& pairs, std::uint64_t of_keys) {
    const VU third1 = product_of(with(pairs.c2_before_third, high(of_keys)), philox::kMultiplier1);
    return {hn::Xor(high_half(third1), pairs.c0_after_third), third1, with(pairs.c2_after_third, low(of_keys)),
            pairs.c3_after_third};
}

HWY_INLINE Counters next_round(const Counters& c, std::uint32_t key0, std::uint32_t key1) {
    const DU du;
    const VU product0 = product_of(c.c0, philox::kMultiplier0);
    const VU product1 = product_of(c.c2, philox::kMultiplier1);
    return {hn::Xor3(high_half(product1), c.c1, hn::Set(du, key0)), product1,
            hn::Xor3(high_half(product0), c.c3, hn::Set(du, key1)), product0};
}

/// Interleaves the lower halves of `a` and `b`, or their upper halves.
HWY_INLINE VU lower_of(VU a, VU b) { return hn::OddEven(hn::DupEven(b), a); }
HWY_INLINE VU upper_of(VU a, VU b) { return hn::OddEven(b, hn::DupOdd(a)); }

constexpr int kLastRound = philox::kRounds - 1;

/// The state before the last round, for blocks first .. first + kBlocks - 1.
template <int kBlocks>
struct Chains {
    Counters of[kBlocks];

    HWY_INLINE Chains(const HeadRule& head, const Pairs& pairs, std::uint32_t keys, int first) {
        TESSERA_UNROLL
        for (int b = 0; b < kBlocks; ++b) of[b] = after_third_round(pairs, head.product_of(keys, first + b));
        TESSERA_UNROLL
        for (int round = 3; round < kLastRound; ++round) {
            TESSERA_UNROLL
            for (int b = 0; b < kBlocks; ++b) of[b] = next_round(of[b], head.key0(round), head.key1(round));
        }
    }
};

/// The last round, for the patches of `a` and `b` together: the bits that differ from last_kept's.
HWY_INLINE Counters unlike_last(const Counters& a, const Counters& b, const HeadRule& head, const std::uint32_t* last) {
    const DU du;
    const VU a0 = product_of(a.c0, philox::kMultiplier0), b0 = product_of(b.c0, philox::kMultiplier0);
    const VU a1 = product_of(a.c2, philox::kMultiplier1), b1 = product_of(b.c2, philox::kMultiplier1);
    return {hn::Xor3(upper_of(a1, b1), lower_of(a.c1, b.c1), hn::Set(du, head.key0(kLastRound) ^ last[0])),
            with(lower_of(a1, b1), last[1]),
            hn::Xor3(upper_of(a0, b0), lower_of(a.c3, b.c3), hn::Set(du, head.key1(kLastRound) ^ last[2])),
            with(lower_of(a0, b0), last[3])};
}

/// KeptBits of two vectors of patches; `unlike` marks the words that are decided.
struct Bits {
    VU kept;
    VU unlike;

    template <int kBlocks>
    HWY_INLINE Bits(const Chains<kBlocks>& a, const Chains<kBlocks>& b, const HeadRule& head, int first) {
        const DU du;
        VU turned = hn::Set(du, ~0U);  // kept ^ last_kept of the highest bit so far: 0 where the word differs there
        unlike = hn::Zero(du);
        const auto add_higher = [&](VU bit_unlike_last, std::uint32_t turn) HWY_ATTR {
            turned = hn::AndNot(bit_unlike_last, hn::Xor(turned, hn::Set(du, turn)));
            unlike = hn::Or(unlike, bit_unlike_last);
        };
        TESSERA_UNROLL
        for (int i = kBlocks - 1; i >= 0; --i) {
            const std::uint32_t* last = head.rule.last_kept + dropout::kBitsOfBlock * (first + i);
            const Counters bits = unlike_last(a.of[i], b.of[i], head, last);
            add_higher(bits.c3, i == kBlocks - 1 ? last[3] : last[3] ^ last[4]);
            add_higher(bits.c2, last[2] ^ last[3]);
            add_higher(bits.c1, last[1] ^ last[2]);
            add_higher(bits.c0, last[0] ^ last[1]);
        }
        kept = with(turned, head.rule.last_kept[dropout::kBitsOfBlock * first]);
    }

    HWY_INLINE void add_lower(const Bits& lower) {
        kept = hn::And(kept, hn::Or(lower.kept, unlike));
        unlike = hn::Or(unlike, lower.unlike);
    }

    HWY_INLINE bool any_level() const {
        const DU du;
        return !hn::AllTrue(du, hn::Eq(unlike, hn::Set(du, ~0U)));
    }
};

/// The kept weights of two vectors of patches: `a` in the lower halves, `b` in the upper.
template <int kBlocks>
HWY_INLINE VU kept_of(const HeadRule& head, const Pairs& a, std::uint32_t keys_a, const Pairs& b,
                      std::uint32_t keys_b) {
    Bits bits(Chains<kBlocks>(head, a, keys_a, 0), Chains<kBlocks>(head, b, keys_b, 0), head, 0);
    for (int block = kBlocks; block < head.rule.blocks && bits.any_level(); ++block) {
        bits.add_lower({Chains<1>(head, a, keys_a, block), Chains<1>(head, b, keys_b, block), head, block});
    }
    return bits.kept;
}

/// Stores the factors of key kKey and the later keys of a block. A bit's sign says whether the weight is kept.
template <int kKey>
HWY_INLINE void store_from(VU bits, V kept, float* factors, std::int64_t stride) {
    if constexpr (kKey < kKeys) {
        const hn::RebindToSigned<D> di;
        const auto sign = hn::BroadcastSignBit(hn::BitCast(di, hn::ShiftLeft<31 - bit_in_patch(1, kKey)>(bits)));
        hn::Store(hn::And(hn::BitCast(D(), sign), kept), D(), factors);
        store_from<kKey + 1>(bits, kept, factors + stride, stride);
    }
}

/// Stores the factors of the key block that starts at key `first` of the tile, which has `keys`. `bits`: each query's
/// 16 bits in the upper half of its lane.
HWY_INLINE void store_block(VU bits, V kept, std::int64_t first, std::int64_t keys, float* factors,
                            std::int64_t stride) {
    if (first >= 0 && first + kKeys <= keys) {
        store_from<0>(bits, kept, factors + first * stride, stride);
        return;
    }
    for (std::int64_t key = std::max<std::int64_t>(first, 0); key < std::min(first + kKeys, keys); ++key) {
        const auto keep = hn::TestBit(bits, hn::Set(DU(), 1U << bit_in_patch(1, key - first)));
        hn::Store(hn::IfThenElseZero(hn::RebindMask(D(), keep), kept), D(), factors + key * stride);
    }
}

/// Fills a tile under a rule that takes kBlocks blocks; kFirstBlocks also serves rules that take more.
template <int kBlocks>
void fill_tile(const DropoutRule& rule, const TilePosition& position, std::int64_t keys, float* factors,
               std::int64_t stride) {
    const V kept = hn::Set(D(), rule.kept);
    const HeadRule head(rule);
    const std::int64_t begin = position.kv / kKeys * kKeys - position.kv;
    const auto block_of = [&](std::int64_t key) { return static_cast<std::uint32_t>((position.kv + key) / kKeys); };
    for (std::int64_t lane = 0; lane < stride; lane += kWidth, factors += kWidth) {
        const Pairs pairs = pairs_of(head, (position.q + lane) / 2);
        if (position.q % 2 == 0) {
            for (std::int64_t key = begin; key < keys; key += 2 * kKeys) {
                const VU bits = kept_of<kBlocks>(head, pairs, block_of(key), pairs, block_of(key + kKeys));
                store_block(hn::OddEven(hn::DupEven(bits), hn::ShiftLeft<16>(bits)), kept, key, keys, factors, stride);
                store_block(hn::OddEven(bits, hn::ShiftLeft<16>(hn::DupOdd(bits))), kept, key + kKeys, keys, factors,
                            stride);
            }
        } else {  // the last query of a pair, and the first of the next
            const Pairs next = pairs_of(head, (position.q + lane) / 2 + 1);
            for (std::int64_t key = begin; key < keys; key += kKeys) {
                const VU bits = kept_of<kBlocks>(head, pairs, block_of(key), next, block_of(key));
                store_block(hn::OddEven(hn::ShiftLeft<16>(bits), bits), kept, key, keys, factors, stride);
            }
        }
    }
}

void DropoutFactors(const DropoutRule& rule, const TilePosition& position, std::int64_t keys, float* factors,
                    std::int64_t stride) {
    switch (std::min(KeepRule(rule.seed, rule.threshold).blocks, kFirstBlocks)) {
        case 0: std::fill_n(factors, keys * stride, rule.kept); break;
        case 1: fill_tile<1>(rule, position, keys, factors, stride); break;
        case 2: fill_tile<2>(rule, position, keys, factors, stride); break;
        default: fill_tile<kFirstBlocks>(rule, position, keys, factors, stride);
    }
}

}  // namespace tessera::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::cpu::simd {

HWY_EXPORT(DropoutFactors);

void dropout_factors(const DropoutRule& rule, const TilePosition& position, std::int64_t keys, float* factors,
                     std::int64_t stride) {
    HWY_DYNAMIC_DISPATCH(DropoutFactors)(rule, position, keys, factors, stride);
}

}  // namespace tessera::cpu::simd
#endif
