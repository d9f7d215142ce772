// SPDX-License-Identifier: Apache-2.0
//
// Shows problems, plans and comparisons as text and as JSON, identically in every command.
#pragma once

#include <string>

#include "check/compare.hpp"
#include "session.hpp"
#include "tessera/plan.hpp"

namespace tessera::cli {

Json json_of(const Problem& problem);
Json json_of(const Plan& plan);
Json json_of(const check::Report& report);

/// Returns "cpu.fa2.forward (AVX3), tile 64 x 64, 2 threads, workspace 1.2 MiB".
std::string plan_text(const Plan& plan);

/// Returns a table of tensor, relative RMSE, largest error, used fraction of the limit and verdict, with the worst
/// element of each tensor that fails.
std::string report_text(const check::Report& report, int width);

}  // namespace tessera::cli
