// SPDX-License-Identifier: Apache-2.0
//
// How many tiles of queries a call has, and which sequence one of them belongs to. Plain C++.
#pragma once

#include <cstdint>

#include "core/arena.hpp"
#include "tessera/mask.hpp"
#include "tessera/problem.hpp"

namespace tessera::cuda {

/// Tiles of `block_q` queries of one head: of one sequence, or of all sequences of a ragged call, which is as many as
/// total_q rows can need and not what the bound on their lengths says.
inline std::int64_t query_tiles(const Problem& p, std::int64_t block_q) {
    return p.ragged ? p.total_q / block_q + p.batch : (p.len_q + block_q - 1) / block_q;
}

/// Rows of `query_tiles` in a call: heads, and sequences that are not ragged. Saturates.
inline std::int64_t query_heads(const Problem& p) {
    return p.ragged ? p.heads_q : saturating_product(p.batch, p.heads_q);
}

/// A tile of queries of one sequence.
struct QueryTile {
    int batch;
    int block;  ///< its place in the sequence
};

/// The tiles of a head of all ragged sequences lie in a row of query_tiles(): those of sequence b from place
/// first_row(b) / block_q + b on, which leaves each sequence as many as it can need. Some places are empty: their block
/// is past the sequence's end. `first_row`: from a sequence to its first row; rising.
template <class FirstRow>
TESSERA_HOST_DEVICE inline QueryTile ragged_tile(int batch, int place, int block_q, const FirstRow& first_row) {
    const auto first_of = [&](int sequence) { return static_cast<int>(first_row(sequence) / block_q) + sequence; };
    int sequence = 0;  // the last one that begins at `place` or before it
    for (int end = batch; end - sequence > 1;) {
        const int middle = sequence + (end - sequence) / 2;
        if (first_of(middle) <= place) sequence = middle;
        else end = middle;
    }
    return {sequence, place - first_of(sequence)};
}

}  // namespace tessera::cuda
