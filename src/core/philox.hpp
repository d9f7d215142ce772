// SPDX-License-Identifier: Apache-2.0
//
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the counter-based generator of
// the dropout mask (core/dropout.hpp).
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

}  // namespace tessera
