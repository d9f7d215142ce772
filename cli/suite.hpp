// SPDX-License-Identifier: Apache-2.0
//
// What `tessera bench` measures: a set of options on the command line, or the sets of a suite.
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

    /// A plan for each combination; those that no kernel takes are told on stderr and left out. Throws the last reason
    /// when none is left, unless `may_be_empty`.
    std::vector<Plan> plans(bool may_be_empty) const;
};

/// A file of bench/suites: a name, what it is for, and sets whose fields are named as the options are.
struct Suite {
    std::string name;
    std::string about;
    std::vector<BenchSet> sets;
};

/// `name`: a path, when it has a slash or ends in .json, or the name of a file among the suites of this build: those in
/// share/tessera/suites beside the installed command, or in bench/suites of the checkout. Throws Error(cannot_open)
/// with the names that there are, Error(bad_data) naming the field.
Suite read_suite(const std::string& name);

/// Every suite that read_suite() finds by name.
std::vector<Suite> find_suites();

}  // namespace tessera::cli
