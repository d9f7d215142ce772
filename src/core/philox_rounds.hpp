// SPDX-License-Identifier: Apache-2.0
//
// Philox4x32-10 round by round (core/philox.hpp has it whole), for code that computes several blocks of one seed side
// by side. A round depends on the previous one, so this hides its latency; all blocks use the same round keys.
#pragma once

#include "core/philox.hpp"

namespace tessera {

struct PhiloxKeys {
    std::uint32_t words[philox::kRounds][2];

    PhiloxKeys() = default;
    explicit constexpr PhiloxKeys(std::uint64_t seed) : words{} {
        for (std::uint32_t round = 0; round < philox::kRounds; ++round) {
            words[round][0] = static_cast<std::uint32_t>(seed) + round * philox::kWeyl0;
            words[round][1] = static_cast<std::uint32_t>(seed >> 32) + round * philox::kWeyl1;
        }
    }
};

/// One round; after kRounds, a counter has become its block.
TESSERA_HOST_DEVICE constexpr PhiloxBlock philox_round(const PhiloxBlock& counter, const std::uint32_t (&key)[2]) {
    const std::uint64_t product0 = std::uint64_t{philox::kMultiplier0} * counter[0];
    const std::uint64_t product1 = std::uint64_t{philox::kMultiplier1} * counter[2];
    return {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
            static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
}

constexpr bool philox_rounds_agree(PhiloxBlock counter, std::uint64_t seed) {
    const PhiloxBlock whole = philox4x32(counter, seed);
    const PhiloxKeys keys(seed);
    for (const auto& key : keys.words) counter = philox_round(counter, key);
    return counter[0] == whole[0] && counter[1] == whole[1] && counter[2] == whole[2] && counter[3] == whole[3];
}
static_assert(philox_rounds_agree({1, 2, 3, 4}, 0x0123456789ABCDEF));

}  // namespace tessera
