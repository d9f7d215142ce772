// SPDX-License-Identifier: Apache-2.0
//
// The output of `tessera plan` about a machine that may be absent, and about costs.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "options.hpp"
#include "plan_on.hpp"
#include "session.hpp"

namespace tessera::cli {

/// Returns "0.06 ms, 582 TFLOP/s, bound by tensor (64 % of it)" and the costs that the prediction omits.
std::string cost_text(const std::optional<model::Prediction>& prediction);

/// Adds bytes moved, tiles and memory.
void add_cost_facts(const model::Prediction& prediction, std::vector<std::pair<std::string, std::string>>& facts);

/// Throws UsageError for a --backend or --threads that the machine does not have.
void expect_for_machine(const HowOptions& how, const model::Machine& machine);

/// Prints the plan; throws Error(unsupported), with every reason, when no kernel runs the Problem there.
void show_plan_on(const model::Machine& machine, const Problem& problem, Pass pass, const PlanOn& plan,
                  const Session& session);

/// Returns the document of `tessera plan --json` as rows of a table: the chosen kernel, then the others.
Json plan_rows(const Json& document);

}  // namespace tessera::cli
