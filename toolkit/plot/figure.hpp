// SPDX-License-Identifier: Apache-2.0
//
// What a plot shows, without a word about how it is drawn: a Figure is plain data, svg() draws it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::plot {

enum class Scale : std::uint8_t {
    linear,
    log2,   ///< ticks at powers of two, 1024 written "1k": lengths
    log10,  ///< ticks at 1, 10, 100, between them at 2 and 5 when few decades are shown
};

struct Axis {
    std::string label;  ///< with the unit: "length of the row (tokens)"
    Scale scale = Scale::linear;
    std::optional<double> least{};  ///< end of the axis; without it the axis follows the data
    std::optional<double> most{};
    bool from_zero = false;  ///< a linear axis that follows the data begins at 0
};

/// In data coordinates.
struct Place {
    double x = 0;
    double y = 0;
};

struct Point {
    double x = 0;
    double y = 0;
    std::string note{};  ///< told when the pointer rests on the point
    double low = 0;      ///< a bar from here to `high`: what the value spreads over; none when they are equal
    double high = 0;
};

enum class Mark : std::uint8_t { line, points, line_and_points };

struct Series {
    std::string name;
    std::vector<Point> points;
    Mark mark = Mark::line_and_points;
    std::optional<int> color{};  ///< index of the palette (0..kColors-1, wraps); without it the place in the figure
    bool dashed = false;
    bool strong = false;  ///< a thicker line: the one that the reader looks for
};

/// A straight line in data coordinates behind the series, in quiet ink: a roof, the diagonal of equality.
struct Guide {
    Place from;
    Place to;
    std::string label{};
    double label_at = 0.5;  ///< where along the visible line the label stands, 0..1
};

/// Text at a place in data coordinates.
struct Note {
    Place at;
    std::string text;
    bool below = false;  ///< under its place instead of over it, where a line goes
};

enum class Names : std::uint8_t {
    automatic,  ///< at the ends of the lines when they are few and short, else a legend
    at_lines,
    legend,
    none,
};

/// Sizes are in CSS pixels of the drawing at its own size; it scales to the room that it gets. The defaults keep the
/// text readable on a phone that is 360 pixels wide.
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
    double height = 320;  ///< with one line of title; further lines and the legend come on top
    double title_size = 16;
    bool dense = false;  ///< numbers of the axes stand closer together: for a small panel
};

/// Several Figures of the same size in one drawing, with one legend for all: small multiples.
struct Panels {
    std::string title;
    std::string subtitle{};
    std::vector<Series> legend{};  ///< the names, colours and dashes of all panels; points are not looked at
    std::vector<Figure> panels{};  ///< column by column; their names are not drawn
    std::size_t columns = 1;
    std::vector<std::string> footer{};  ///< small print below: where the figures come from
    double width = 720;
};

}  // namespace tessera::plot
