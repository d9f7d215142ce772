// SPDX-License-Identifier: Apache-2.0
#include "plot/svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "plot/frame.hpp"
#include "plot/mark.hpp"
#include "plot/style.hpp"
#include "plot/text.hpp"
#include "tessera/error.hpp"

namespace tessera::plot {
namespace {

using Out = std::back_insert_iterator<std::string>;

/// Collects the elements. Colours are the light ones, which the classes override if variables are defined.
class Drawing {
 public:
    Drawing(const Figure& figure, Home home) : figure_(figure), frame_(figure), home_(home) {}

    std::string text() {
        head(frame_.height);
        heading();
        body();
        text_ += "</svg>\n";
        return std::move(text_);
    }

    /// Draws this figure's heading and legend over other figures. Nested drawings keep each panel in its cell.
    std::string text_over(const Panels& panels) {
        const std::size_t rows = (panels.panels.size() + panels.columns - 1) / panels.columns;
        const double width = figure_.width / static_cast<double>(panels.columns);
        std::vector<Drawing> drawings;
        double cell = 0;
        for (const Figure& panel : panels.panels) {
            drawings.emplace_back(panel, Home::page);
            cell = std::max(cell, drawings.back().frame_.height);
        }
        const double top = frame_.top - 8;
        std::vector<std::string> footer;
        for (const std::string& line : panels.footer) {
            for (std::string& part : wrapped_to(line, kSmallSize, figure_.width - 16))
                footer.push_back(std::move(part));
        }
        const double below = top + static_cast<double>(rows) * cell;
        head(below + static_cast<double>(footer.size()) * kSmallLine + (footer.empty() ? 0 : 8));
        heading();
        names();
        for (std::size_t i = 0; i < drawings.size(); ++i) {
            put("<svg x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\">\n",
                width * static_cast<double>(i / rows), top + cell * static_cast<double>(i % rows), width, cell);
            drawings[i].heading();
            drawings[i].body();
            text_ += std::move(drawings[i].text_) + "</svg>\n";
        }
        double baseline = below;
        for (const std::string& line : footer) {
            baseline += kSmallLine;
            put("<text class=\"plot-quiet\" x=\"8\" y=\"{:.1f}\" font-size=\"{:g}\" fill=\"{}\">{}</text>\n", baseline,
                kSmallSize, palette(Theme::light).quiet, escaped(line));
        }
        text_ += "</svg>\n";
        return std::move(text_);
    }

 private:
    static constexpr double kSmallSize = 11, kSmallLine = 15;  // footer

    /// Draws everything except the heading.
    void body() {
        axes();
        begin_clip();
        for (const Guide& guide : figure_.guides) guide_line(guide);
        for (std::size_t i = 0; i < figure_.series.size(); ++i) series(i);
        text_ += "</svg>\n";
        for (const Guide& guide : figure_.guides) guide_label(guide);
        for (const NoteLabel& note : frame_.notes) note_text(note.x, note.y, note.text, note.color);
        names();
    }

    template <class... T>
    void put(fmt::format_string<T...> format, T&&... values) {
        fmt::format_to(Out(text_), format, std::forward<T>(values)...);
    }

    void head(double height) {
        const Palette& light = palette(Theme::light);
        // A file must declare the SVG namespace; an HTML page knows it.
        put("<svg{} class=\"plot\" viewBox=\"0 0 {:g} {:g}\"",
            home_ == Home::file ? " xmlns=\"http://www.w3.org/2000/svg\"" : "", figure_.width, height);
        if (home_ == Home::file) put(" width=\"{:g}\" height=\"{:g}\"", figure_.width, height);
        put(" role=\"img\" aria-label=\"{}\" font-family=\"{}\" font-size=\"{:g}\">\n", escaped(figure_.title),
            escaped(kFontFamily), kTextSize);
        if (home_ == Home::file) put("{}\n", kSvgMark);
        put("<title>{}</title>\n", escaped(figure_.title));
        if (home_ == Home::file) {
            put("<style>.plot{{{}}}@media (prefers-color-scheme:dark){{.plot{{{}}}}}{}</style>\n",
                css_variables(Theme::light), css_variables(Theme::dark), css_rules());
            put("<rect class=\"plot-surface\" width=\"100%\" height=\"100%\" fill=\"{}\"/>\n", light.surface);
        }
    }

    void heading() {
        const Palette& light = palette(Theme::light);
        double baseline = 6;
        for (const std::string& line : frame_.title) {
            baseline += 18;
            put("<text class=\"plot-ink\" x=\"8\" y=\"{:g}\" font-size=\"{:g}\" font-weight=\"600\" "
                "fill=\"{}\">{}</text>\n",
                baseline, figure_.title_size, light.ink, escaped(line));
        }
        for (const std::string& line : frame_.subtitle) {
            baseline += 18;
            words(8, baseline, "start", line);
        }
    }

    /// Draws text in the muted colour.
    void words(double x, double y, const char* anchor, const std::string& line) {
        put("<text class=\"plot-quiet\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" fill=\"{}\">{}</text>\n", x, y,
            anchor, palette(Theme::light).quiet, escaped(line));
    }

    void axes() {
        const Frame& f = frame_;
        const Palette& light = palette(Theme::light);
        put("<path class=\"plot-grid\" stroke=\"{}\" fill=\"none\" d=\"", light.grid);
        for (const Tick& tick : f.x_ticks) put("M{:.1f} {:.1f}V{:.1f}", f.px(tick.value), f.top, f.bottom);
        for (const Tick& tick : f.y_ticks) put("M{:.1f} {:.1f}H{:.1f}", f.left, f.py(tick.value), f.right);
        put("\"/>\n<path class=\"plot-axis\" stroke=\"{}\" fill=\"none\" d=\"M{:.1f} {:.1f}H{:.1f}\"/>\n", light.quiet,
            f.left, f.bottom, f.right);
        for (const Tick& tick : f.x_ticks) {
            if (!tick.text.empty()) words(f.px(tick.value), f.bottom + 18, "middle", tick.text);
        }
        for (const Tick& tick : f.y_ticks) {
            if (!tick.text.empty()) words(f.left - 6, f.py(tick.value) + 4.5, "end", tick.text);
        }
        words((f.left + f.right) / 2, f.bottom + 37, "middle", figure_.x.label);
        words(8, f.top - 10, "start", figure_.y.label);
    }

    /// Starts a nested drawing that clips to the plotting area without an id for a clip path. It is a few pixels larger
    /// than the area, for marks at its edge.
    void begin_clip() {
        constexpr double kMarks = 6;
        const double x = frame_.left - kMarks, y = frame_.top - kMarks;
        const double width = frame_.right - frame_.left + 2 * kMarks, height = frame_.bottom - frame_.top + 2 * kMarks;
        put("<svg x=\"{0:.1f}\" y=\"{1:.1f}\" width=\"{2:.1f}\" height=\"{3:.1f}\" viewBox=\"{0:.1f} {1:.1f} {2:.1f} "
            "{3:.1f}\">\n",
            x, y, width, height);
    }

    int color_of(std::size_t index) const {
        return figure_.series[index].color.value_or(static_cast<int>(index)) % kColors;
    }
    void begin_color(std::size_t index) {
        const int color = color_of(index);
        put("<g class=\"plot-c{}\" color=\"{}\">", color, palette(Theme::light).series[color]);
    }

    static const char* width_of(const Series& s) { return s.strong ? "3.6" : "2.2"; }

    void line(const Series& s) {
        if (s.mark == Mark::points || s.points.size() < 2) return;
        put("<path fill=\"none\" stroke=\"currentColor\" stroke-width=\"{}\" stroke-linejoin=\"round\"{} d=\"",
            width_of(s), s.dashed ? " stroke-dasharray=\"6 4\"" : "");
        char command = 'M';
        for (const Point& p : s.points) {
            put("{}{:.1f} {:.1f}", command, frame_.px(p.x), frame_.py(p.y));
            command = 'L';
        }
        text_ += "\"/>";
    }

    /// A bar that leaves the area ends at its edge, without a cap.
    void spread_bar(const Point& p) {
        if (!(p.high > p.low)) return;
        const double x = frame_.px(p.x), high = frame_.py(p.high), low = frame_.py(p.low);
        const double from = std::max(high, frame_.top), to = std::min(low, frame_.bottom);
        if (from > to) return;
        const auto cap = [&](double y, double edge) {
            return y == edge ? fmt::format("M{:.1f} {:.1f}h6", x - 3, y) : "";
        };
        put("<path stroke=\"currentColor\" stroke-width=\"1.2\" fill=\"none\" d=\"M{:.1f} {:.1f}V{:.1f}{}{}\"/>\n", x,
            from, to, cap(high, from), cap(low, to));
    }

    /// Draws a mark; each series has its own shape besides its colour.
    void mark(std::size_t index, double x, double y, const std::string& note) {
        const double r = 4;
        switch (color_of(index) % 4) {
            case 0: put("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:g}\"", x, y, r); break;
            case 1: put("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"7\" height=\"7\"", x - 3.5, y - 3.5); break;
            case 2: put("<path d=\"M{:.1f} {:.1f}l4.8 8.2h-9.6z\"", x, y - 5); break;
            default: put("<path d=\"M{:.1f} {:.1f}l5 5l-5 5l-5 -5z\"", x, y - 5); break;
        }
        put(" class=\"plot-halo\" fill=\"currentColor\" stroke=\"{}\" stroke-width=\"1\"",
            palette(Theme::light).surface);
        if (note.empty()) text_ += "/>";
        else put("><title>{}</title>{}", escaped(note), closing(index));
    }
    const char* closing(std::size_t index) const {
        const int shape = color_of(index) % 4;
        return shape == 0 ? "</circle>" : shape == 1 ? "</rect>" : "</path>";
    }

    void series(std::size_t index) {
        const Series& s = figure_.series[index];
        begin_color(index);
        line(s);
        if (s.mark != Mark::line) {
            for (const Point& p : s.points) spread_bar(p);
            for (const Point& p : s.points) mark(index, frame_.px(p.x), frame_.py(p.y), p.note);
        }
        text_ += "</g>\n";
    }

    void guide_line(const Guide& g) {
        put("<path class=\"plot-axis\" stroke=\"{}\" stroke-width=\"1.3\" stroke-dasharray=\"4 3\" fill=\"none\" "
            "d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\"/>\n",
            palette(Theme::light).quiet, frame_.px(g.from.x), frame_.py(g.from.y), frame_.px(g.to.x),
            frame_.py(g.to.y));
    }

    /// Places the label along the line, just above it and inside the plotting area.
    void guide_label(const Guide& g) {
        if (g.label.empty()) return;
        const double x0 = frame_.px(g.from.x), y0 = frame_.py(g.from.y);
        const double dx = frame_.px(g.to.x) - x0, dy = frame_.py(g.to.y) - y0;
        double begin = 0, end = 1;  // the part of the line within the area
        const auto cut = [&](double at, double step, double least, double most) {
            if (step == 0) return;
            const double a = (least - at) / step, b = (most - at) / step;
            begin = std::max(begin, std::min(a, b));
            end = std::min(end, std::max(a, b));
        };
        cut(x0, dx, frame_.left, frame_.right);
        cut(y0, dy, frame_.top, frame_.bottom);
        if (begin >= end) return;
        const double half = text_width(g.label, kTextSize) / 2 + 4;
        const double length = std::hypot(dx, dy);
        if (std::abs(dy) >= 1 &&
            2 * half > length * (end - begin)) {  // a slope too short for its label gets it below its middle
            const double middle = (begin + end) / 2;
            return note_text(x0 + middle * dx + 8, y0 + middle * dy + 8 + kTextSize, g.label);
        }
        double angle = std::atan2(dy, dx);
        if (std::cos(angle) < 0) angle += 3.14159265358979;
        const bool level = std::abs(dy) < 1 && frame_.right - frame_.left > 2 * half;
        const double room = half / length;
        const auto middle_at = [&](double share) {
            double t = begin + (end - begin) * share;
            if (room * 2 < end - begin) t = std::clamp(t, begin + room, end - room);
            const double x = x0 + t * dx;
            return Position{level ? std::clamp(x, frame_.left + half, frame_.right - half) : x, y0 + t * dy};
        };
        struct Place {
            Position at;
            bool below = false;
        };
        Place best{middle_at(g.label_at)};
        int least = hidden_by_label(g, best.at, angle, half, false);
        constexpr int kPlaces = 16;
        for (int place = 0; place <= kPlaces && least > 0; ++place) {  // away from its own place in small steps
            for (const int side : {-1, 1}) {
                const double share = g.label_at + side * static_cast<double>(place) / kPlaces;
                if (share < 0 || share > 1) continue;
                for (const bool below : {false, true}) {
                    const Place other{middle_at(share), below};
                    const int hidden = hidden_by_label(g, other.at, angle, half, below);
                    if (hidden < least) best = other, least = hidden;
                }
            }
        }
        put("<text class=\"plot-quiet plot-halo\" transform=\"translate({:.1f} {:.1f}) rotate({:.1f})\" y=\"{}\" "
            "text-anchor=\"middle\" fill=\"{}\" stroke=\"{}\" stroke-width=\"3\" paint-order=\"stroke\">{}</text>\n",
            best.at.x, best.at.y, angle * 180 / 3.14159265358979, best.below ? 14 : -5, palette(Theme::light).quiet,
            palette(Theme::light).surface, escaped(g.label));
    }

    /// Counts the pieces of series and other guides, and the edges of notes, under a guide's label: `half` wide to both
    /// sides of `at`, and above or below it, turned by `angle`.
    int hidden_by_label(const Guide& own, const Position& at, double angle, double half, bool below) const {
        constexpr double kFrom = 2, kTo = kTextSize + 4, kStep = 4;
        int hidden = 0;
        const auto count = [&](double x, double y) {
            const double along = (x - at.x) * std::cos(angle) + (y - at.y) * std::sin(angle);
            const double up = (x - at.x) * std::sin(angle) - (y - at.y) * std::cos(angle);
            const double beside = below ? -up : up;
            if (std::abs(along) < half && beside > kFrom && beside < kTo) ++hidden;
        };
        const auto count_line = [&](double ax, double ay, double bx, double by) {
            const int steps = std::max(1, static_cast<int>(std::hypot(bx - ax, by - ay) / kStep));
            for (int i = 0; i <= steps; ++i) count(ax + (bx - ax) * i / steps, ay + (by - ay) * i / steps);
        };
        for (const Guide& guide : figure_.guides) {
            if (&guide != &own)
                count_line(frame_.px(guide.from.x), frame_.py(guide.from.y), frame_.px(guide.to.x),
                           frame_.py(guide.to.y));
        }
        for (const Series& series : figure_.series) {
            const Point* before = nullptr;
            for (const Point& p : series.points) {
                const double x = frame_.px(p.x), y = frame_.py(p.y);
                count_line(x - 4, y, x + 4, y);
                if (p.high > p.low && series.mark != Mark::line)
                    count_line(x, std::max(frame_.py(p.high), frame_.top), x,
                               std::min(frame_.py(p.low), frame_.bottom));
                if (before != nullptr && series.mark != Mark::points)
                    count_line(frame_.px(before->x), frame_.py(before->y), x, y);
                before = &p;
            }
        }
        for (const NoteLabel& note : frame_.notes) {
            const double to = note.x + text_width(note.text, kTextSize);
            for (const double up : {0.0, kTextSize / 3, 2 * kTextSize / 3, kTextSize})  // text hides text most
                count_line(note.x, note.y - up, to, note.y - up);
        }
        return hidden;
    }

    /// Draws text with a halo that interrupts the lines below it.
    void note_text(double x, double baseline, const std::string& text, std::optional<int> color = {}) {
        const Palette& light = palette(Theme::light);
        const int index = color.value_or(0) % kColors;
        if (color) put("<g class=\"plot-c{}\" color=\"{}\">", index, light.series[index]);
        put("<text class=\"{}plot-halo\" x=\"{:.1f}\" y=\"{:.1f}\" fill=\"{}\" stroke=\"{}\" "
            "stroke-width=\"4\" paint-order=\"stroke\">{}</text>{}\n",
            color ? "" : "plot-quiet ", x, baseline, color ? "currentColor" : light.quiet, light.surface, escaped(text),
            color ? "</g>" : "");
    }

    void names() {
        for (const LegendEntry& entry : frame_.legend) {
            const Series& s = figure_.series[entry.series];
            begin_color(entry.series);
            if (s.mark != Mark::points) {
                put("<path stroke=\"currentColor\" stroke-width=\"{}\"{} d=\"M{:.1f} {:.1f}h22\"/>", width_of(s),
                    s.dashed ? " stroke-dasharray=\"6 4\"" : "", entry.x, entry.y - 4.5);
            }
            if (s.mark != Mark::line) mark(entry.series, entry.x + 11, entry.y - 4.5, "");
            text_ += "</g>";
            words(entry.x + 28, entry.y, "start", s.name);
        }
        for (const EndLabel& label : frame_.end_labels) {
            begin_color(label.series);
            if (std::abs(label.y - label.line_y) > 6) {
                put("<path stroke=\"currentColor\" stroke-opacity=\"0.5\" fill=\"none\" d=\"M{:.1f} {:.1f}L{:.1f} "
                    "{:.1f}\"/>",
                    frame_.right + 1, label.line_y, frame_.right + 9, label.y);
            }
            put("<text x=\"{:.1f}\" y=\"{:.1f}\" fill=\"currentColor\" font-weight=\"600\">{}</text></g>\n",
                frame_.right + 11, label.y + 4.5, escaped(figure_.series[label.series].name));
        }
    }

    const Figure& figure_;
    Frame frame_;
    Home home_;
    std::string text_;
};

}  // namespace

std::string svg(const Figure& figure, Home home) { return Drawing(figure, home).text(); }

std::string svg(const Panels& panels) {
    if (panels.panels.empty() || panels.columns == 0)
        throw Error(ErrorCode::invalid_argument, panels.columns == 0 ? "columns" : "panels",
                    "expected at least one, got 0");
    Figure heading{.title = panels.title, .subtitle = panels.subtitle, .series = panels.legend};
    for (Series& series : heading.series) series.points.clear();
    heading.names = Names::legend;
    heading.width = panels.width;
    Panels cells = panels;
    for (Figure& panel : cells.panels) {
        panel.names = Names::none;
        panel.width = panels.width / static_cast<double>(panels.columns);
    }
    return Drawing(heading, Home::file).text_over(cells);
}

}  // namespace tessera::plot
