// SPDX-License-Identifier: Apache-2.0
#include "measure/sweep.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "measure/record.hpp"
#include "model/family.hpp"

namespace tessera::measure {
namespace {

constexpr std::int64_t kShortest = 16;
constexpr std::int64_t kLongest = std::int64_t{1} << 20;

/// Returns the options for one schedule, with "published" resolved.
model::PredictOptions options_for(const SweepQuestion& question, Schedule schedule) {
    model::PredictOptions options = question.options;
    if (options.by != "published") return options;
    const bool has_authors_kernels = schedule == Schedule::fa2 || schedule == Schedule::fa3;
    const bool on_gpu = question.machine.kind == model::MachineKind::gpu;
    options.by = has_authors_kernels && on_gpu ? "flash-attention" : "tessera";
    return options;
}

Problem with_length(const Problem& problem, std::int64_t len) {
    Problem p = problem;
    p.len_kv = len;
    if (problem.len_q == problem.len_kv) p.len_q = len;
    return p;
}

}  // namespace

double SweepCell::ms() const {
    double sum = 0;
    for (const auto& pass : passes) sum += pass.ms;
    return sum;
}

double SweepCell::tflops() const {
    double flop = 0;
    for (const auto& pass : passes) flop += static_cast<double>(pass.cost.work.flop);
    return ms() > 0 ? flop * 1e-9 / ms() : 0;
}

const model::Prediction& SweepCell::longest() const {
    return *std::max_element(passes.begin(), passes.end(), [](const auto& a, const auto& b) { return a.ms < b.ms; });
}

const SweepCell* SweepRow::best() const {
    const SweepCell* found = nullptr;
    for (const SweepCell& cell : cells) {
        if (cell.known() && cell.fits && (found == nullptr || cell.ms() < found->ms())) found = &cell;
    }
    return found;
}

const SweepCell* SweepRow::of(Schedule schedule) const {
    for (const SweepCell& cell : cells) {
        if (cell.schedule == schedule && cell.known()) return &cell;
    }
    return nullptr;
}

double SweepRow::win(const SweepCell* cell) const {
    if (cell == nullptr || !cell->known() || !(cell->ms() > 0) || no_win(*cell)) return 0;
    return baseline.cell.ms() / cell->ms();
}

double SweepRow::win_error(const SweepCell& cell) const {
    return (1 + cell.longest().error) * (1 + baseline.cell.longest().error) - 1;
}

std::optional<std::string> SweepRow::no_win(const SweepCell& cell) const {
    if (!baseline.cell.known()) return baseline.cell.refusal;
    if (!baseline.cell.fits) return "it does not fit the memory";  // no machine could have run it
    return missing_cost(cell);
}

std::optional<std::string> SweepRow::missing_cost(const SweepCell& cell) const {
    const auto lacks = [](const SweepCell& one) { return one.longest().not_modelled; };
    if (const std::string what = lacks(baseline.cell); !what.empty()) return what + " is not in its time";
    if (cell.known() && !lacks(cell).empty())
        return fmt::format("{} is not in the time of {}", lacks(cell), name_of(cell.schedule));
    return std::nullopt;
}

namespace {

SweepBaseline baseline_of(const Problem& problem, const SweepQuestion& question) {
    SweepBaseline result{.kind = question.baseline.value_or(model::without_flash(problem, question.machine)),
                         .cell = {.schedule = Schedule::standard}};
    SweepCell& cell = result.cell;
    for (const Pass pass : question.passes) {
        if (const auto reason = model::refusal(problem, result.kind, pass, question.machine, question.options)) {
            cell.refusal = *reason;
            cell.passes.clear();
            break;
        }
        cell.passes.push_back(model::predict(problem, result.kind, pass, question.machine, question.options));
        const double capacity = question.machine.memory_gib * 1073741824.0;
        cell.fits = cell.fits && static_cast<double>(cell.passes.back().memory.total()) <= capacity;
    }
    return result;
}

}  // namespace

SweepRow sweep_one(const Problem& problem, const SweepQuestion& question) {
    SweepRow row{problem, {}, baseline_of(problem, question)};
    for (const Schedule schedule : question.schedules) {
        SweepCell cell{.schedule = schedule};
        const model::PredictOptions options = options_for(question, schedule);
        for (const Pass pass : question.passes) {
            if (const auto reason = model::refusal(problem, schedule, pass, question.machine, options)) {
                cell.refusal = *reason;
                cell.passes.clear();
                break;
            }
            cell.passes.push_back(model::predict(problem, schedule, pass, question.machine, options));
            const double capacity = question.machine.memory_gib * 1073741824.0;
            cell.fits = cell.fits && static_cast<double>(cell.passes.back().memory.total()) <= capacity;
        }
        row.cells.push_back(std::move(cell));
    }
    return row;
}

std::optional<std::vector<Range>> faster_than_standard(const Problem& problem, Schedule schedule,
                                                       const SweepQuestion& question) {
    SweepQuestion pair{
        question.machine, {Schedule::standard, schedule}, question.passes, question.options, model::Baseline::standard};
    pair.options.worksheet = false;
    if (const Problem shortest = with_length(problem, kShortest); schedule::countable(shortest)) {
        const SweepRow row = sweep_one(shortest, pair);
        if (row.baseline.cell.known() && row.missing_cost(row.cells.back())) return std::nullopt;
    }
    const auto faster = [&](std::int64_t len) {
        const SweepRow row = sweep_one(with_length(problem, len), pair);
        return row.win(&row.cells.back()) > 1;
    };
    // A crossing is found within 3 % of its length. The length at which standard stops fitting is found exactly.
    std::int64_t beyond = kLongest;
    for (const Pass pass : question.passes)
        beyond = std::min(beyond, model::longest_that_fits(problem, Schedule::standard, pass, question.machine) + 1);
    std::vector<Range> ranges;
    bool before = false;
    std::int64_t previous = kShortest;
    // For many heads the longest rows cannot be counted; the search then ends there instead of at kLongest.
    for (std::int64_t len = kShortest; len <= kLongest && schedule::countable(with_length(problem, len));
         previous = len, len *= 2) {
        const bool now = faster(len);
        if (now == before) continue;
        std::int64_t low = len == kShortest ? 0 : previous;  // last length without a change
        std::int64_t high = len;
        while (high - low > std::max<std::int64_t>(1, low / 32)) {
            const std::int64_t middle = low + (high - low) / 2;
            if (middle == 0) break;
            (faster(middle) == before ? low : high) = middle;
        }
        if (now) ranges.push_back({high, 0});
        else ranges.back().end = std::min(high, beyond);
        before = now;
    }
    return ranges;
}

double mma_peak_tflops(const model::Machine& machine, const Problem& problem, const model::Prediction& prediction) {
    const model::Family* family = model::find_family(prediction.schedule, prediction.pass, prediction.by);
    const bool warp_wide = machine.kind == model::MachineKind::gpu && family != nullptr && family->warp_wide;
    return machine.gemm_flop(problem.dtype, warp_wide) * machine.cores * machine.rated_clock_ghz * 1e-3;
}

double amdahl_speedup(double fraction, double speedup) { return 1 / (1 - fraction + fraction / speedup); }

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
        kernels +=
            fmt::format("{}{} of {}", kernels.empty() ? "" : ", ", name_of(cell.schedule), cell.passes.front().by);
    }
    const Problem& last = rows.back().problem;
    return fmt::format("{}, {}, {}/{} heads of {}, batch {}, mask {}, {}; {}", passes, name_of(p.dtype), p.heads_q,
                       p.heads_kv, p.head_dim, span_text(p.batch, last.batch), mask_text(p.mask), lengths_text(p, last),
                       kernels);
}

/// Labels the first and the last point of a schedule with their lengths, below the point if its line leaves upwards.
std::vector<plot::Note> ends_of(const SweepCell& first_cell, const SweepRow& first, const SweepCell& last_cell,
                                const SweepRow& last, std::span<const plot::Point> points) {
    std::vector<plot::Note> ends;
    const auto add = [&](const SweepCell& cell, const SweepRow& row, const plot::Point& end, const plot::Point& next) {
        if (!cell.known()) return;
        ends.push_back({{end.x, end.y}, short_length(row.problem.len_kv), next.x > end.x && next.y > end.y});
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
            ends_of(cell_of(rows.front()), rows.front(), cell_of(rows.back()), rows.back(), series.points);
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
                             one_label ? fmt::format("GEMMs, exp unit {}", rate_text(std::min(peak, exp_roof)))
                                       : fmt::format("GEMMs {} TFLOP/s", rate_text(peak)),
                             0.7});
    if (flop_per_exp > 0 && exp_roof < peak * 1.5 && exp_roof > 1.02 * lowest) {
        figure.guides.push_back({{exp_roof / slope, exp_roof},
                                 {most, exp_roof},
                                 one_label ? "" : fmt::format("exp unit {} TFLOP/s", rate_text(exp_roof)),
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

}  // namespace tessera::measure
