// SPDX-License-Identifier: Apache-2.0
//
// How `tessera walk` shows a trace, and the example by hand.
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

/// What the columns mean, and the table of the steps.
std::string walk_text(const walk::Trace& trace, const WalkView& view);

/// Everything in the trace; with a row, of that query only.
Json json_of(const walk::Trace& trace, const std::optional<std::int64_t>& row);

std::string hand_text(const walk::Hand& hand, bool backward, int width);
Json json_of(const walk::Hand& hand, bool backward);

/// Who follows one tile need not know that all tiles are computed, twice: says so where that takes long, else nothing.
/// `pairs` of a query and a key are visible; a file has its own sizes, which no option makes smaller.
std::string long_run_text(const Plan& plan, std::int64_t pairs, bool has_file);

}  // namespace tessera::cli
