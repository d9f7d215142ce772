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

/// Settings and state that all cases share.
struct BenchRun {
    measure::Method method;
    measure::Host host = measure::describe_host();
    measure::ColdCache cache{measure::last_level_cache()};
};

/// The Record of a case, without its measurement. A Record in a file belongs to the same case if it agrees with this
/// one.
measure::Record described(const Plan& plan, const measure::Host& host);

/// Runs and times the plan, and returns the Record with its provenance. Tensors are placed on the plan's device; copies
/// are not timed.
measure::Record measure_case(const Plan& plan, const BenchSet& set, BenchRun& run, Progress& progress);

}  // namespace tessera::cli
