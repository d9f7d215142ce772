// SPDX-License-Identifier: Apache-2.0
//
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the counter-based generator of
// the dropout mask. The word of element (batch, head, query, key) is word key % 4 of
// philox(counter = {key / 4, query, head, batch}, key = seed): it depends on nothing else, so that every kernel,
// backend and pass sees the same mask.
#pragma once

#include <array>
#include <cstdint>

#include "tessera/mask.hpp"

namespace tessera {

using PhiloxBlock = std::array<std::uint32_t, 4>;

namespace philox {
inline constexpr std::uint32_t kMultiplier0 = 0xD2511F53u;
inline constexpr std::uint32_t kMultiplier1 = 0xCD9E8D57u;
inline constexpr std::uint32_t kWeyl0 = 0x9E3779B9u;  // golden ratio
inline constexpr std::uint32_t kWeyl1 = 0xBB67AE85u;  // sqrt(3) - 1
inline constexpr int kRounds = 10;
}  // namespace philox

TESSERA_HOST_DEVICE constexpr PhiloxBlock philox4x32(PhiloxBlock counter, std::uint64_t seed) {
    auto key0 = static_cast<std::uint32_t>(seed);
    auto key1 = static_cast<std::uint32_t>(seed >> 32);
    for (int round = 0; round < philox::kRounds; ++round) {
        const std::uint64_t product0 = std::uint64_t{philox::kMultiplier0} * counter[0];
        const std::uint64_t product1 = std::uint64_t{philox::kMultiplier1} * counter[2];
        counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<std::uint32_t>(product1),
                   static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key1,
                   static_cast<std::uint32_t>(product0)};
        key0 += philox::kWeyl0;
        key1 += philox::kWeyl1;
    }
    return counter;
}

/// The random word of one attention weight.
TESSERA_HOST_DEVICE constexpr std::uint32_t dropout_word(std::uint64_t seed, std::int64_t batch, std::int64_t head,
                                                         std::int64_t query, std::int64_t key) {
    const PhiloxBlock block = philox4x32({static_cast<std::uint32_t>(key / 4), static_cast<std::uint32_t>(query),
                                          static_cast<std::uint32_t>(head), static_cast<std::uint32_t>(batch)},
                                         seed);
    return block[static_cast<std::size_t>(key % 4)];
}

/// Words under this value are kept: round((1 - p) * 2^32), so the keep probability is exact to 2^-32. It is 2^32, over
/// every word, for p = 0, hence 64 bits.
constexpr std::uint64_t keep_threshold(double probability) {
    return static_cast<std::uint64_t>((1.0 - probability) * 4294967296.0 + 0.5);
}

}  // namespace tessera
