// SPDX-License-Identifier: Apache-2.0
#include "learn/canvas.hpp"

#include <fmt/format.h>

#include <cmath>

#include "plot/mark.hpp"
#include "plot/style.hpp"
#include "plot/text.hpp"

namespace tessera::learn {

using plot::escaped;
using plot::Theme;

Canvas::Canvas(const std::string& title, const std::string& subtitle, double width, double height)
    : width_(width), height_(height) {
    head_ = fmt::format("{}\n<title>{}</title>\n", plot::kSvgMark, escaped(title));
    double baseline = 6;
    const auto heading = [&](const std::string& text, double size, bool bold) {
        if (text.empty()) return;
        for (const std::string& one : plot::wrapped_to(text, size, width - 16)) {
            baseline += 18;
            words(8, baseline, one, Anchor::start, bold ? kInk : kQuiet, size, bold);
        }
    };
    heading(title, plot::kTitleSize, true);
    heading(subtitle, plot::kTextSize, false);
    top_ = baseline + 14;
}

std::string Canvas::begin_color(int color) const {
    if (color == kQuiet)
        return fmt::format("<g color=\"{}\" class=\"learn-quiet\">", plot::palette(Theme::light).quiet);
    if (color == kInk) return fmt::format("<g color=\"{}\" class=\"learn-ink\">", plot::palette(Theme::light).ink);
    return fmt::format("<g color=\"{}\" class=\"plot-c{}\">", plot::palette(Theme::light).series[color], color);
}

void Canvas::box(double x, double y, double width, double height, int color, double strength) {
    body_ += begin_color(color) +
             fmt::format(
                 "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"currentColor\" "
                 "fill-opacity=\"{:.2f}\" stroke=\"currentColor\"/></g>\n",
                 x, y, width, height, strength);
}

void Canvas::line(double x0, double y0, double x1, double y1, int color, bool arrow) {
    body_ += begin_color(color) +
             fmt::format(
                 "<path fill=\"none\" stroke=\"currentColor\" stroke-width=\"1.6\" d=\"M{:.1f} {:.1f}L{:.1f} "
                 "{:.1f}",
                 x0, y0, x1, y1);
    if (arrow) {
        const double length = std::hypot(x1 - x0, y1 - y0), dx = (x1 - x0) / length * 7, dy = (y1 - y0) / length * 7;
        body_ += fmt::format("M{:.1f} {:.1f}L{:.1f} {:.1f}L{:.1f} {:.1f}", x1 - dx - dy / 2, y1 - dy + dx / 2, x1, y1,
                             x1 - dx + dy / 2, y1 - dy - dx / 2);
    }
    body_ += "\"/></g>\n";
}

void Canvas::cross(double x, double y, double width, double height, int color) {
    line(x, y, x + width, y + height, color);
    line(x, y + height, x + width, y, color);
}

void Canvas::words(double x, double y, const std::string& text, Anchor anchor, int color, double size, bool bold) {
    constexpr const char* kAnchors[] = {"start", "middle", "end"};
    body_ += begin_color(color) + fmt::format(
                                      "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" font-size=\"{:g}\"{} "
                                      "fill=\"currentColor\">{}</text></g>\n",
                                      x, y, kAnchors[static_cast<int>(anchor)], size,
                                      bold ? " font-weight=\"600\"" : "", escaped(text));
}

std::string Canvas::svg() const {
    return fmt::format(
               "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"plot\" viewBox=\"0 0 {0:g} {1:g}\" "
               "width=\"{0:g}\" height=\"{1:g}\" role=\"img\" font-family=\"{2}\">\n",
               width_, height_, escaped(plot::kFontFamily)) +
           head_ +
           fmt::format(
               "<style>.plot{{{}}}@media (prefers-color-scheme:dark){{.plot{{{}}}}}{}"
               ".learn-quiet{{color:var(--plot-quiet)}}.learn-ink{{color:var(--plot-ink)}}</style>\n"
               "<rect class=\"plot-surface\" width=\"100%\" height=\"100%\" fill=\"{}\"/>\n",
               plot::css_variables(Theme::light), plot::css_variables(Theme::dark), plot::css_rules(),
               plot::palette(Theme::light).surface) +
           body_ + "</svg>\n";
}

}  // namespace tessera::learn
