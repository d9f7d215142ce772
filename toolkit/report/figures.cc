// SPDX-License-Identifier: Apache-2.0
#include "report/figures.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace tessera::report {
namespace {

using plot::Figure;
using plot::Mark;
using plot::Point;
using plot::Scale;
using plot::Series;

constexpr const char* kDeterministic = ", deterministic";

/// The colour of a line, which is the same in all plots of a device. Lines that often share a plot have distant
/// colours; an unlisted one gets a colour that no other line of the device has.
int color_of(const DeviceRows& device, const std::string& label) {
    static const std::vector<std::string> preferred = {
        "tessera fa3",      "cuDNN",       "FlashAttention-3", "tessera fa1",
        "FlashAttention-2", "tessera fa2", "tessera standard"};
    std::string name = label.substr(0, label.find(kDeterministic));
    if (name == "cuDNN by autograd") name = "cuDNN";
    if (name == "FlashAttention-4") name = "tessera fa1";  // they seldom share a plot
    const auto at = std::find(preferred.begin(), preferred.end(), name);
    if (at != preferred.end()) return static_cast<int>(at - preferred.begin());
    int color = 1;
    for (const std::string& other : device.labels) {
        if (other == label) break;
        if (std::find(preferred.begin(), preferred.end(), other) == preferred.end()) ++color;
    }
    return color;
}

Series series_of(const DeviceRows& device, const std::string& label, Mark mark = Mark::line_and_points) {
    Series series{.name = label, .mark = mark, .color = color_of(device, label)};
    series.dashed = label.ends_with(kDeterministic);
    return series;
}

std::size_t lengths_of(const Group& group) {
    std::set<std::int64_t> lengths;
    for (const Row& row : group.rows) lengths.insert(row.record.len_kv);
    return lengths.size();
}

std::string note_of(const Row& row, const Unit& unit) {
    return fmt::format("{}, batch {}, {} x {}: {:.4g} ms, {:.4g} {}", row.label, row.record.batch, row.record.len_q,
                       row.record.len_kv, row.record.ms, row.record.tflops * unit.per_tflops, unit.name);
}

plot::Axis length_axis() { return {.label = "length (tokens)", .scale = Scale::log2}; }

/// Returns the fastest peer, by the sum of its times, that measured every length of tessera's.
std::string strongest_peer(const DeviceRows& device, const Group& group) {
    std::string best;
    double least = INFINITY;
    for (const std::string& label : device.labels) {
        if (label.starts_with("tessera")) continue;
        const auto rows = group.of(label);
        if (rows.size() < lengths_of(group)) continue;
        double sum = 0;
        for (const Row* row : rows) sum += std::log(row->record.ms);
        if (sum < least) least = sum, best = label;
    }
    return best;
}

std::optional<Figure> speed_up_over(const DeviceRows& device, const Group& group, const std::string& base) {
    const auto bases = group.of(base);
    if (bases.size() < 2) return std::nullopt;
    Figure figure{.title = fmt::format("Over {}: {}", base, group.title()), .subtitle = group.subtitle()};
    figure.x = length_axis();
    figure.y = {.label = fmt::format("time of {} / time", base), .from_zero = true};
    double first = INFINITY, last = 0, highest = 0;
    for (const std::string& label : device.labels) {
        Series series = series_of(device, label);
        for (const Row* row : label == base ? std::vector<const Row*>{} : group.of(label)) {
            const auto same = std::find_if(bases.begin(), bases.end(), [&](const Row* b) {
                return b->record.len_q == row->record.len_q && b->record.len_kv == row->record.len_kv;
            });
            if (same == bases.end()) continue;
            const auto length = static_cast<double>(row->record.len_kv);
            const double ratio = (*same)->record.ms / row->record.ms;
            series.points.push_back(
                {length, ratio, fmt::format("{}, {} tokens: {:.3g} times as fast", label, length, ratio)});
            first = std::min(first, length), last = std::max(last, length), highest = std::max(highest, ratio);
        }
        if (!series.points.empty()) figure.series.push_back(std::move(series));
    }
    if (figure.series.empty() || first >= last) return std::nullopt;
    figure.guides = {{{first, 1}, {last, 1}}};
    if (highest < 1.1) figure.y.most = 1.2;  // keeps the line at 1 off the edge
    return figure;
}

double median_of(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const std::size_t half = values.size() / 2;
    return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// The rows that one roofline plot holds.
struct RooflineKey {
    std::string pass, dtype, head_dim;
    std::int64_t dim = 0;
    friend bool operator<(const RooflineKey& a, const RooflineKey& b) {
        return std::make_tuple(a.pass == "backward", a.dim, a.dtype, a.head_dim) <
               std::make_tuple(b.pass == "backward", b.dim, b.dtype, b.head_dim);
    }
};

/// Adds the roofs: DRAM's slope, the level of the MMAs, and that of the exponentials if it is lower.
void add_roofs(Figure& figure, const model::Machine& machine, const Row& any, double least_x, double most_x,
               const Unit& unit) {
    const bool is_bf16 = any.record.dtype != "fp32";
    const double peak = machine.peak_tflops(is_bf16 ? DType::bf16 : DType::fp32) * unit.per_tflops;
    const double slope = machine.dram_gbs * 1e-3 * unit.per_tflops;  // rate for each FLOP per byte
    const double ridge = peak / slope;
    figure.guides.push_back(
        {{least_x, least_x * slope}, {ridge, peak}, fmt::format("DRAM {:.4g} GB/s", machine.dram_gbs.value)});
    const double flop_per_exp =
        static_cast<double>(any.record.head_dim + any.record.head_dim_v) * (any.record.pass == "backward" ? 5.0 : 2.0);
    const double exps =
        machine.exp_rate * machine.cores * machine.rated_clock_ghz * 1e-3 * unit.per_tflops * flop_per_exp;
    constexpr double kOneLine = 1.3;  // ratio below which two roofs share a label
    const bool one_label = exps < peak && exps * kOneLine > peak;
    figure.guides.push_back({{ridge, peak},
                             {most_x, peak},
                             one_label ? fmt::format("GEMMs {:.4g}, exp {:.4g}", peak, exps)
                                       : fmt::format("GEMMs {:.4g} {}", peak, unit.name),
                             1.0});
    if (exps < peak)
        figure.guides.push_back(
            {{exps / slope, exps}, {most_x, exps}, one_label ? "" : fmt::format("exp {:.4g}", exps), 1.0});
}

}  // namespace

plot::Series line_style(const DeviceRows& device, const std::string& label) {
    Series series = series_of(device, label);
    series.strong = label.starts_with("tessera");
    return series;
}

Unit unit_of(const DeviceRows& device) {
    double most = 0;
    for (const Group& group : device.groups) {
        for (const Row& row : group.rows) most = std::max(most, row.record.tflops);
    }
    return most < 5 ? Unit{"GFLOP/s", 1000} : Unit{};
}

std::vector<Figure> speed_figures(const DeviceRows& device) {
    const Unit unit = unit_of(device);
    std::vector<Figure> figures;
    for (const Group& group : device.groups) {
        if (lengths_of(group) < 2) continue;
        Figure figure{.title = group.title(), .subtitle = group.subtitle()};
        figure.x = length_axis();
        figure.y = {.label = unit.name, .from_zero = true};
        for (const std::string& label : device.labels) {
            Series series = series_of(device, label);
            for (const Row* row : group.of(label)) {
                const measure::Record& r = row->record;
                const double rate = r.tflops * unit.per_tflops;
                plot::Point point{static_cast<double>(r.len_kv), rate, note_of(*row, unit)};
                if (measure::is_noisy(r.ms, r.ms_spread)) {  // error bars of precise points would only hide marks
                    point.low = rate * r.ms / (r.ms + r.ms_spread / 2);
                    point.high = rate * r.ms / std::max(r.ms / 4, r.ms - r.ms_spread / 2);
                }
                series.points.push_back(std::move(point));
            }
            if (!series.points.empty()) figure.series.push_back(std::move(series));
        }
        figures.push_back(std::move(figure));
    }
    return figures;
}

std::vector<Figure> speed_up_figures(const DeviceRows& device) {
    std::vector<Figure> figures;
    for (const Group& group : device.groups) {
        const bool ours = std::any_of(group.rows.begin(), group.rows.end(),
                                      [](const Row& row) { return row.label.starts_with("tessera"); });
        if (!ours) continue;  // the report does not compare peers with each other
        for (const std::string& base : {std::string("tessera standard"), strongest_peer(device, group)}) {
            if (auto figure = speed_up_over(device, group, base)) figures.push_back(std::move(*figure));
        }
    }
    return figures;
}

std::vector<Figure> roofline_figures(const DeviceRows& device) {
    if (!device.machine) return {};
    const Unit unit = unit_of(device);
    std::map<RooflineKey, std::vector<const Row*>> plots;
    for (const Group& group : device.groups) {
        for (const Row& row : group.rows) {
            const bool whole_device =
                device.machine->kind == model::MachineKind::gpu || row.record.threads >= device.machine->cores;
            if (!row.prediction || row.prediction->intensity <= 0 || !whole_device) continue;
            plots[{group.pass, group.dtype, group.head_dim, row.record.head_dim}].push_back(&row);
        }
    }
    std::vector<Figure> figures;
    for (const auto& [key, rows] : plots) {
        Figure figure{.title = fmt::format("Roofline: {}, {}, head_dim {}", key.pass, key.dtype, key.head_dim)};
        figure.x = {.label = "FLOP per byte of DRAM (the model's bytes)", .scale = Scale::log10};
        figure.y = {.label = unit.name, .scale = Scale::log10};
        double least = INFINITY, most = 0;
        for (const std::string& label : device.labels) {
            Series series = series_of(device, label, Mark::points);
            for (const Row* row : rows) {
                if (row->label != label) continue;
                series.points.push_back(
                    {row->prediction->intensity, row->record.tflops * unit.per_tflops, note_of(*row, unit)});
                least = std::min(least, row->prediction->intensity), most = std::max(most, row->prediction->intensity);
            }
            if (!series.points.empty()) figure.series.push_back(std::move(series));
        }
        const double peak =
            device.machine->peak_tflops(key.dtype == "fp32" ? DType::fp32 : DType::bf16) * unit.per_tflops;
        const double ridge = peak / (device.machine->dram_gbs * 1e-3 * unit.per_tflops);
        figure.x.least = std::min(least, ridge) / 3;
        figure.x.most = std::max(most, ridge) * 3;
        figure.y.most = peak * 1.8;
        add_roofs(figure, *device.machine, *rows.front(), *figure.x.least, *figure.x.most, unit);
        figures.push_back(std::move(figure));
    }
    return figures;
}

std::vector<const Row*> predicted_rows(const DeviceRows& device, const std::string& pass) {
    std::vector<const Row*> rows;
    for (const Group& group : device.groups) {
        for (const Row& row : group.rows) {
            if (group.pass == pass && row.prediction && row.prediction->ms > 0) rows.push_back(&row);
        }
    }
    return rows;
}

std::string accuracy_text(const std::vector<const Row*>& rows) {
    if (rows.empty()) return "";
    std::vector<double> errors;
    for (const Row* row : rows) errors.push_back(std::abs(row->off_by()));
    return fmt::format("{} predictions, off by {:.1f} % in the median, {:.0f} % at worst", rows.size(),
                       100 * median_of(errors), 100 * *std::max_element(errors.begin(), errors.end()));
}

namespace {

/// Returns the error in percent, as the tables show it.
double percent_off(const Row& row) { return 100 * row.off_by(); }

/// Plots one point for each row at (predicted, y(row)).
Figure prediction_figure(const DeviceRows& device, const std::vector<const Row*>& rows, std::string title,
                         double (*y)(const Row&)) {
    Figure figure{.title = std::move(title), .subtitle = accuracy_text(rows)};
    figure.x = {.label = "predicted (ms)", .scale = Scale::log10};
    for (const std::string& label : device.labels) {
        Series series = series_of(device, label, Mark::points);
        for (const Row* row : rows) {
            if (row->label != label) continue;
            const std::string note =
                fmt::format("{}, {} x {}: predicted {:.4g} ms, measured {:.4g} ms", label, row->record.len_q,
                            row->record.len_kv, row->prediction->ms, row->record.ms);
            series.points.push_back({row->prediction->ms, y(*row), note});
        }
        if (!series.points.empty()) figure.series.push_back(std::move(series));
    }
    return figure;
}

}  // namespace

std::vector<Figure> prediction_figures(const DeviceRows& device) {
    std::vector<Figure> figures;
    for (const char* pass : {"forward", "backward"}) {
        const auto rows = predicted_rows(device, pass);
        if (rows.size() < 2) continue;
        double least = INFINITY, most = 0, lowest = -20, highest = 20;
        for (const Row* row : rows) {
            least = std::min({least, row->prediction->ms, row->record.ms});
            most = std::max({most, row->prediction->ms, row->record.ms});
            highest = std::max(highest, percent_off(*row));
            lowest = std::min(lowest, percent_off(*row));
        }
        least /= 1.3, most *= 1.3;
        Figure times = prediction_figure(device, rows, fmt::format("Predicted against measured: {}", pass),
                                         [](const Row& row) { return row.record.ms; });
        times.y = {.label = "measured (ms)", .scale = Scale::log10, .least = least, .most = most};
        times.x.least = least, times.x.most = most;
        times.guides = {{{least, least}, {most, most}, "equal", 1.0}};
        figures.push_back(std::move(times));
        Figure errors = prediction_figure(device, rows, fmt::format("Error of the prediction: {}", pass), percent_off);
        constexpr double kMargin = 0.08;  // keeps points off the edges
        const double margin = kMargin * (highest - lowest);
        errors.y = {.label = "predicted - measured (% of measured)"};
        errors.y.least = lowest - margin, errors.y.most = highest + margin;
        errors.x.least = least, errors.x.most = most;
        errors.guides = {{{least, 0}, {most, 0}},
                         {{least, 20}, {most, 20}, "+20 %", 1.0},
                         {{least, -20}, {most, -20}, "-20 %", 1.0}};
        figures.push_back(std::move(errors));
    }
    return figures;
}

}  // namespace tessera::report
