// SPDX-License-Identifier: Apache-2.0
//
// The dropout mask. The word of element (batch, head, query, key) is word key % 4 of
// philox(counter = {key / 4, query, head, batch}, key = seed): it depends on nothing else, so that every kernel,
// backend and pass sees the same mask.
#pragma once

#include "core/philox.hpp"

namespace tessera {

/// The words of the four keys from 4 * quad on.
TESSERA_HOST_DEVICE constexpr PhiloxBlock dropout_block(std::uint64_t seed, std::uint32_t batch, std::uint32_t head,
                                                        std::uint32_t query, std::uint32_t quad) {
    return philox4x32({quad, query, head, batch}, seed);
}

/// The random word of one attention weight.
TESSERA_HOST_DEVICE constexpr std::uint32_t dropout_word(std::uint64_t seed, std::int64_t batch, std::int64_t head,
                                                         std::int64_t query, std::int64_t key) {
    const PhiloxBlock block = dropout_block(seed, static_cast<std::uint32_t>(batch), static_cast<std::uint32_t>(head),
                                            static_cast<std::uint32_t>(query), static_cast<std::uint32_t>(key / 4));
    return block[static_cast<std::size_t>(key % 4)];
}

/// Words under this value are kept: round((1 - p) * 2^32), so the keep probability is exact to 2^-32. It is 2^32, over
/// every word, for p = 0, hence 64 bits; and 1 at least, since p < 1 keeps something (a kernel takes 0 for no dropout).
constexpr std::uint64_t keep_threshold(double probability) {
    const auto rounded = static_cast<std::uint64_t>((1.0 - probability) * 4294967296.0 + 0.5);
    return rounded == 0 ? 1 : rounded;
}

}  // namespace tessera
