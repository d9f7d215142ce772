// SPDX-License-Identifier: Apache-2.0
//
// The sets of options that `tessera bench` measures: one from the command line, or those of a suite.
#pragma once

#include <string>
#include <vector>

#include "options.hpp"
#include "tessera/plan.hpp"

namespace tessera::cli {

/// Options that give every combination of their lists.
struct BenchSet {
    ShapeOptions shape;
    ScoreOptions scores{.seed_makes_inputs = true};
    HowOptions how;
    PassOptions pass;

    /// Returns a plan for each combination. Combinations that no kernel supports are reported on stderr and left out.
    /// Throws the last reason if none is left, unless `may_be_empty`.
    std::vector<Plan> plans(bool may_be_empty) const;
};

/// A file of bench/suites: a name, its purpose, and sets whose fields are named like the options.
struct Suite {
    std::string name;
    std::string about;
    std::vector<BenchSet> sets;
};

/// Reads a suite. `name` is a path if it has a slash or ends in .json. Otherwise it is the name of a suite of this
/// build, in share/tessera/suites beside the installed command or in bench/suites of the checkout. Throws
/// Error(cannot_open) with the available names, Error(bad_data) naming the field.
Suite read_suite(const std::string& name);

/// Returns every suite that read_suite() finds by name.
std::vector<Suite> find_suites();

}  // namespace tessera::cli
