// SPDX-License-Identifier: Apache-2.0
#include "measure/statistics.hpp"

#include <algorithm>
#include <cmath>

namespace tessera::measure {

double quantile(const std::vector<double>& sorted, double q) {
    if (sorted.empty()) return 0;
    const double at = q * static_cast<double>(sorted.size() - 1);
    const auto below = static_cast<std::size_t>(std::floor(at));
    const std::size_t above = std::min(below + 1, sorted.size() - 1);
    return sorted[below] + (sorted[above] - sorted[below]) * (at - std::floor(at));
}

Summary summarize(std::vector<double> samples) {
    if (samples.empty()) return {};
    std::sort(samples.begin(), samples.end());
    return {.count = samples.size(),
            .median = quantile(samples, 0.5),
            .spread = quantile(samples, 0.75) - quantile(samples, 0.25),
            .least = samples.front(),
            .most = samples.back()};
}

}  // namespace tessera::measure
