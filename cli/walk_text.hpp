// SPDX-License-Identifier: Apache-2.0
//
// Formats a trace of `tessera walk`, and the example by hand.
#pragma once

#include <optional>
#include <string>

#include "session.hpp"
#include "walk/by_hand.hpp"
#include "walk/trace.hpp"

namespace tessera::cli {

struct WalkView {
    std::optional<std::int64_t> row{};  ///< the query to follow; without it the whole tile of queries
    bool all = false;                   ///< do not shorten a long table
    int width = 80;
};

/// The meaning of the columns, and the table of the steps.
std::string walk_text(const walk::Trace& trace, const WalkView& view);

/// The whole trace; with a row, only that query.
Json json_of(const walk::Trace& trace, const std::optional<std::int64_t>& row);

std::string hand_text(const walk::Hand& hand, bool backward, int width);
Json json_of(const walk::Hand& hand, bool backward);

/// A warning that the command computes all tiles twice though it shows one, if that takes long; otherwise empty.
/// `pairs` is the number of visible pairs of a query and a key. A file has fixed sizes, which no option reduces.
std::string long_run_text(const Plan& plan, std::int64_t pairs, bool has_file);

}  // namespace tessera::cli
