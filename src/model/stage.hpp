// SPDX-License-Identifier: Apache-2.0
//
// The thread blocks of a kernel with their clocks, in launch order. A block goes through the inner tiles of a row of
// tiles (backward: of a column).
#pragma once

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "model/family.hpp"

namespace tessera::model {

struct Stage {
    const Problem& problem;
    std::span<const std::pair<std::int64_t, std::int64_t>> sequences;  ///< (queries, keys) of each; empty: all equal
    Tile tile;
    bool rows_outer = true;            ///< a block has a tile of queries, else a tile of keys
    bool whole_groups = false;         ///< a block has all query heads of a group
    bool whole_heads = false;          ///< a block goes through all tiles of a head
    std::int64_t blocks_per_head = 1;  ///< with whole_heads: a head's tiles are dealt round robin to so many blocks
    std::int64_t interleaved = 1;  ///< with whole_heads: tiles that a block runs at once; a single one takes as long
    Order order = Order::grid_order;
    std::int64_t splits = 1;  ///< splits of the keys of a row, each in its own block
    double step = 0;          ///< clocks of an inner tile
    double mask = 0;          ///< clocks added for a partial tile
    double ends = 0;          ///< clocks of a block's prologue and epilogue
    bool masks_all = false;   ///< every tile runs the mask code
    bool ends_cut = true;     ///< a tile that extends beyond the last key is partial
    /// Clocks from one addition to a dQ tile to the next, if key blocks add in a fixed order; 0: in any order.
    double dq_add = 0;
    bool fa3_dq_order = false;  ///< the order of fa3's backward, else of fa2's
    /// Heads of a round in which the longest blocks start first; 0: a head's blocks follow each other.
    std::int64_t heads_longest_first = 0;

    double clocks(std::int64_t inner, std::int64_t cut) const {
        return static_cast<double>(inner) * step + static_cast<double>(masks_all ? inner : cut) * mask + ends;
    }
    /// Query heads that a block goes through.
    std::int64_t heads_of_block() const { return whole_groups ? problem.group() : 1; }
    std::int64_t heads() const { return problem.heads_q / heads_of_block(); }
    /// Lengths of all sequences.
    std::vector<std::pair<std::int64_t, std::int64_t>> lengths() const;
};

/// Clocks of all thread blocks in launch order.
std::vector<double> blocks_in_order(const Stage& stage);

/// Clocks until the last key block is done, if dQ is added up in a fixed order. Key blocks start in launch order, one
/// per multiprocessor, and each waits for those that add to its dQ tiles before it.
double clocks_in_dq_order(const Stage& stage, int multiprocessors);

}  // namespace tessera::model
