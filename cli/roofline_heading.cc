// SPDX-License-Identifier: Apache-2.0
//
// Formats the heading of the tables of `tessera roofline`.
#include <fmt/format.h>

#include <algorithm>

#include "measure/accuracy.hpp"
#include "report.hpp"
#include "roofline_text.hpp"

namespace tessera::cli {

using measure::SweepCell;
using measure::SweepRow;

std::string rows_text(const SweepRow& first, const SweepRow& last) {
    const auto one = [](const Problem& p) {
        return p.len_q == p.len_kv ? count_text(p.len_kv)
                                   : fmt::format("{} x {}", count_text(p.len_q), count_text(p.len_kv));
    };
    return &first == &last ? one(first.problem) : fmt::format("{} to {}", one(first.problem), one(last.problem));
}

namespace {

std::string kernels_text(std::span<const SweepRow> rows) {
    const auto& row = rows.front().cells;
    const bool others = std::count_if(row.begin(), row.end(), [](const auto& cell) { return cell.known(); }) > 1;
    std::string text;
    for (const SweepCell& cell : row) {
        if (!cell.known()) continue;
        const model::Prediction& p = cell.passes.front();
        text += fmt::format("{}{} of {}", text.empty() ? "" : ", ", name_of(cell.schedule), p.by);
        if (cell.schedule == Schedule::standard && p.by == "tessera" && others) text += " (S in fp32)";
        const bool backward = std::any_of(cell.passes.begin(), cell.passes.end(),
                                          [](const auto& pass) { return pass.pass == Pass::backward; });
        if (cell.schedule == Schedule::fa1 && backward)
            text += " (its backward is tessera's own and slow: not FlashAttention-1's)";
        if (p.fitted_on.find("published") != std::string::npos)
            text += p.by == "flash-attention" ? " (FlashAttention-4, by others' tables: never run here)"
                                              : " (by others' tables: never run here)";
        if (p.fitted_on.empty()) text += " (with the constants of a related kernel)";
    }
    return text;
}

/// The error bar of the row's kernels; if they differ, that of the newest schedule. If the machine measured only some
/// of them, the error bar is for the others, by name.
std::string error_text(const SweepRow& row, const model::Machine& machine) {
    const model::Prediction* shown = nullptr;
    bool some_measured = false;
    std::string others;
    for (const SweepCell& cell : row.cells) {
        if (!cell.known()) continue;
        const auto found =
            std::find_if(cell.passes.begin(), cell.passes.end(), [](const auto& p) { return !p.measured; });
        const bool measured = found == cell.passes.end();
        some_measured = some_measured || measured;
        if (!measured) others += fmt::format("{}{}", others.empty() ? "" : ", ", name_of(cell.schedule));
        const model::Prediction& pass = measured ? cell.passes.front() : *found;
        if (shown == nullptr || !measured) shown = &pass;
    }
    if (shown == nullptr) return "";
    const std::string text = measure::error_bar_text(row.problem, *shown, machine);
    return some_measured && !others.empty() ? fmt::format("{}: {}", others, text) : text;
}

/// The error bars of all rows. Consecutive rows with equal error bars share one, with their lengths if there are
/// several.
std::vector<std::string> error_texts(std::span<const SweepRow> rows, const model::Machine& machine) {
    struct Run {
        std::string text;
        const SweepRow *first, *last;
    };
    std::vector<Run> runs;
    for (const SweepRow& row : rows) {
        const std::string text = error_text(row, machine);
        if (text.empty()) continue;
        if (!runs.empty() && runs.back().text == text) runs.back().last = &row;
        else runs.push_back({text, &row, &row});
    }
    std::vector<std::string> texts;
    for (const Run& run : runs)
        texts.push_back(runs.size() == 1 ? run.text : rows_text(*run.first, *run.last) + ": " + run.text);
    return texts;
}

/// Names the baseline of the wins, with its time if there is one row, and the reasons of missing wins.
std::string baseline_text(std::span<const SweepRow> rows) {
    const SweepRow& first = rows.front();
    const measure::SweepBaseline& baseline = first.baseline;
    std::string text = "over " + model::title_of(baseline.kind, first.problem);
    if (baseline.cell.known()) {
        double error = 0;
        for (const SweepRow& row : rows)
            if (row.baseline.cell.known()) error = std::max(error, row.baseline.cell.longest().error);
        text += rows.size() == 1 ? fmt::format(": {} +-{:.0f} %", milliseconds_text(baseline.cell.ms()), 100 * error)
                                 : fmt::format(" ({}), +-{:.0f} % at most", model::name_of(baseline.kind), 100 * error);
    }
    std::vector<std::string> reasons;
    for (const SweepRow* row : {&first, &rows.back()}) {
        for (const SweepCell& cell : row->cells) {
            const auto reason = cell.known() ? row->no_win(cell) : std::nullopt;
            if (reason && std::find(reasons.begin(), reasons.end(), *reason) == reasons.end())
                reasons.push_back(*reason);
        }
    }
    for (const std::string& reason : reasons) text += "; no number: " + reason;
    return text;
}

/// Costs that the predicted times leave out, per kernel if that differs.
std::string not_modelled_text(const SweepRow& row) {
    std::vector<std::pair<std::string, std::string>> groups;  // a cost, and the schedules that leave it out
    bool all = true;
    for (const SweepCell& cell : row.cells) {
        if (!cell.known()) continue;
        const std::string& what = cell.passes.front().not_modelled;
        if (what.empty()) {
            all = false;
            continue;
        }
        const auto same =
            std::find_if(groups.begin(), groups.end(), [&](const auto& one) { return one.first == what; });
        if (same == groups.end()) groups.emplace_back(what, name_of(cell.schedule));
        else same->second += std::string(", ") + name_of(cell.schedule);
    }
    if (groups.empty()) return "";
    std::string text;
    for (const auto& [what, schedules] : groups) {
        if (!text.empty()) text += "; ";
        text += all && groups.size() == 1 ? what : schedules + ": " + what;
    }
    return text + ": the kernels take longer by its cost";
}

}  // namespace

std::string heading_text(const model::Machine& machine, std::span<const SweepRow> rows, int width) {
    Problem shown = rows.front().problem;
    std::string problem = shown.describe();
    if (rows.size() > 1) {
        problem = fmt::format("{}, heads {}/{}, head_dim {}", name_of(shown.dtype), shown.heads_q, shown.heads_kv,
                              shown.head_dim);
        if (shown.head_dim_v != shown.head_dim) problem += fmt::format("/{}", shown.head_dim_v);
        const std::string mask = measure::mask_text(shown.mask);
        if (mask != "none") problem += ", " + mask;
    }
    std::string passes;
    for (const SweepCell& cell : rows.front().cells) {
        if (!cell.known() || !passes.empty()) continue;
        for (const auto& pass : cell.passes) passes += (passes.empty() ? "" : " + ") + std::string(name_of(pass.pass));
    }
    std::vector<std::pair<std::string, std::string>> facts{
        {"device", fmt::format("{}: {}, {:.4g} TFLOP/s, {:.4g} GB/s", machine.name, machine.title,
                               machine.peak_tflops(shown.dtype), machine.dram_gbs.value)},
        {"problem", problem},
        {"pass", passes},
        {"kernels", kernels_text(rows)},
        {"win", baseline_text(rows)}};
    for (const SweepCell& cell : rows.front().cells) {
        if (!cell.known()) facts.emplace_back("no " + std::string(name_of(cell.schedule)), cell.refusal);
    }
    if (const std::string without = not_modelled_text(rows.front()); !without.empty())
        facts.emplace_back("not modelled", without);
    const std::vector<std::string> errors = error_texts(rows, machine);
    for (const std::string& error : errors) facts.emplace_back(&error == &errors.front() ? "error" : "", error);
    return facts_text(facts, width);
}

}  // namespace tessera::cli
