// SPDX-License-Identifier: Apache-2.0
//
// One case of `tessera bench`: a plan on generated tensors, timed.
#pragma once

#include "measure/bench.hpp"
#include "measure/host.hpp"
#include "measure/record.hpp"
#include "progress.hpp"
#include "suite.hpp"

namespace tessera::cli {

/// State that all cases share.
struct BenchRun {
    measure::Method method;
    measure::Host host = measure::describe_host();
    measure::ColdCache cache{measure::last_level_cache()};
};

/// Returns the Record of a case without its measurement. Records in a file are of this case if these fields agree.
measure::Record described(const Plan& plan, const measure::Host& host);

/// Runs and times the plan and returns the Record with its provenance. Tensors lie on the plan's device; the time
/// excludes copies to it.
measure::Record measure_case(const Plan& plan, const BenchSet& set, BenchRun& run, Progress& progress);

}  // namespace tessera::cli
