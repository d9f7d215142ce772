// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

namespace tessera::measure {

/// What is told of repeated measurements. Times are skewed to the right, so: median and quartiles, no mean.
struct Summary {
    std::size_t count = 0;
    double median = 0;
    double spread = 0;  ///< interquartile range: the middle half of the samples lies within
    double least = 0;
    double most = 0;
};

/// A spread of more than this share of the median says that something else took part: such a figure decides nothing.
inline constexpr double kNoisySpread = 0.2;
inline bool is_noisy(double median, double spread) { return spread > kNoisySpread * median; }

/// The q-quantile (0 <= q <= 1) of sorted samples, linear between neighbours; 0 without samples.
double quantile(const std::vector<double>& sorted, double q);

Summary summarize(std::vector<double> samples);

}  // namespace tessera::measure
