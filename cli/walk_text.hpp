// SPDX-License-Identifier: Apache-2.0
//
// Shows the trace of `tessera walk`, and the example by hand.
#pragma once

#include <optional>
#include <string>

#include "session.hpp"
#include "walk/by_hand.hpp"
#include "walk/trace.hpp"

namespace tessera::cli {

struct WalkView {
    std::optional<std::int64_t> row{};  ///< the query that is followed; without it the whole tile of queries
    bool all = false;                   ///< no tile is left out of a long table
    int width = 80;
};

/// Returns the meaning of the columns, and the table of the steps.
std::string walk_text(const walk::Trace& trace, const WalkView& view);

/// Returns everything in the trace; with a row, only that query.
Json json_of(const walk::Trace& trace, const std::optional<std::int64_t>& row);

std::string hand_text(const walk::Hand& hand, bool backward, int width);
Json json_of(const walk::Hand& hand, bool backward);

/// Returns a note that all tiles are computed, twice, if that takes long, because the user follows only one; else
/// empty. `pairs` of a query and a key are visible. No option reduces the sizes of a file (`has_file`).
std::string long_run_text(const Plan& plan, std::int64_t pairs, bool has_file);

/// Describes the keys of the sequence in a cache: "17 keys of a capacity of 48, in pages 5, 4 of 16".
std::string cache_text(const walk::Trace& trace, const ForwardArgs& args);

}  // namespace tessera::cli
