// SPDX-License-Identifier: Apache-2.0
//
// Formats problems, plans and comparisons, as text and as JSON, for every command.
#pragma once

#include <string>

#include "check/compare.hpp"
#include "session.hpp"
#include "tessera/plan.hpp"

namespace tessera::cli {

Json json_of(const Problem& problem);
Json json_of(const Plan& plan);
Json json_of(const check::Report& report);

/// Formats "cpu.fa2.forward (AVX3), tile 64 x 64, 2 threads, workspace 1.2 MiB".
std::string plan_text(const Plan& plan);

/// Formats a table: tensor, relative RMSE, largest error, share of the limit, verdict; the worst element of failures.
std::string report_text(const check::Report& report, int width);

}  // namespace tessera::cli
