// SPDX-License-Identifier: Apache-2.0
//
// The dropout mask. The weight of element (batch, head, query, key) is kept where a random word is under a threshold.
// The words are drawn a bit at a time, from the top: a block of Philox holds four bits of the words of a whole patch, 2
// queries x 16 keys. After 12 to 16 bits hardly any word still equals the threshold so far, so 32 weights take three or
// four blocks, where whole words take eight. A word depends on the seed and the four numbers alone: every kernel,
// backend and pass sees the same mask.
#pragma once

#include "core/philox_rounds.hpp"

namespace tessera {

namespace dropout {
inline constexpr int kPatchQueries = 2;
inline constexpr int kPatchKeys = 16;
inline constexpr int kBits = 32;        ///< bits of a word
inline constexpr int kBitsOfBlock = 4;  ///< bits of a word in one Philox block: bit n is in output n % 4 of block n / 4
}  // namespace dropout

/// The patch that a weight is in: its number in its head, and the head. Up to 2^32 queries and keys.
struct DropoutPatch {
    std::uint32_t queries = 0;  ///< query / 2
    std::uint32_t keys = 0;     ///< key / 16
    std::uint32_t head = 0;
    std::uint32_t batch = 0;

    /// The counter of bits 4 * block ... 4 * block + 3 of all words, counted from the top.
    TESSERA_HOST_DEVICE constexpr PhiloxBlock counter(std::uint32_t block) const {
        return {queries, keys + (block << 28), head, batch};
    }
};

TESSERA_HOST_DEVICE constexpr DropoutPatch dropout_patch(std::int64_t batch, std::int64_t head, std::int64_t query,
                                                         std::int64_t key) {
    return {static_cast<std::uint32_t>(query / dropout::kPatchQueries),
            static_cast<std::uint32_t>(key / dropout::kPatchKeys), static_cast<std::uint32_t>(head),
            static_cast<std::uint32_t>(batch)};
}

/// The weight's bit among the 32 of its patch. Keys of a patch lie two by two, as a lane of an mma holds them.
TESSERA_HOST_DEVICE constexpr int bit_in_patch(std::int64_t query, std::int64_t key) {
    return static_cast<int>(query % 2 * 16 + key % 2 * 8 + key / 2 % 8);
}

/// A weight is kept if its word is below this value: round((1 - p) * 2^32), so the keep probability is exact to 2^-32.
/// For p = 0 it is 2^32, above every word, hence 64 bits; it is at least 1, since p < 1 keeps some weights.
constexpr std::uint64_t keep_threshold(double probability) {
    const auto rounded = static_cast<std::uint64_t>((1.0 - probability) * 4294967296.0 + 0.5);
    return rounded == 0 ? 1 : rounded;
}

/// The random word of one attention weight, all of it.
constexpr std::uint32_t dropout_word(std::uint64_t seed, std::int64_t batch, std::int64_t head, std::int64_t query,
                                     std::int64_t key) {
    const DropoutPatch patch = dropout_patch(batch, head, query, key);
    std::uint32_t word = 0;
    for (std::uint32_t block = 0; block < dropout::kBits / dropout::kBitsOfBlock; ++block) {
        for (const std::uint32_t bits : philox4x32(patch.counter(block), seed)) {
            word = word << 1 | (bits >> bit_in_patch(query, key) & 1);
        }
    }
    return word;
}

/// The rule that keeps a weight: its word is under the threshold. Words and threshold are compared bit by bit.
struct KeepRule {
    PhiloxKeys keys;                               ///< round keys of the seed
    std::uint32_t last_kept[dropout::kBits] = {};  ///< bits of the largest word that is kept, from the top: 0 or ~0
    int blocks = 0;  ///< blocks after which every comparison is decided; 0: everything is kept

    KeepRule() = default;
    constexpr KeepRule(std::uint64_t seed, std::uint64_t threshold) : keys(seed) {
        const auto last = static_cast<std::uint32_t>(threshold - 1);
        for (int n = 0; n < dropout::kBits; ++n) {
            const bool set = (last >> (dropout::kBits - 1 - n) & 1) != 0;
            last_kept[n] = set ? ~0U : 0;
            if (!set) blocks = n / dropout::kBitsOfBlock + 1;
        }
    }
};

/// The comparison of a patch's words with the threshold after some of their bits.
struct KeptBits {
    std::uint32_t kept = ~0U;   ///< 0: the word is over the threshold; 1: it is under it, or equal so far
    std::uint32_t level = ~0U;  ///< 1: all bits so far equal the threshold's

    /// The comparison of one block's bits with last_kept[0] ... last_kept[kBitsOfBlock - 1].
    TESSERA_HOST_DEVICE static constexpr KeptBits of(const PhiloxBlock& block, const std::uint32_t* last_kept) {
        KeptBits bits;
        for (int n = dropout::kBitsOfBlock - 1; n >= 0;
             --n) {  // a lower bit decides only where all higher bits are equal
            const std::uint32_t word = block[static_cast<std::size_t>(n)];
            bits.kept = (~word & bits.kept) | (~word & last_kept[n]) | (bits.kept & last_kept[n]);
            bits.level &= ~(word ^ last_kept[n]);
        }
        return bits;
    }

    /// Adds the comparison of the next, lower bits.
    TESSERA_HOST_DEVICE constexpr void add(const KeptBits& lower) {
        kept &= lower.kept | ~level;
        level &= lower.level;
    }
};

/// The comparison of block `block` of a patch's words with the threshold.
TESSERA_HOST_DEVICE constexpr KeptBits kept_bits(const KeepRule& rule, const DropoutPatch& patch, int block) {
    PhiloxBlock words = patch.counter(static_cast<std::uint32_t>(block));
    for (const auto& key : rule.keys.words) words = philox_round(words, key);
    return KeptBits::of(words, rule.last_kept + dropout::kBitsOfBlock * block);
}

/// The weights among `wanted` that are kept (bits as in bit_in_patch()); the others' bits mean nothing.
TESSERA_HOST_DEVICE constexpr std::uint32_t kept_weights(const KeepRule& rule, const DropoutPatch& patch,
                                                         std::uint32_t wanted = ~0U) {
    KeptBits bits;
    for (int block = 0; block < rule.blocks && (bits.level & wanted) != 0; ++block) {
        bits.add(kept_bits(rule, patch, block));
    }
    return bits.kept;
}

}  // namespace tessera
