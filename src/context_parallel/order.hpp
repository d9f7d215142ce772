// SPDX-License-Identifier: Apache-2.0
//
// Which rows of a sequence each rank holds.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/context_parallel.hpp"

namespace tessera::ranks {

/// Consecutive rows of one rank that are consecutive in the sequence.
struct Piece {
    int rank = 0;
    std::int64_t row = 0;    ///< the first one, counted in the rank
    std::int64_t start = 0;  ///< its position in the sequence
    std::int64_t length = 0;

    std::int64_t end() const { return start + length; }
    friend bool operator==(const Piece&, const Piece&) = default;
};

/// The position of each row, [ranks * rows]: row i of rank r is at r * rows + i. Throws Error(invalid_argument) naming
/// "whole" when the ranks can't have equal rows, "permutation" when it is none of the positions.
std::vector<std::int64_t> positions_of(SequenceOrder order, std::span<const std::int64_t> permutation,
                                       std::int64_t total, int ranks);

/// The pieces of all ranks, by rank and row.
std::vector<Piece> pieces_of(std::span<const std::int64_t> positions, int ranks);

}  // namespace tessera::ranks
