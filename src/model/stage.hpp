// SPDX-License-Identifier: Apache-2.0
//
// A kernel as it is dealt out: thread blocks, each of which goes through the tiles of a row (backward: of a column).
#pragma once

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "model/family.hpp"

namespace tessera::model {

struct Stage {
    const Problem& problem;
    std::span<const std::pair<std::int64_t, std::int64_t>> sequences;  ///< lengths of each; none: all are alike
    Tile tile;
    bool rows_outer = true;     ///< a block has a tile of queries; else a tile of keys, and ...
    bool whole_groups = false;  ///< ... all query heads of a group
    bool whole_heads = false;   ///< a block goes through all tiles of a head, one after the other, ...
    std::int64_t parts = 1;     ///< ... or, where a head has several blocks, through every so manieth
    std::int64_t together = 1;  ///< tiles that it takes side by side: an odd one takes as long as two
    Order order = Order::as_they_lie;
    std::int64_t splits = 1;  ///< parts that the keys of a row are dealt out in
    double step = 0;          ///< clocks of an inner tile
    double mask = 0;          ///< more of one that a mask or an end cuts
    double ends = 0;          ///< of a block beside that
    bool masks_all = false;   ///< every tile is taken for a cut one
    bool ends_cut = true;     ///< so is one that reaches over the last key
    /// Clocks from one addition to a dQ tile to the next, where key blocks add in a fixed order; 0: in any order.
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

/// Clocks of all thread blocks in the order in which they begin.
std::vector<double> blocks_in_order(const Stage& stage);

/// Clocks until the last key block is done, where dQ is added up in a fixed order: key blocks start in launch order,
/// one on a multiprocessor, and each waits for those that add to its dQ tiles before it.
double clocks_in_dq_order(const Stage& stage, int multiprocessors);

}  // namespace tessera::model
