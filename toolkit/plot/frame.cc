// SPDX-License-Identifier: Apache-2.0
#include "plot/frame.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "plot/style.hpp"
#include "plot/text.hpp"

namespace tessera::plot {
namespace {

constexpr double kBold = 1.12;          // width of bold letters (titles, end labels) relative to regular ones
constexpr double kEdge = 8;             // margin on every side
constexpr double kLine = 18;            // distance between baselines
constexpr double kSample = 22;          // width of a legend's sample
constexpr double kPixelsPerX = 58;      // least distance between two numbers of an axis
constexpr double kPixelsPerPower = 40;  // least distance on a log axis, whose numbers are short
constexpr double kPixelsPerY = 38;
constexpr double kDensePerPower = 29, kDensePerY = 25;  // in a dense figure
constexpr double kAscent = 0.75 * kTextSize;            // height of letters

/// Returns the top of the plotting area below a single line of title.
constexpr double heading_of_one_line() { return kEdge - 2 + 2 * kLine + 14; }

std::vector<double> values_of(const Figure& figure, double Point::*coordinate) {
    std::vector<double> values;
    for (const Series& series : figure.series) {
        for (const Point& point : series.points) values.push_back(point.*coordinate);
    }
    return values;
}

double widest_name(const Figure& figure) {
    double widest = 0;
    for (const Series& series : figure.series) widest = std::max(widest, text_width(series.name, kTextSize * kBold));
    return widest;
}

/// Puts names at the line ends if there are few lines, all reach the right side, and the names are short.
Names names_of(const Figure& figure, const Limits& x) {
    if (figure.names != Names::automatic) return figure.names;
    if (figure.series.size() < 2) return figure.series.empty() ? Names::none : Names::legend;
    const bool lines = std::all_of(figure.series.begin(), figure.series.end(), [&](const Series& s) {
        double last = 0;
        for (const Point& point : s.points) last = std::max(last, along(point.x, x, figure.x.scale));
        return s.mark != Mark::points && last > 0.85;
    });
    return lines && figure.series.size() <= 5 && widest_name(figure) < 0.2 * figure.width ? Names::at_lines
                                                                                          : Names::legend;
}

/// Moves labels apart to at least `gap`, in their order, within [top, bottom] if they fit.
void spread(std::vector<EndLabel>& labels, double gap, double top, double bottom) {
    std::stable_sort(labels.begin(), labels.end(), [](const auto& a, const auto& b) { return a.y < b.y; });
    for (int round = 0; round < 60; ++round) {
        for (std::size_t i = 0; i + 1 < labels.size(); ++i) {
            const double overlap = gap - (labels[i + 1].y - labels[i].y);
            if (overlap <= 0) continue;
            labels[i].y -= overlap / 2;
            labels[i + 1].y += overlap / 2;
        }
        for (EndLabel& label : labels) label.y = std::clamp(label.y, top, bottom);
    }
}

}  // namespace

double along(double value, const Limits& limits, Scale scale) {
    if (scale == Scale::linear) return (value - limits.least) / (limits.most - limits.least);
    return std::log(value / limits.least) / std::log(limits.most / limits.least);
}

Frame::Frame(const Figure& figure)
    : x(limits_of(figure.x, "x axis", values_of(figure, &Point::x))),
      y(limits_of(figure.y, "y axis", values_of(figure, &Point::y))),
      x_scale_(figure.x.scale),
      y_scale_(figure.y.scale) {
    const Names names = names_of(figure, x);
    place_heading(figure, names == Names::legend);
    height = figure.height + top - heading_of_one_line();
    bottom = height - kEdge - (figure.x.label.empty() ? 1 : 2) * kLine - 4;
    y_ticks =
        ticks(y, y_scale_, std::max(2, static_cast<int>((bottom - top) / (figure.dense ? kDensePerY : kPixelsPerY))));
    double widest = 0;
    for (const Tick& tick : y_ticks) widest = std::max(widest, text_width(tick.text, kTextSize));
    left = kEdge + widest + 8;
    right = figure.width - kEdge - (names == Names::at_lines ? widest_name(figure) + 10 : 6);
    const double per_power = figure.dense ? kDensePerPower : kPixelsPerPower;
    const double spacing = x_scale_ == Scale::linear ? kPixelsPerX : per_power;
    x_ticks = ticks(x, x_scale_, std::max(2, static_cast<int>((right - left) / spacing)));
    if (names == Names::at_lines) place_end_labels(figure);
    place_notes(figure);
}

/// Places title, subtitle, legend, and the label of the y axis, which stands horizontally above the axis.
void Frame::place_heading(const Figure& figure, bool with_legend) {
    const double available = figure.width - 2 * kEdge;
    title = wrapped_to(figure.title, figure.title_size * kBold, available);
    subtitle = wrapped_to(figure.subtitle, kTextSize, available);
    double baseline = kEdge - 2 + kLine * static_cast<double>(title.size() + subtitle.size());
    if (with_legend) {
        double at = kEdge;
        baseline += kLine + 4;
        for (std::size_t i = 0; i < figure.series.size(); ++i) {
            const double width = kSample + 6 + text_width(figure.series[i].name, kTextSize);
            if (at > kEdge && at + width > figure.width - kEdge) {
                at = kEdge;
                baseline += kLine;
            }
            legend.push_back({i, at, baseline});
            at += width + 14;
        }
    }
    top = baseline + (figure.y.label.empty() ? 0 : kLine) + 14;
}

void Frame::place_end_labels(const Figure& figure) {
    for (std::size_t i = 0; i < figure.series.size(); ++i) {
        const auto& points = figure.series[i].points;
        if (points.empty()) continue;
        const auto last =
            std::max_element(points.begin(), points.end(), [](const Point& a, const Point& b) { return a.x < b.x; });
        const double at = std::clamp(py(last->y), top, bottom);
        end_labels.push_back({i, at, at});
    }
    spread(end_labels, kLine - 2, top, bottom);
}

/// Returns the amount that a text from (from, baseline) to `to` would hide; points count more than lines.
double Frame::hidden_by(const Figure& figure, double from, double to, double baseline) const {
    constexpr double kMark = 4, kPoint = 10;
    constexpr int kSteps = 32;  // steps along a line
    double hidden = 0;
    const auto inside = [&](double at_x, double at_y, double beyond) {
        return at_x > from - beyond && at_x < to + beyond && at_y > baseline - kAscent - beyond &&
               at_y < baseline + beyond;
    };
    for (const Series& series : figure.series) {
        for (std::size_t i = 0; i < series.points.size(); ++i) {
            const double end_x = px(series.points[i].x), end_y = py(series.points[i].y);
            if (series.mark != Mark::line && inside(end_x, end_y, kMark)) hidden += kPoint;
            if (i == 0 || series.mark == Mark::points) continue;
            const double begin_x = px(series.points[i - 1].x), begin_y = py(series.points[i - 1].y);
            for (int step = 1; step < kSteps; ++step) {
                const double t = static_cast<double>(step) / kSteps;
                if (!inside(begin_x + t * (end_x - begin_x), begin_y + t * (end_y - begin_y), 1)) continue;
                hidden += 1;
                break;
            }
        }
    }
    return hidden;
}

/// Places each note right or left of its position and above or below the line, so that it hides least and never covers
/// an earlier note. Neighbours with equal text share one note. A note without space in the plotting area is left out.
void Frame::place_notes(const Figure& figure) {
    constexpr double kBeside = 8, kShared = 30;
    constexpr double kOtherSide = 1;  // penalty of the other side, equal to one hidden line
    std::vector<NoteLabel> labelled;
    const auto free = [&](double from, double to, double baseline) {
        if (from < left - 1 || to > right + 1 || baseline - kAscent < top || baseline > bottom) return false;
        return std::none_of(notes.begin(), notes.end(), [&](const NoteLabel& other) {
            const double other_to = other.x + text_width(other.text, kTextSize);
            return from < other_to + 2 && other.x < to + 2 && std::abs(baseline - other.y) < kTextSize;
        });
    };
    for (const Note& note : figure.notes) {
        const double at = px(note.at.x), height_of = py(note.at.y), width = text_width(note.text, kTextSize);
        const bool shared = std::any_of(labelled.begin(), labelled.end(), [&](const NoteLabel& other) {
            return other.text == note.text && other.color == note.color &&
                   std::hypot(other.x - at, other.y - height_of) < kShared;
        });
        if (shared) continue;
        std::optional<NoteLabel> best;
        double least = 0;
        for (int place = 0; place < 4; ++place) {
            const double from = place % 2 == 0 ? at + kBeside : at - kBeside - width;
            const double baseline = note.below == (place < 2) ? height_of + kBeside + kAscent : height_of - kBeside;
            if (!free(from, from + width, baseline)) continue;
            const double hidden = hidden_by(figure, from, from + width, baseline) + (place < 2 ? 0 : kOtherSide);
            if (best && hidden >= least) continue;
            best = NoteLabel{note.text, from, baseline, note.color};
            least = hidden;
        }
        if (!best) continue;
        notes.push_back(*best);
        labelled.push_back({note.text, at, height_of, note.color});
    }
}

double Frame::px(double value) const { return left + (right - left) * along(value, x, x_scale_); }
double Frame::py(double value) const { return bottom - (bottom - top) * along(value, y, y_scale_); }

}  // namespace tessera::plot
