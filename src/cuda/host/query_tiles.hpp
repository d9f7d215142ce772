// SPDX-License-Identifier: Apache-2.0
//
// How many tiles of queries a call has, and which member one of them belongs to. Plain C++.
#pragma once

#include <cstdint>

#include "core/arena.hpp"
#include "tessera/mask.hpp"
#include "tessera/problem.hpp"

namespace tessera::cuda {

/// Tiles of `block_q` queries of one head: of one batch member, or of all members of a ragged call, which is as many as
/// total_q rows can need and not what the bound on their lengths says.
inline std::int64_t query_tiles(const Problem& p, std::int64_t block_q) {
    return p.ragged ? p.total_q / block_q + p.batch : (p.len_q + block_q - 1) / block_q;
}

/// Rows of `query_tiles` in a call: heads, and batch members that are not ragged. Saturates.
inline std::int64_t query_heads(const Problem& p) {
    return p.ragged ? p.heads_q : saturating_product(p.batch, p.heads_q);
}

/// A tile of queries of one member.
struct QueryTile {
    int batch;
    int block;  ///< its place in the member
};

/// The tiles of a head of all ragged members lie in a row of query_tiles(): those of member b from place
/// first_row(b) / block_q + b on, which leaves each member as many as it can need. Some places are empty: their block
/// is past the member's end. `first_row`: from a member to its first row; rising.
template <class FirstRow>
TESSERA_HOST_DEVICE inline QueryTile ragged_tile(int batch, int place, int block_q, const FirstRow& first_row) {
    const auto first_of = [&](int member) { return static_cast<int>(first_row(member) / block_q) + member; };
    int member = 0;  // the last one that begins at `place` or before it
    for (int end = batch; end - member > 1;) {
        const int middle = member + (end - member) / 2;
        if (first_of(middle) <= place) member = middle;
        else end = middle;
    }
    return {member, place - first_of(member)};
}

}  // namespace tessera::cuda
