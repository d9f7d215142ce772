// SPDX-License-Identifier: Apache-2.0
//
// The cases of `tessera bench`: a set of options on the command line, or the sets of a suite.
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

    /// A plan for each combination; those that no kernel takes are reported on stderr and left out. Throws the last
    /// reason if none remains, unless `may_be_empty`.
    std::vector<Plan> plans(bool may_be_empty) const;
};

/// A file of bench/suites: a name, a purpose, and sets whose fields have the options' names.
struct Suite {
    std::string name;
    std::string about;
    std::vector<BenchSet> sets;
};

/// Reads a suite. A `name` with a slash or the ending .json is a path. Any other is the name of a file in
/// share/tessera/suites beside the installed command, or in bench/suites of the checkout. Throws Error(cannot_open)
/// with the known names, Error(bad_data) naming the field.
Suite read_suite(const std::string& name);

/// Every suite that read_suite() finds by name.
std::vector<Suite> find_suites();

}  // namespace tessera::cli
