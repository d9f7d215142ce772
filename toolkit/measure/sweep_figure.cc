// SPDX-License-Identifier: Apache-2.0
//
// Draws the predictions of a sweep: the roofline, and for calls of few queries on a cache the rate of memory.
#include <fmt/format.h>

#include <algorithm>

#include "measure/record.hpp"
#include "measure/sweep.hpp"
#include "model/error_bar.hpp"

namespace tessera::measure {
namespace {

std::string short_length(std::int64_t len) {
    return len >= 1024 && len % 1024 == 0 ? fmt::format("{}k", len / 1024) : fmt::format("{}", len);
}

std::string span_text(std::int64_t first, std::int64_t last) {
    return first == last ? short_length(first) : fmt::format("{} to {}", short_length(first), short_length(last));
}

std::string lengths_text(const Problem& first, const Problem& last) {
    const bool one = first.len_q == last.len_q && first.len_kv == last.len_kv;
    if (first.len_q == first.len_kv && last.len_q == last.len_kv)
        return fmt::format("length{} {}", one ? "" : "s", span_text(first.len_kv, last.len_kv));
    return fmt::format("{} quer{}, {} keys", span_text(first.len_q, last.len_q),
                       first.len_q == 1 && last.len_q == 1 ? "y" : "ies", span_text(first.len_kv, last.len_kv));
}

/// Formats a rate with three digits and without powers of ten.
std::string rate_text(double rate) { return rate < 999.5 ? fmt::format("{:.3g}", rate) : fmt::format("{:.0f}", rate); }

/// The caveat that a picture needs for a kernel that this project did not run.
std::string caveat_of(const model::Prediction& p) {
    if (p.fitted_on.find("published") != std::string::npos) return " (by others' tables: never run here)";
    return p.fitted_on.empty() ? " (with the constants of a related kernel)" : "";
}

/// Describes the question in the words of the options, and names the library of the kernels.
std::string subtitle_of(std::span<const SweepRow> rows) {
    const Problem& p = rows.front().problem;
    std::string passes, kernels;
    for (const SweepCell& cell : rows.front().cells) {
        if (!cell.known()) continue;
        if (passes.empty()) {
            for (const auto& pass : cell.passes)
                passes += (passes.empty() ? "" : " + ") + std::string(name_of(pass.pass));
        }
        kernels += fmt::format("{}{} of {}{}", kernels.empty() ? "" : ", ", name_of(cell.schedule),
                               cell.passes.front().by, caveat_of(cell.passes.front()));
    }
    const Problem& last = rows.back().problem;
    return fmt::format("{}, {}, {}/{} heads of {}, batch {}, mask {}, {}; {}", passes, name_of(p.dtype), p.heads_q,
                       p.heads_kv, p.head_dim, span_text(p.batch, last.batch), mask_text(p.mask), lengths_text(p, last),
                       kernels);
}

/// Labels the first and the last point of a schedule with their lengths, below the point if its line leaves upwards.
std::vector<plot::Note> ends_of(const SweepCell& first_cell, const SweepRow& first, const SweepCell& last_cell,
                                const SweepRow& last, const plot::Series& series) {
    const std::vector<plot::Point>& points = series.points;
    std::vector<plot::Note> ends;
    const auto add = [&](const SweepCell& cell, const SweepRow& row, const plot::Point& end, const plot::Point& next) {
        if (!cell.known()) return;
        ends.push_back(
            {{end.x, end.y}, short_length(row.problem.len_kv), next.x > end.x && next.y > end.y, series.color});
    };
    if (points.empty()) return ends;
    add(first_cell, first, points.front(), points[points.size() > 1 ? 1 : 0]);
    add(last_cell, last, points.back(), points[points.size() > 1 ? points.size() - 2 : 0]);
    return ends;
}

}  // namespace

plot::Figure roofline_figure(const model::Machine& machine, std::span<const SweepRow> rows, bool with_baseline) {
    plot::Figure figure;
    const Problem& first = rows.front().problem;
    figure.title = fmt::format("Roofline of {}", machine.title);
    figure.subtitle = subtitle_of(rows);
    figure.x = {.label = "FLOP per byte of DRAM", .scale = plot::Scale::log10};
    figure.y = {.label = "TFLOP/s", .scale = plot::Scale::log10};
    const double peak = machine.peak_tflops(first.dtype);
    const double slope = machine.dram_gbs * 1e-3;  // TFLOP/s for each FLOP/B
    const double ridge = peak / slope;
    double least = ridge / 2;
    double most = ridge * 2;
    double lowest = peak / 2;
    double flop_per_exp = 0;
    const auto add_line = [&](plot::Series series, const auto& cell_of) {
        for (const SweepRow& row : rows) {
            const SweepCell& cell = cell_of(row);
            if (!cell.known()) continue;
            double flop = 0, bytes = 0, exps = 0;
            for (const auto& pass : cell.passes) {
                flop += static_cast<double>(pass.cost.work.flop);
                bytes += static_cast<double>(pass.cost.work.bytes.dram);
                exps += static_cast<double>(pass.cost.work.exps);
            }
            if (!(flop > 0) || !(bytes > 0)) continue;
            flop_per_exp = flop / exps;
            const double intensity = flop / bytes;
            least = std::min(least, intensity / 1.5);
            most = std::max(most, intensity * 1.5);
            lowest = std::min(lowest, cell.tflops() / 1.5);
            const double bar = 1 + cell.longest().error;
            series.points.push_back({intensity, cell.tflops(),
                                     fmt::format("length {}: {:.4g} ms, {:.3g} TFLOP/s, +-{:.0f} %", row.problem.len_kv,
                                                 cell.ms(), cell.tflops(), 100 * (bar - 1)),
                                     cell.tflops() / bar, cell.tflops() * bar});
        }
        if (series.points.empty()) return;
        const std::vector<plot::Note> ends =
            ends_of(cell_of(rows.front()), rows.front(), cell_of(rows.back()), rows.back(), series);
        figure.notes.insert(figure.notes.end(), ends.begin(), ends.end());
        figure.series.push_back(std::move(series));
    };
    for (std::size_t s = 0; s < rows.front().cells.size(); ++s) {
        const Schedule schedule = rows.front().cells[s].schedule;  // each schedule keeps its colour in any selection
        add_line({.name = name_of(schedule), .points = {}, .color = static_cast<int>(schedule)},
                 [s](const SweepRow& row) -> const SweepCell& { return row.cells[s]; });
    }
    if (with_baseline) {
        const int color = static_cast<int>(std::size(kSchedules));
        add_line({.name = model::name_of(rows.front().baseline.kind), .points = {}, .color = color, .dashed = true},
                 [](const SweepRow& row) -> const SweepCell& { return row.baseline.cell; });
    }
    figure.x.least = least;
    figure.x.most = most;
    figure.y.least = std::min(lowest, least * slope);
    figure.y.most = peak * 1.6;
    figure.guides.push_back(
        {{least, least * slope}, {ridge, peak}, fmt::format("DRAM {:.0f} GB/s", machine.dram_gbs.value), 0.55});
    const double exp_roof = machine.exp_rate * machine.cores * machine.rated_clock_ghz * 1e-3 * flop_per_exp;
    constexpr double kOneLine = 1.3;  // ratio below which two roofs share a label
    const bool one_label = flop_per_exp > 0 && exp_roof < kOneLine * peak && exp_roof * kOneLine > peak;
    figure.guides.push_back({{ridge, peak},
                             {most, peak},
                             one_label ? fmt::format("GEMMs, exp {}", rate_text(std::min(peak, exp_roof)))
                                       : fmt::format("GEMMs {} TFLOP/s", rate_text(peak)),
                             0.7});
    if (flop_per_exp > 0 && exp_roof < peak * 1.5 && exp_roof > 1.02 * lowest) {
        figure.guides.push_back({{exp_roof / slope, exp_roof},
                                 {most, exp_roof},
                                 one_label ? "" : fmt::format("exp {} TFLOP/s", rate_text(exp_roof)),
                                 0.5});
    }
    double slower = peak;  // the roof of kernels with mma.sync
    for (const SweepCell& cell : rows.front().cells) {
        if (cell.known()) slower = std::min(slower, mma_peak_tflops(machine, first, cell.passes.front()));
    }
    if (machine.kind == model::MachineKind::gpu && slower < 0.99 * peak) {
        figure.guides.push_back(
            {{slower / slope, slower}, {most, slower}, fmt::format("mma.sync {} TFLOP/s", rate_text(slower)), 0.38});
    }
    return figure;
}

bool is_decode(std::span<const SweepRow> rows) {
    return std::all_of(rows.begin(), rows.end(), [](const SweepRow& row) {
        const std::string kind = model::kind_of(row.problem);
        return kind == "decode" || (row.problem.kv_lengths && row.problem.len_q <= 16);
    });
}

plot::Figure decode_figure(const model::Machine& machine, std::span<const SweepRow> rows) {
    plot::Figure figure;
    figure.title = fmt::format("Decoding on {}", machine.title);
    figure.subtitle = subtitle_of(rows);
    figure.x = {.label = "keys of a sequence", .scale = plot::Scale::log2};
    figure.y = {.label = "GB/s of device memory", .least = 0, .most = machine.dram_gbs * 1.08};
    double shortest = static_cast<double>(rows.front().problem.len_kv), longest = shortest;
    for (std::size_t s = 0; s < rows.front().cells.size(); ++s) {
        const Schedule schedule = rows.front().cells[s].schedule;
        plot::Series series{.name = name_of(schedule), .points = {}, .color = static_cast<int>(schedule)};
        for (const SweepRow& row : rows) {
            const SweepCell& cell = row.cells[s];
            if (!cell.known()) continue;
            const auto keys = static_cast<double>(row.problem.len_kv);
            shortest = std::min(shortest, keys);
            longest = std::max(longest, keys);
            const model::Prediction& p = cell.passes.front();
            const double rate = static_cast<double>(p.cost.work.bytes.dram) * 1e-6 / p.ms;
            series.points.push_back({keys, rate,
                                     fmt::format("{} keys: {:.4g} ms, {:.0f} GB/s, +-{:.0f} %", row.problem.len_kv,
                                                 p.ms, rate, 100 * p.error),
                                     rate / (1 + p.error), std::min(machine.dram_gbs.value, rate * (1 + p.error))});
        }
        if (!series.points.empty()) figure.series.push_back(std::move(series));
    }
    const double read = machine.dram_gbs * machine.dram_read_share;
    figure.guides.push_back({{shortest, machine.dram_gbs},
                             {longest, machine.dram_gbs},
                             fmt::format("peak {:.0f} GB/s; reading reaches {:.0f}", machine.dram_gbs.value, read),
                             0.3});
    figure.guides.push_back({{shortest, read}, {longest, read}});
    return figure;
}

}  // namespace tessera::measure
