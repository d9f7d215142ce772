// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <vector>

#include "measure/host.hpp"
#include "measure/record.hpp"
#include "table.hpp"
#include "tessera/plan.hpp"

namespace tessera::cli {

/// The table of `tessera bench`, whose rows appear one by one. What all rows share stands once above it, so that the
/// columns are what differs, and the measurements.
class BenchTable {
 public:
    explicit BenchTable(std::span<const Plan> plans);

    /// The machine, what the rows share, and the titles.
    std::string head(const measure::Host& host, int repeat) const;
    std::string row(const measure::Record& record) const;

 private:
    std::vector<std::size_t> shown_;  ///< indices into the list of describing columns
    std::string shared_;
    std::string threads_;
    Table table_;
};

}  // namespace tessera::cli
