// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "plot/figure.hpp"

namespace tessera::plot {

struct Tick {
    double value = 0;
    std::string text;  ///< empty: a gridline without a number
};

/// Ends of an axis.
struct Limits {
    double least = 0;
    double most = 1;
};

/// Returns ticks within the limits, at most about `most_ticks` of them with a number. Values are 1, 2 or 5 times a
/// power of ten, or powers of two on a log2 axis.
std::vector<Tick> ticks(const Limits& limits, Scale scale, int most_ticks);

/// Returns limits that hold all `values` with a small margin, at round numbers on a linear axis. Ends that the axis
/// sets take precedence. Throws Error(invalid_argument) naming the axis if a value does not fit its scale (not finite,
/// or <= 0 on a log axis), or if the ends are not in order.
Limits limits_of(const Axis& axis, const std::string& name, const std::vector<double>& values);

/// Formats a number briefly, and exactly for ticks: "512", "2k", "1.5M", "0.02". `binary`: 1024 is "1k".
std::string number_text(double value, bool binary = false);

}  // namespace tessera::plot
