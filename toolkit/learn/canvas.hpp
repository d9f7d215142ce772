// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace tessera::learn {

enum class Anchor : unsigned char { start, middle, end };

/// A drawing of boxes, lines and words in the colours of the plots, light or dark as the reader's system is set.
/// Lengths are CSS pixels. A colour is 0 to 6 of the palette, or kQuiet.
class Canvas {
 public:
    static constexpr int kQuiet = -1;
    static constexpr int kInk = -2;

    Canvas(const std::string& title, const std::string& subtitle, double width, double height);

    /// Draws a box with its outline; `strength` of its filling is 0 (none) to 1.
    void box(double x, double y, double width, double height, int color, double strength);
    void line(double x0, double y0, double x1, double y1, int color, bool arrow = false);
    void words(double x, double y, const std::string& text, Anchor anchor = Anchor::start, int color = kInk,
               double size = 13, bool bold = false);
    /// Draws a hatched box, which marks a part that is left out.
    void cross(double x, double y, double width, double height, int color);

    /// The y at which the drawing begins, below the title.
    double top() const { return top_; }

    std::string svg() const;

 private:
    std::string begin_color(int color) const;

    double width_;
    double height_;
    double top_ = 0;
    std::string head_;
    std::string body_;
};

}  // namespace tessera::learn
