// SPDX-License-Identifier: Apache-2.0
//
// The order in which CTAs of fa3's backward start. It is the kernel's own: both decode the numbers of
// cuda/fa3/host/numbering.hpp, or of a ragged call's list (cuda/fa3/host/key_block_list.hpp).
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "tessera/problem.hpp"

namespace tessera::model {

/// A CTA: a key block of a kv head and a head split of a sequence.
struct KeyBlockStart {
    int sequence, kv_head, split, n;

    friend bool operator==(const KeyBlockStart&, const KeyBlockStart&) = default;
};

/// All key blocks of a call in the order in which they start. `lengths`: queries and keys of each sequence. fa3's
/// backward must have a compiled shape for the Problem, one that adds up dQ in its main kernel.
std::vector<KeyBlockStart> key_block_starts(const Problem& problem,
                                            std::span<const std::pair<std::int64_t, std::int64_t>> lengths);

/// Rows of fp32 accumulators that a ragged call of that kernel adds dQ up in, of one query head: whole query blocks, in
/// both accumulators where key blocks add to both.
std::int64_t accumulator_rows(const Problem& problem, std::span<const std::pair<std::int64_t, std::int64_t>> lengths);

}  // namespace tessera::model
