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

/// Ticks within the limits, at most about `most_ticks` of them with a number. Values are 1, 2 or 5 times a power of
/// ten, or powers of two on a log2 axis.
std::vector<Tick> ticks(const Limits& limits, Scale scale, int most_ticks);

/// Limits that hold all `values` with a little room, at round numbers on a linear axis. The axis' own ends win. Throws
/// Error(invalid_argument) naming the axis when a value does not fit its scale (not finite, or <= 0 on a log axis), or
/// when the ends are not in order.
Limits limits_of(const Axis& axis, const std::string& name, const std::vector<double>& values);

/// "512", "2k", "1.5M", "0.02": short, exact for ticks. `binary`: 1024 is "1k".
std::string number_text(double value, bool binary = false);

}  // namespace tessera::plot
