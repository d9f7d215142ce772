// SPDX-License-Identifier: Apache-2.0
//
// Texts of `tessera plan` about costs, and about a machine that need not be present.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "options.hpp"
#include "plan_on.hpp"
#include "session.hpp"

namespace tessera::cli {

/// Formats "0.06 ms, 582 TFLOP/s, bound by tensor (64 % of it)", with the costs that are left out.
std::string cost_text(const std::optional<model::Prediction>& prediction);

/// Adds lines about bytes moved, tiles and memory.
void add_cost_facts(const model::Prediction& prediction, std::vector<std::pair<std::string, std::string>>& facts);

/// Throws UsageError if the machine lacks what --backend or --threads ask for.
void expect_for_machine(const HowOptions& how, const model::Machine& machine);

/// Prints the plan. Throws Error(unsupported), with every reason, if no kernel runs the Problem there.
void show_plan_on(const model::Machine& machine, const Problem& problem, Pass pass, const PlanOn& plan,
                  const Session& session);

}  // namespace tessera::cli
