// SPDX-License-Identifier: Apache-2.0
//
// The plots of a report.
#pragma once

#include <vector>

#include "plot/figure.hpp"
#include "report/rows.hpp"

namespace tessera::report {

/// Plots speed by length, one line for each label; empty if a group has a single length.
std::vector<plot::Figure> speed_figures(const DeviceRows& device);

/// Plots times of a base divided by those of the others. The bases are tessera's `standard` and the strongest peer, if
/// a group has them.
std::vector<plot::Figure> speed_up_figures(const DeviceRows& device);

/// Plots measured rates under the roofs of the machine, for each pass, dtype and head_dim; empty for unknown machines.
/// The bytes are the model's.
std::vector<plot::Figure> roofline_figures(const DeviceRows& device);

/// Plots predicted against measured time for each pass.
std::vector<plot::Figure> prediction_figures(const DeviceRows& device);

/// Returns the median and worst absolute error of the predictions of these rows, in words; empty without predictions.
std::string accuracy_text(const std::vector<const Row*>& rows);
std::vector<const Row*> predicted_rows(const DeviceRows& device, const std::string& pass);

/// The unit of a device's rates: TFLOP/s, or GFLOP/s for small rates.
struct Unit {
    const char* name = "TFLOP/s";
    double per_tflops = 1;
};
Unit unit_of(const DeviceRows& device);

/// Returns name, colour and dash of a line without points; tessera's lines are thicker.
plot::Series line_style(const DeviceRows& device, const std::string& label);

}  // namespace tessera::report
