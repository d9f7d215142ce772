// SPDX-License-Identifier: Apache-2.0
//
// The geometry of a drawing: margins, axes, and the map from data to pixels.
#pragma once

#include <string>
#include <vector>

#include "plot/figure.hpp"
#include "plot/ticks.hpp"

namespace tessera::plot {

/// One name of the legend, at the left end of its sample.
struct LegendEntry {
    std::size_t series = 0;
    double x = 0;
    double y = 0;  ///< baseline
};

/// A name beside the last point of its series.
struct EndLabel {
    std::size_t series = 0;
    double y = 0;       ///< middle of the text
    double line_y = 0;  ///< y of the end of its line
};

/// A Note in pixels.
struct NoteLabel {
    std::string text;
    double x = 0;  ///< left end
    double y = 0;  ///< baseline
    std::optional<int> color{};
};

struct Frame {
    Limits x;
    Limits y;
    std::vector<Tick> x_ticks;
    std::vector<Tick> y_ticks;
    std::vector<std::string> title;     ///< lines
    std::vector<std::string> subtitle;  ///< lines
    std::vector<LegendEntry> legend;
    std::vector<EndLabel> end_labels;
    std::vector<NoteLabel> notes;  ///< notes of the Figure that fit without overlap
    double height = 0;             ///< height of the whole drawing, in pixels
    double left = 0;               ///< edges of the plotting area, in pixels
    double top = 0;
    double right = 0;
    double bottom = 0;

    /// Throws Error(invalid_argument) for data that do not fit the axes.
    explicit Frame(const Figure& figure);

    double px(double value) const;
    double py(double value) const;

 private:
    void place_heading(const Figure& figure, bool with_legend);
    void place_end_labels(const Figure& figure);
    void place_notes(const Figure& figure);
    double hidden_by(const Figure& figure, double from, double to, double baseline) const;

    Scale x_scale_;
    Scale y_scale_;
};

/// Returns the position of a value along the axis, 0 at its least end and 1 at its most.
double along(double value, const Limits& limits, Scale scale);

}  // namespace tessera::plot
