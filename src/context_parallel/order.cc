// SPDX-License-Identifier: Apache-2.0
#include "context_parallel/order.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "core/invalid.hpp"

namespace tessera::ranks {
namespace {

void expect_permutation(std::span<const std::int64_t> permutation, std::int64_t total) {
    if (static_cast<std::int64_t>(permutation.size()) != total)
        invalid("permutation", fmt::format("expected the {} positions, got {}", total, permutation.size()));
    std::vector<bool> seen(permutation.size(), false);
    for (const std::int64_t position : permutation) {
        if (position < 0 || position >= total || seen[static_cast<std::size_t>(position)])
            invalid("permutation", fmt::format("expected each position below {} once, got {} {}", total, position,
                                               position < 0 || position >= total ? "out of range" : "twice"));
        seen[static_cast<std::size_t>(position)] = true;
    }
}

}  // namespace

std::vector<std::int64_t> positions_of(SequenceOrder order, std::span<const std::int64_t> permutation,
                                       std::int64_t total, int ranks) {
    const std::int64_t chunks = order == SequenceOrder::zigzag ? 2 * ranks : ranks;
    if (total <= 0 || total % chunks != 0)
        invalid("whole", fmt::format("expected a sequence whose length {} divides ({} ranks), got {} rows", chunks,
                                     ranks, total));
    if (order == SequenceOrder::permutation) {
        expect_permutation(permutation, total);
        return {permutation.begin(), permutation.end()};
    }
    if (!permutation.empty())
        invalid("permutation", fmt::format("expected none in a named order, got {} positions", permutation.size()));
    std::vector<std::int64_t> positions(static_cast<std::size_t>(total));
    std::iota(positions.begin(), positions.end(), 0);
    if (order == SequenceOrder::contiguous) return positions;
    const std::int64_t length = total / chunks;
    auto at = positions.begin();
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
        for (const std::int64_t chunk : {rank, chunks - 1 - rank}) {
            std::iota(at, at + length, chunk * length);
            at += length;
        }
    }
    return positions;
}

std::vector<Piece> pieces_of(std::span<const std::int64_t> positions, int ranks) {
    std::vector<Piece> pieces;
    const std::int64_t rows = static_cast<std::int64_t>(positions.size()) / ranks;
    for (int rank = 0; rank < ranks; ++rank) {
        for (std::int64_t row = 0; row < rows; ++row) {
            const std::int64_t position = positions[static_cast<std::size_t>(rank * rows + row)];
            if (row > 0 && pieces.back().end() == position) ++pieces.back().length;
            else pieces.push_back({rank, row, position, 1});
        }
    }
    return pieces;
}

}  // namespace tessera::ranks
