// SPDX-License-Identifier: Apache-2.0
//
// Lengths of a ragged batch by their distribution.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::cli {

/// True for "exp:1024:32768" and the like, whatever follows the name.
bool is_distribution(const std::string& text);

/// The lengths of "exp:MEAN:TOTAL" or "uniform:MEAN:TOTAL": TOTAL / MEAN sequences whose lengths are the quantiles in
/// the middle of equal parts of the distribution, so that they stand for all draws, and add up to TOTAL. uniform is
/// from 0 to twice the mean; every sequence has at least one row. Throws UsageError.
std::vector<std::int64_t> lengths_of_distribution(const std::string& option, const std::string& text);

}  // namespace tessera::cli
