// SPDX-License-Identifier: Apache-2.0
//
// tessera roofline --compare: the same call on several machines.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>

#include "device_option.hpp"
#include "measure/accuracy.hpp"
#include "parse.hpp"
#include "report.hpp"
#include "roofline_questions.hpp"
#include "table.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

/// The fastest schedule of one problem on one machine.
struct Compared {
    const model::Machine* machine;
    measure::SweepRow row;

    const measure::SweepCell* best() const { return row.best(); }
    std::string refusal() const {
        for (const measure::SweepCell& cell : row.cells)
            if (!cell.known()) return cell.refusal;
        return "it does not fit the memory";
    }
};

/// The time of the first machine over that of this one; 0: unknown.
double speed_of(const std::vector<Compared>& all, const Compared& one) {
    const measure::SweepCell *first = all.front().best(), *best = one.best();
    return first != nullptr && best != nullptr && best->ms() > 0 ? first->ms() / best->ms() : 0;
}

std::vector<Compared> compare_machines(const RooflineOptions& options, const std::vector<model::Machine>& machines,
                                       const Problem& problem) {
    std::vector<Compared> all;
    for (const model::Machine& machine : machines) {
        const measure::SweepQuestion question{machine, options.schedule_list(), options.passes(),
                                              options.predict_options(machine)};
        all.push_back({&machine, measure::sweep_one(problem, question)});
    }
    return all;
}

std::string compared_text(const std::vector<Compared>& all, int width) {
    Table table({{"device"},
                 {"kernel"},
                 {"time", Align::right},
                 {"rate", Align::right},
                 {"error", Align::right},
                 {"speed", Align::right},
                 {"bound"}});
    std::vector<std::pair<std::string, std::string>> facts{
        {"speed", fmt::format("the time of {} over that of the device", all.front().machine->name)}};
    std::vector<std::string> kernels;
    std::vector<std::pair<std::string, std::string>> left_out;  // costs, and the devices whose kernels leave them out
    for (const Compared& one : all) {
        const measure::SweepCell* best = one.best();
        if (best == nullptr) {
            table.add({one.machine->name, "-", "-", "-", "-", "-", one.refusal()});
            continue;
        }
        const model::Prediction& longest = best->longest();
        const double speed = speed_of(all, one);
        table.add({one.machine->name, name_of(best->schedule), milliseconds_text(best->ms()), rate_text(*best),
                   error_percent_text(*best), speed > 0 ? fmt::format("{:.2f}x", speed) : "-",
                   fmt::format("{} {:.0f} %", longest.bound, longest.percent_of_bound)});
        facts.emplace_back(one.machine->name, measure::error_bar_text(one.row.problem, longest, *one.machine));
        add_kernel(kernels, *best);
        if (longest.not_modelled.empty()) continue;
        if (left_out.empty() || left_out.back().first != longest.not_modelled)
            left_out.emplace_back(longest.not_modelled, one.machine->name);
        else left_out.back().second += ", " + one.machine->name;
    }
    for (const auto& [costs, devices] : left_out)
        facts.emplace_back("not modelled",
                           fmt::format("{}: the kernels take longer by its cost on {}", costs, devices));
    facts.insert(facts.begin(), {"kernels", fmt::format("{}", fmt::join(kernels, ", "))});
    return table.text(width) + "\n" + facts_text(facts, width);
}

Json compared_json(const std::vector<Compared>& all, const Compared& one) {
    Json entry{{"device", one.machine->name}, {"problem", json_of(one.row.problem)}};
    const measure::SweepCell* best = one.best();
    if (best == nullptr) {
        entry["refusal"] = one.refusal();
        return entry;
    }
    const model::Prediction& longest = best->longest();
    entry["schedule"] = name_of(best->schedule);
    entry["by"] = longest.by;
    entry["ms"] = best->ms();
    entry["error"] = error_of(*best);
    entry["not_modelled"] = longest.not_modelled;
    entry["tflops"] = best->tflops();
    entry["gbs"] = gigabytes_per_second(*best);
    if (const double speed = speed_of(all, one); speed > 0) entry["speed"] = speed;
    entry["bound"] = longest.bound;
    entry["percent_of_bound"] = longest.percent_of_bound;
    return entry;
}

}  // namespace

double error_of(const measure::SweepCell& cell) {
    double error = 0;
    for (const model::Prediction& pass : cell.passes) error = std::max(error, pass.error);
    return error;
}

double gigabytes_per_second(const measure::SweepCell& cell) {
    double bytes = 0;
    for (const model::Prediction& pass : cell.passes) bytes += static_cast<double>(pass.cost.work.bytes.dram);
    return cell.ms() > 0 ? bytes * 1e-6 / cell.ms() : 0;
}

std::string rate_text(const measure::SweepCell& cell) {
    if (cell.longest().bound == "DRAM") return fmt::format("{:.0f} GB/s", gigabytes_per_second(cell));
    const double rate = cell.tflops();
    constexpr double kThreeDigits = 999.5;  // from here on {:.3g} writes powers of ten
    return rate < kThreeDigits ? fmt::format("{:.3g} TFLOP/s", rate) : fmt::format("{:.0f} TFLOP/s", rate);
}

void add_kernel(std::vector<std::string>& kernels, const measure::SweepCell& cell) {
    const std::string text = fmt::format("{} of {}", name_of(cell.schedule), cell.longest().by);
    if (std::find(kernels.begin(), kernels.end(), text) == kernels.end()) kernels.push_back(text);
}

std::string error_percent_text(const measure::SweepCell& cell) {
    return fmt::format("+-{:.0f} %", 100 * error_of(cell));
}

static std::string trimmed(const std::string& text) {
    const auto begin = text.find_first_not_of(' ');
    return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

std::vector<model::Machine> machines_to_compare(const RooflineOptions& options) {
    std::vector<model::Machine> machines;
    std::vector<std::string> names;
    for (const std::string& name : parse_list("--compare", options.compare)) {
        machines.push_back(machine_of_option(trimmed(name), "--compare"));
        names.push_back(machines.back().name);
    }
    expect_each_once("--compare", options.compare, names);
    constexpr std::size_t kLeast = 2;
    if (machines.size() < kLeast) unexpected("--compare", "two machines or more: h100,h200", options.compare);
    const bool mixed = std::any_of(machines.begin(), machines.end(),
                                   [&](const auto& one) { return one.kind != machines.front().kind; });
    if (mixed) unexpected("--compare", "GPUs only or CPUs only", options.compare);
    return machines;
}

void show_comparison(const RooflineOptions& options, const Session& session) {
    const std::vector<model::Machine> machines = machines_to_compare(options);
    // The dtype of all is one that every machine computes.
    const auto no_bf16 = std::find_if(machines.begin(), machines.end(),
                                      [](const model::Machine& one) { return !one.supports(DType::bf16); });
    const std::vector<Problem> problems = options.problems(no_bf16 == machines.end() ? machines.front() : *no_bf16);
    const int width = terminal_width(STDOUT_FILENO);
    std::string passes;
    for (const Pass pass : options.passes()) passes += (passes.empty() ? "" : " + ") + std::string(name_of(pass));
    Json rows = Json::array();
    std::string text, reasons;
    bool any = false;
    for (const Problem& problem : problems) {
        problem.validate();
        const std::vector<Compared> all = compare_machines(options, machines, problem);
        for (const Compared& one : all) {
            any = any || one.best() != nullptr;
            if (one.best() == nullptr) reasons += fmt::format("\n  {}: {}", one.machine->name, one.refusal());
            rows.push_back(compared_json(all, one));
        }
        text += text.empty() ? "" : "\n";
        text += facts_text({{"problem", problem.describe()}, {"pass", passes}}, width) + "\n";
        text += compared_text(all, width);
    }
    if (!any) throw Error(ErrorCode::unsupported, "", "no machine can be predicted:" + reasons);
    if (session.csv) session.print_csv(rows);
    else if (session.json)
        session.print_json(Json{{"first", machines.front().name}, {"pass", passes}, {"rows", rows}}, "compare");
    else session.print(text);
}

}  // namespace tessera::cli
