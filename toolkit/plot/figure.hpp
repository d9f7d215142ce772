// SPDX-License-Identifier: Apache-2.0
//
// The content of a plot, independent of its drawing: a Figure is plain data, and svg() draws it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::plot {

enum class Scale : std::uint8_t {
    linear,
    log2,   ///< ticks at powers of two, with 1024 written "1k"; for lengths
    log10,  ///< ticks at 1, 10, 100, between them at 2 and 5 when few decades are shown
};

struct Axis {
    std::string label;  ///< with the unit: "length of the row (tokens)"
    Scale scale = Scale::linear;
    std::optional<double> least{};  ///< end of the axis; empty: the axis follows the data
    std::optional<double> most{};
    bool from_zero = false;  ///< a linear axis that follows the data starts at 0
};

/// A position in data coordinates.
struct Position {
    double x = 0;
    double y = 0;
};

struct Point {
    double x = 0;
    double y = 0;
    std::string note{};  ///< shown while the pointer rests on the point
    double low = 0;      ///< a bar from here to `high` shows the spread of the value; none if they are equal
    double high = 0;
};

enum class Mark : std::uint8_t { line, points, line_and_points };

struct Series {
    std::string name;
    std::vector<Point> points;
    Mark mark = Mark::line_and_points;
    std::optional<int> color{};  ///< index of the palette (0..kColors-1, wraps); empty: the index in the figure
    bool dashed = false;
    bool strong = false;  ///< a thicker line, for the series of most interest
};

/// A straight line in data coordinates behind the series, in a muted colour: a roof, or the diagonal of equality.
struct Guide {
    Position from;
    Position to;
    std::string label{};
    double label_at = 0.5;  ///< position of the label along the visible line, 0..1
};

/// Text at a position in data coordinates.
struct Note {
    Position at;
    std::string text;
    bool below = false;          ///< under its position instead of over it, if a line passes above
    std::optional<int> color{};  ///< that of the series it belongs to; empty: muted
};

enum class Names : std::uint8_t {
    automatic,  ///< at the ends of the lines if they are few and short, else a legend
    at_lines,
    legend,
    none,
};

/// Sizes are in CSS pixels of the unscaled drawing, which scales to the available width. The defaults keep the text
/// readable on a phone that is 360 pixels wide.
struct Figure {
    std::string title;
    std::string subtitle{};
    Axis x;
    Axis y;
    std::vector<Series> series;
    std::vector<Guide> guides{};
    std::vector<Note> notes{};
    Names names = Names::automatic;
    double width = 400;
    double height = 320;  ///< with one line of title; further lines and the legend add to it
    double title_size = 16;
    bool dense = false;  ///< numbers of the axes are closer together, for a small panel
};

/// Several Figures of one size in one drawing, with one legend for all (small multiples).
struct Panels {
    std::string title;
    std::string subtitle{};
    std::vector<Series> legend{};  ///< the names, colours and dashes of all panels; points are ignored
    std::vector<Figure> panels{};  ///< column by column; their names are not drawn
    std::size_t columns = 1;
    std::vector<std::string> footer{};  ///< small print below with the sources of the figures
    double width = 720;
};

}  // namespace tessera::plot
