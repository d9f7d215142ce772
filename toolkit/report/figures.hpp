// SPDX-License-Identifier: Apache-2.0
//
// The plots of a report.
#pragma once

#include <vector>

#include "plot/figure.hpp"
#include "report/rows.hpp"

namespace tessera::report {

/// Speed by length, one line for each who; nothing when a group has a single length.
std::vector<plot::Figure> speed_figures(const DeviceRows& device);

/// Times of a base divided by those of the others: over tessera's `standard` and over the strongest peer, as far as a
/// group has them.
std::vector<plot::Figure> speed_up_figures(const DeviceRows& device);

/// Measured rates under the roofs of the machine, for each pass, dtype and head_dim; none for unknown machines. The
/// bytes are the model's.
std::vector<plot::Figure> roofline_figures(const DeviceRows& device);

/// Predicted against measured time, for each pass.
std::vector<plot::Figure> prediction_figures(const DeviceRows& device);

/// Median and worst absolute error of the predictions of these rows, in words; empty without predictions.
std::string accuracy_text(const std::vector<const Row*>& rows);
std::vector<const Row*> predicted_rows(const DeviceRows& device, const std::string& pass);

/// How rates of a device are written: TFLOP/s, or GFLOP/s where they are small.
struct Unit {
    const char* name = "TFLOP/s";
    double per_tflops = 1;
};
Unit unit_of(const DeviceRows& device);

/// Name, colour and dash of a line of a chart, without points; tessera's are thicker.
plot::Series line_style(const DeviceRows& device, const std::string& who);

}  // namespace tessera::report
