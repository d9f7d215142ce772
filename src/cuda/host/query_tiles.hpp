// SPDX-License-Identifier: Apache-2.0
//
// The number of query tiles of a call, and the sequence of a varlen call to which a tile belongs. Plain C++.
#pragma once

#include <cstdint>

#include "core/arena.hpp"
#include "tessera/mask.hpp"
#include "tessera/problem.hpp"

namespace tessera::cuda {

/// Tiles of `block_q` queries of one head. A varlen call counts the tiles of all its sequences: the most that total_q
/// rows can need, whatever the bound on the lengths.
inline std::int64_t query_tiles(const Problem& p, std::int64_t block_q) {
    return p.ragged ? p.total_q / block_q + p.batch : (p.len_q + block_q - 1) / block_q;
}

/// The factor of query_tiles() in a call's tiles: its heads, times its sequences if it is dense. Saturates.
inline std::int64_t query_heads(const Problem& p) {
    return p.ragged ? p.heads_q : saturating_product(p.batch, p.heads_q);
}

/// A tile of queries of one sequence.
struct QueryTile {
    int batch;
    int block;  ///< its index in the sequence
};

/// The tile at `index` of a head of all varlen sequences. The tiles of sequence b begin at first_row(b) / block_q + b,
/// which leaves each sequence as many as it can need; some are empty, with a block past the sequence's end.
/// `first_row`: the first row of a sequence; it ascends with the sequence.
template <class FirstRow>
TESSERA_HOST_DEVICE inline QueryTile ragged_tile(int batch, int index, int block_q, const FirstRow& first_row) {
    const auto first_of = [&](int sequence) { return static_cast<int>(first_row(sequence) / block_q) + sequence; };
    int sequence = 0;  // binary search for the last one that begins at or before `index`
    for (int end = batch; end - sequence > 1;) {
        const int middle = sequence + (end - sequence) / 2;
        if (first_of(middle) <= index) sequence = middle;
        else end = middle;
    }
    return {sequence, index - first_of(sequence)};
}

}  // namespace tessera::cuda
