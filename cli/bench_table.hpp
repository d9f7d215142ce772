// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "measure/bench.hpp"
#include "measure/host.hpp"
#include "measure/record.hpp"
#include "model/machine.hpp"
#include "table.hpp"
#include "tessera/plan.hpp"

namespace tessera::cli {

/// The table of `tessera bench`, whose rows appear one by one. Values that are equal in all rows are printed once above
/// it; the columns have the other values and the measurements.
class BenchTable {
 public:
    /// `machine` makes the predictions; null selects the machine that the Record's device names.
    BenchTable(std::span<const Plan> plans, const measure::Host& host, const model::Machine* machine);

    /// Returns the shared values and the titles.
    std::string head() const;
    std::string row(const measure::Record& measured, const std::optional<measure::Record>& predicted) const;

 private:
    std::vector<std::size_t> shown_;  ///< indices of the shown columns that describe the case
    std::string shared_;
    Table table_;
    bool with_prediction_ = false;
};

/// Describes the machine and the method of measurement, for the top of all tables.
std::string bench_method_text(const measure::Host& host, const measure::Method& method);

}  // namespace tessera::cli
