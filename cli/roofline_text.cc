// SPDX-License-Identifier: Apache-2.0
#include "roofline_text.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "measure/accuracy.hpp"
#include "measure/coverage.hpp"
#include "measure/record.hpp"
#include "report.hpp"
#include "table.hpp"

namespace tessera::cli {
namespace {

using measure::SweepCell;
using measure::SweepRow;

/// Formats a speedup; 0: unknown.
std::string win_text(double win) { return win > 0 ? fmt::format("{:.2f}x", win) : "-"; }

/// Formats TFLOP/s with three digits and without powers of ten.
std::string rate_text(double rate) { return rate < 999.5 ? fmt::format("{:.3g}", rate) : fmt::format("{:.0f}", rate); }

std::string model_text(double win, double fraction) {
    return win_text(win > 0 ? measure::amdahl_speedup(fraction, win) : 0);
}

std::string bound_text(const model::Prediction& p) { return fmt::format("{} {:.0f} %", p.bound, p.percent_of_bound); }

/// Formats "1-812" or "from 1 on".
std::string range_text(const Range& range) {
    return range.end == 0 ? fmt::format("from {} on", count_text(range.begin))
                          : fmt::format("from {} to {}", count_text(range.begin), count_text(range.end - 1));
}

/// Is the baseline none of the schedules that the table has anyway?
bool shows_baseline(const SweepRow& row) {
    return row.baseline.kind != model::Baseline::standard || row.of(Schedule::standard) == nullptr;
}

/// Says of which peak rate the column "tensor" is the share: mma.sync, which some kernels use, has a lower one.
std::string tensor_text(const SweepRow& row, const model::Machine& machine) {
    std::vector<std::pair<double, std::string>> peaks;  // and the schedules that have them
    for (const SweepCell& cell : row.cells) {
        if (!cell.known()) continue;
        const double peak = measure::mma_peak_tflops(machine, row.problem, cell.longest());
        const auto same = std::find_if(peaks.begin(), peaks.end(), [&](const auto& one) { return one.first == peak; });
        if (same == peaks.end()) peaks.emplace_back(peak, name_of(cell.schedule));
        else same->second += fmt::format(" and {}", name_of(cell.schedule));
    }
    const double whole = machine.peak_tflops(row.problem.dtype);
    const double clocks = machine.cores * machine.rated_clock_ghz * 1e-3;
    const bool has_multiply_adds = row.problem.dtype == DType::fp32;  // and tensor cores for numbers in parts
    std::string text;
    for (const auto& [peak, schedules] : peaks) {
        text += fmt::format("{}% of {:.0f} TFLOP/s", text.empty() ? "" : "; ", peak);
        const bool multiplies = has_multiply_adds && peak == machine.gemm_flop(DType::fp32, false) * clocks;
        if (peak < 0.99 * whole)
            text += fmt::format(" ({}) in {}", multiplies ? "multiply-adds" : "mma.sync", schedules);
        else if (peaks.size() > 1) text += fmt::format(" in {}", schedules);
    }
    return text;
}

}  // namespace

std::string lengths_text(std::span<const SweepRow> rows, std::optional<double> fraction, int width) {
    const auto same = [&](auto member) {
        return std::all_of(rows.begin(), rows.end(),
                           [&](const SweepRow& r) { return r.problem.*member == rows.front().problem.*member; });
    };
    const bool show_batch = !same(&Problem::batch);
    const bool square =
        std::all_of(rows.begin(), rows.end(), [](const SweepRow& r) { return r.problem.len_q == r.problem.len_kv; });
    std::vector<Column> columns{{"len", Align::right}};
    if (show_batch) columns.push_back({"batch", Align::right});
    for (const SweepCell& cell : rows.front().cells) columns.push_back({name_of(cell.schedule), Align::right});
    const bool with_baseline = shows_baseline(rows.front());
    if (with_baseline) columns.push_back({model::name_of(rows.front().baseline.kind), Align::right});
    for (const char* title : {"TFLOP/s", "win"}) columns.push_back({title, Align::right});
    if (fraction) columns.push_back({"model", Align::right});
    columns.push_back({"bound of the best"});
    Table table(columns, show_batch ? 2 : 1);
    for (const SweepRow& row : rows) {
        std::vector<std::string> cells{square ? count_text(row.problem.len_kv)
                                              : fmt::format("{} x {}", row.problem.len_q, row.problem.len_kv)};
        if (show_batch) cells.push_back(count_text(row.problem.batch));
        const auto add_time = [&](const SweepCell& cell) {
            cells.push_back(!cell.known() ? "-" : !cell.fits ? "no memory" : milliseconds_text(cell.ms()));
        };
        for (const SweepCell& cell : row.cells) add_time(cell);
        if (with_baseline) add_time(row.baseline.cell);
        const SweepCell* best = row.best();
        const double win = row.win(best);
        cells.push_back(best != nullptr ? rate_text(best->tflops()) : "-");
        cells.push_back(win_text(win));
        if (fraction) cells.push_back(model_text(win, *fraction));
        cells.push_back(best != nullptr ? fmt::format("{}: {}", name_of(best->schedule), bound_text(best->longest()))
                                        : "-");
        table.add(cells);
    }
    return table.text(width);
}

std::string schedules_text(const SweepRow& row, const model::Machine& machine, std::optional<double> fraction,
                           int width) {
    std::vector<Column> columns{{"schedule"}, {"time", Align::right}, {"TFLOP/s", Align::right}, {"win", Align::right}};
    if (fraction) columns.push_back({"model", Align::right});
    const bool gpu = machine.kind == model::MachineKind::gpu;
    const std::vector<std::pair<std::string, std::string>> roofs =
        gpu ? std::vector<std::pair<std::string, std::string>>{{"tensor", "tensor"},
                                                               {"exp", "SFU (exp)"},
                                                               {"shared", "shared memory"},
                                                               {"L2", "L2"},
                                                               {"DRAM", "DRAM"}}
            : std::vector<std::pair<std::string, std::string>>{
                  {"FMA", "FMA"}, {"matrix", "matrix"}, {"exp", "exp"}, {"cache", "cache"}, {"DRAM", "DRAM"}};
    for (const auto& [title, name] : roofs) columns.push_back({title, Align::right});
    columns.push_back({"memory", Align::right});
    columns.push_back({"bound"});
    Table table(columns);
    std::string parts;
    for (const SweepCell& cell : row.cells) {
        if (!cell.known()) continue;
        const model::Prediction& p = cell.longest();
        const double win = row.win(&cell);
        std::vector<std::string> cells{name_of(cell.schedule), milliseconds_text(cell.ms()), rate_text(cell.tflops()),
                                       win_text(win)};
        if (fraction) cells.push_back(model_text(win, *fraction));
        for (const auto& [title, name] : roofs) {
            const auto roof = std::find_if(p.roofs.begin(), p.roofs.end(),
                                           [&, wanted = name](const model::Roof& r) { return r.name == wanted; });
            cells.push_back(roof == p.roofs.end() ? "-" : fmt::format("{:.0f} %", roof->percent));
        }
        cells.push_back(bytes_text(static_cast<double>(p.memory.total())));
        cells.push_back(cell.fits ? p.bound : p.bound + "; does not fit");
        table.add(cells);
        std::string where;
        for (const model::Part& part : p.parts) {
            const double percent = 100 * part.ms / p.ms;
            if (percent < 0.5) continue;
            where += fmt::format("{}{} {:.0f} %", where.empty() ? "" : ", ", part.name, percent);
        }
        parts += facts_text({{fmt::format("{:<8}", name_of(cell.schedule)), where}}, width);
    }
    if (const SweepCell& cell = row.baseline.cell; cell.known() && shows_baseline(row)) {
        std::vector<std::string> cells{model::name_of(row.baseline.kind), milliseconds_text(cell.ms()),
                                       rate_text(cell.tflops()), cell.fits ? "1.00x" : "-"};
        if (fraction) cells.emplace_back("-");
        cells.insert(cells.end(), roofs.size(), "-");
        cells.push_back(bytes_text(static_cast<double>(cell.longest().memory.total())));
        cells.push_back(cell.fits ? cell.longest().bound : cell.longest().bound + "; does not fit");
        table.add(cells);
    }
    const std::string tensor = gpu ? tensor_text(row, machine) : "";
    return table.text(width) + (tensor.empty() ? "" : facts_text({{"column tensor:", tensor}}, width)) +
           "\nWhere the time goes\n" + parts;
}

std::string worksheet_text(const SweepRow& row, const model::Machine& machine, bool of_many, int width) {
    std::string text;
    for (const SweepCell& cell : row.cells) {
        for (const model::Prediction& p : cell.passes) {
            text +=
                fmt::format("{}Worksheet: {} {} of {} on {}{}\n", text.empty() ? "" : "\n", name_of(p.schedule),
                            name_of(p.pass), p.by, machine.name, of_many ? ", " + rows_text(row, row) + " long" : "");
            Table table({{"", Align::right}, {"what"}, {"calculation"}});
            int number = 0;
            for (const model::WorksheetLine& line : p.worksheet)
                table.add({fmt::format("{}", ++number), line.what, line.formula});
            text += table.text(width);
        }
    }
    return text;
}

std::string limits_text(const SweepRow& row, const measure::SweepQuestion& question, int width) {
    std::vector<std::pair<std::string, std::string>> facts;
    const bool with_standard = row.of(Schedule::standard) != nullptr;
    for (const SweepCell& cell : row.cells) {
        if (!cell.known()) continue;
        std::string text;
        if (with_standard && cell.schedule != Schedule::standard && !row.problem.ragged && !row.problem.kv_lengths) {
            if (const auto ranges = measure::faster_than_standard(row.problem, cell.schedule, question)) {
                for (const Range& range : *ranges)
                    text += (text.empty() ? "faster than standard " : ", ") + range_text(range);
                text += text.empty() ? "never faster than standard; " : "; ";
            }
        }
        const std::int64_t longest =
            model::longest_that_fits(row.problem, cell.schedule, question.passes.back(), question.machine);
        text += fmt::format("up to {} keys fit {:.4g} GiB", count_text(longest), question.machine.memory_gib.value);
        facts.emplace_back(name_of(cell.schedule), text);
    }
    return facts_text(facts, width);
}

namespace {

/// Formats a table for each device; `what` titles the column of kinds or kernels.
std::string groups_text(const std::vector<measure::Accuracy>& groups, const char* what, int width) {
    std::string text, device;
    Table table({});
    const auto flush = [&] {
        if (!device.empty()) text += "\n" + device + "\n" + table.text(width);
    };
    for (const measure::Accuracy& a : groups) {
        if (a.device != device) {
            flush();
            device = a.device;
            table = Table({{what},
                           {"pass"},
                           {"rows", Align::right},
                           {"median", Align::right},
                           {"mean", Align::right},
                           {"in 15 %", Align::right},
                           {"worst", Align::right},
                           {"worst row"}},
                          2);
        }
        const measure::Record& w = a.worst_row->record;
        std::string where =
            fmt::format("{}: {} x {}, {}/{} heads of {}", a.worst_row->kernels, w.batch,
                        w.len_q == w.len_kv ? count_text(w.len_kv) : fmt::format("{} x {}", w.len_q, w.len_kv),
                        w.heads_q, w.heads_kv, w.head_dim);
        if (w.mask != "none") where += ", " + w.mask;
        if (w.threads > 0) where += fmt::format(", {} threads", w.threads);
        table.add({a.kernels.empty() ? "all" : a.kernels, a.pass, count_text(a.rows),
                   fmt::format("{:.1f} %", 100 * a.median), fmt::format("{:.1f} %", 100 * a.mean),
                   fmt::format("{:.0f} %", 100 * a.within), fmt::format("{:+.1f} %", 100 * a.worst_row->error()),
                   where});
    }
    flush();
    return text;
}

/// Formats how many rows lie inside of error bars, a line for each group.
std::string coverage_text(const std::vector<measure::Coverage>& groups, const char* what, int width) {
    Table table({{what}, {"rows", Align::right}, {"inside", Align::right}});
    for (const measure::Coverage& one : groups) {
        if (one.rows == 0) continue;
        table.add({one.of.empty() ? "all" : one.of, count_text(one.rows),
                   fmt::format("{:.0f} %", 100.0 * one.inside / one.rows)});
    }
    return table.text(width);
}

Json coverage_json(const std::vector<measure::Coverage>& groups) {
    Json list = Json::array();
    for (const measure::Coverage& one : groups)
        list.push_back({{"of", one.of.empty() ? "all" : one.of}, {"rows", one.rows}, {"inside", one.inside}});
    return list;
}

Json groups_json(const std::vector<measure::Accuracy>& groups, const char* what) {
    Json list = Json::array();
    for (const measure::Accuracy& a : groups) {
        list.push_back({{"device", a.device},
                        {what, a.kernels.empty() ? "all" : a.kernels},
                        {"pass", a.pass},
                        {"rows", a.rows},
                        {"median", a.median},
                        {"mean", a.mean},
                        {"within_15_percent", a.within},
                        {"worst", a.worst}});
    }
    return list;
}

measure::Comparisons fitted_rows(const measure::Comparisons& comparisons) {
    measure::Comparisons fitted;
    for (const measure::Comparison& row : comparisons.rows) {
        if (!row.held_out) fitted.rows.push_back(row);
    }
    return fitted;
}

}  // namespace

std::string accuracy_text(const measure::Comparisons& comparisons, int width) {
    std::string text;
    const measure::Comparisons fitted = fitted_rows(comparisons);
    if (const auto blind = measure::summarise_held_out(comparisons, true); !blind.empty())
        text += "Blind: random shapes, measured after the model was fixed\n" + groups_text(blind, "kind", width) + "\n";
    if (fitted.rows.size() < comparisons.rows.size())
        text += "Held out: no constant was fitted on these rows\n" +
                groups_text(measure::summarise_held_out(comparisons), "kind", width) + "\n";
    if (!fitted.rows.empty())
        text += "Fitted: rows that the constants were fitted on\n" +
                groups_text(measure::summarise(fitted), "kernels", width);
    if (const auto stated = measure::stated_coverage(comparisons); !stated.empty())
        text += "\nError bars: rows of the second table inside of their predictions' bars\n\n" +
                coverage_text(stated, "device", width);
    if (const auto tables = measure::leave_one_table_out(comparisons); tables.size() > 1)
        text += "\nCards that nobody measured: tables inside of the bars that the others make\n\n" +
                coverage_text(tables, "table", width) + "\n";
    for (const auto& [reason, count] : comparisons.left_out) {
        for (const std::string& line :
             wrapped(fmt::format("left out: {} ({})", reason, count), static_cast<std::size_t>(width)))
            text += line + "\n";
    }
    return text;
}

Json json_of(const model::Prediction& p) {
    Json roofs = Json::object();
    for (const model::Roof& roof : p.roofs) roofs[roof.name] = {{"ms", roof.ms}, {"percent", roof.percent}};
    Json parts = Json::object();
    for (const model::Part& part : p.parts) parts[part.name] = part.ms;
    Json json{{"schedule", name_of(p.schedule)},
              {"pass", name_of(p.pass)},
              {"by", p.by},
              {"fitted_on", p.fitted_on},
              {"not_modelled", p.not_modelled},
              {"tile", {p.tile.block_q, p.tile.block_kv}},
              {"ms", p.ms},
              {"error", p.error},
              {"tflops", p.tflops},
              {"clock_ghz", p.clock_ghz},
              {"bound", p.bound},
              {"percent_of_bound", p.percent_of_bound},
              {"roofs", roofs},
              {"parts_ms", parts},
              {"flop", p.cost.work.flop},
              {"exps", p.cost.work.exps},
              {"bytes",
               {{"dram", p.cost.work.bytes.dram}, {"l2", p.cost.work.bytes.l2}, {"shared", p.cost.work.bytes.shared}}},
              {"tiles", {{"full", p.cost.full}, {"partial", p.cost.partial}, {"skipped", p.cost.skipped}}},
              {"memory_bytes", {{"tensors", p.memory.tensors}, {"workspace", p.memory.workspace}}},
              {"intensity", p.intensity}};
    if (!p.worksheet.empty()) {
        Json lines = Json::array();
        for (const auto& line : p.worksheet) lines.push_back({{"what", line.what}, {"calculation", line.formula}});
        json["worksheet"] = lines;
    }
    return json;
}

Json json_of(const SweepRow& row, std::optional<double> fraction) {
    Json schedules = Json::array();
    for (const SweepCell& cell : row.cells) {
        Json entry{{"schedule", name_of(cell.schedule)}};
        if (!cell.known()) {
            entry["refusal"] = cell.refusal;
        } else {
            entry["ms"] = cell.ms();
            entry["fits"] = cell.fits;
            entry["tflops"] = cell.tflops();
            if (const double win = row.win(&cell); win > 0) {
                entry["win"] = win;
                entry["win_error"] = row.win_error(cell);
                if (fraction) entry["model_win"] = measure::amdahl_speedup(*fraction, win);
            }
            if (const auto reason = row.no_win(cell)) entry["no_win"] = *reason;
            entry["passes"] = Json::array();
            for (const auto& pass : cell.passes) entry["passes"].push_back(json_of(pass));
        }
        schedules.push_back(entry);
    }
    const SweepCell& cell = row.baseline.cell;
    Json baseline{{"name", model::name_of(row.baseline.kind)},
                  {"title", model::title_of(row.baseline.kind, row.problem)}};
    if (cell.known()) {
        baseline["ms"] = cell.ms();
        baseline["error"] = cell.longest().error;
        baseline["fits"] = cell.fits;
        baseline["not_modelled"] = cell.longest().not_modelled;
    } else {
        baseline["refusal"] = cell.refusal;
    }
    return {{"problem", json_of(row.problem)}, {"schedules", schedules}, {"baseline", baseline}};
}

Json json_of(const measure::Comparisons& comparisons) {
    const measure::Comparisons fitted = fitted_rows(comparisons);
    Json rows = Json::array();
    for (const measure::Comparison& row : comparisons.rows) {
        Json record = measure::to_json(row.record);
        record["predicted_ms"] = row.predicted_ms;
        record["error"] = row.error();
        record["kind"] = row.kind;
        record["held_out"] = row.held_out;
        record["blind"] = row.blind;
        record["error_bar"] = row.prediction.error;
        rows.push_back(record);
    }
    return {{"held_out", groups_json(measure::summarise_held_out(comparisons), "kind")},
            {"fitted", groups_json(measure::summarise(fitted), "kernels")},
            {"error_bars", coverage_json(measure::stated_coverage(comparisons))},
            {"leave_one_table_out", coverage_json(measure::leave_one_table_out(comparisons))},
            {"rows", rows},
            {"left_out", comparisons.left_out}};
}

}  // namespace tessera::cli
