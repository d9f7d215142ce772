// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

namespace tessera::measure {

/// Summary of repeated measurements. Times are skewed to the right, so it has median and quartiles instead of a mean.
struct Summary {
    std::size_t count = 0;
    double median = 0;
    double spread = 0;  ///< interquartile range: the width of the middle half of the samples
    double least = 0;
    double most = 0;
};

/// A spread above this fraction of the median shows that other work interfered; such a measurement decides nothing.
inline constexpr double kNoisySpread = 0.2;
inline bool is_noisy(double median, double spread) { return spread > kNoisySpread * median; }

/// Returns the q-quantile (0 <= q <= 1) of sorted samples, linear between neighbours; 0 without samples.
double quantile(const std::vector<double>& sorted, double q);

Summary summarize(std::vector<double> samples);

}  // namespace tessera::measure
