// SPDX-License-Identifier: Apache-2.0
//
// Fits the constants of src/model/family.cc: fit_model [--only "tessera fa2 backward"]
// bench/results/h200/{forward,peers,backward,drawn,held_out}.jsonl
//
// Of each family of kernels those constants are free that the table has; they are moved one after the other, by steps
// that shrink, as long as the mean square of log(predicted / measured) falls. Rows of the files that the family names
// as its own (Family::fitted_on) are fitted; all others are held out: they are predicted with the result and take no
// part.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "measure/accuracy.hpp"
#include "model/gpu.hpp"
#include "tessera/error.hpp"

namespace tessera::fit {
namespace {

using model::Constants;
using model::Family;

constexpr std::pair<const char*, double Constants::*> kConstants[] = {
    {"exp_exposed", &Constants::exp_exposed},
    {"shared_exposed", &Constants::shared_exposed},
    {"adds_exposed", &Constants::adds_exposed},
    {"step_cycles", &Constants::step_cycles},
    {"end_cycles", &Constants::end_cycles},
    {"end_cycles_per_dim", &Constants::end_cycles_per_dim},
    {"cut_tiles", &Constants::cut_tiles},
    {"dram_exposed", &Constants::dram_exposed},
    {"turn_cycles", &Constants::turn_cycles},
    {"row_cycles", &Constants::row_cycles},
    {"row_exposed", &Constants::row_exposed},
    {"pass_exposed", &Constants::pass_exposed},
};

std::string name_of(const Family& family) {
    return fmt::format("{} {} {}", family.by, tessera::name_of(family.schedule), tessera::name_of(family.pass));
}

struct Row {
    measure::Comparison measured;
    Problem problem;
};

double log_error(const Row& row, const Family& family, const model::Machine& machine) {
    const model::PredictOptions options{.by = family.by, .members = measure::members_of(row.measured.record)};
    model::Prediction prediction;
    model::predict_family({row.problem, family.schedule, family.pass, machine, options}, family, prediction);
    return std::log(prediction.ms / row.measured.record.ms);
}

double loss(const std::vector<const Row*>& rows, const Family& family, const model::Machine& machine) {
    double sum = 0;
    for (const Row* row : rows) {
        const double error = log_error(*row, family, machine);
        sum += error * error;
    }
    return sum / static_cast<double>(rows.size());
}

/// Moves each constant up or down by `step` of itself while that helps. True: something moved.
bool sweep(Family& family, const std::vector<const Row*>& rows, const model::Machine& machine, double step,
           double& least) {
    bool moved = false;
    for (const auto& [name, member] : kConstants) {
        const double before = family.constants.*member;
        for (const double factor : {1 + step, 1 / (1 + step)}) {
            family.constants.*member = before * factor;
            const double now = before == 0 ? least : loss(rows, family, machine);
            if (now < least) {
                least = now;
                moved = true;
                break;
            }
            family.constants.*member = before;
        }
    }
    return moved;
}

Family fitted(Family family, const std::vector<const Row*>& rows, const model::Machine& machine) {
    double least = loss(rows, family, machine);
    for (const double step : {0.2, 0.05, 0.01, 0.002}) {
        for (int i = 0; i < 60 && sweep(family, rows, machine, step, least); ++i) continue;
    }
    return family;
}

std::string errors_text(const std::vector<const Row*>& rows, const Family& family, const model::Machine& machine) {
    std::vector<double> errors;
    double within = 0;
    for (const Row* row : rows) {
        errors.push_back(std::abs(std::expm1(log_error(*row, family, machine))));
        within += errors.back() <= 0.15 ? 1.0 : 0.0;
    }
    std::sort(errors.begin(), errors.end());
    return fmt::format("{:4} rows, median {:5.1f} %, worst {:5.1f} %, {:3.0f} % of them within 15 %", errors.size(),
                       100 * errors[errors.size() / 2], 100 * errors.back(),
                       100 * within / static_cast<double>(errors.size()));
}

void report(const Family& family, const std::vector<Row>& all, const model::Machine& machine) {
    std::vector<const Row*> own;
    std::map<std::string, std::vector<const Row*>> held_out;
    for (const Row& row : all) {
        const model::Prediction& p = row.measured.prediction;
        if (p.by != family.by || p.schedule != family.schedule || p.pass != family.pass) continue;
        if (row.measured.held_out) held_out[row.measured.kind].push_back(&row);
        else own.push_back(&row);
    }
    if (own.empty()) return;
    const Family result = fitted(family, own, machine);
    fmt::print("\n{}\n", name_of(family));
    for (const auto& [name, member] : kConstants) {
        if (family.constants.*member == 0) continue;
        fmt::print("    .{} = {:.4g}  (now {:.4g})\n", name, result.constants.*member, family.constants.*member);
    }
    fmt::print("  fitted:                  now {}\n                         refit {}\n",
               errors_text(own, family, machine), errors_text(own, result, machine));
    for (const auto& [kind, rows] : held_out)
        fmt::print("  held out, {:<14} now {}\n                         refit {}\n", kind,
                   errors_text(rows, family, machine), errors_text(rows, result, machine));
}

int run(int argc, char** argv) {
    std::vector<measure::Record> records;
    std::string only;
    for (int i = 1; i < argc; ++i) {
        if (std::string_view(argv[i]) == "--only" && i + 1 < argc) {
            only = argv[++i];
            continue;
        }
        for (measure::Record& record : measure::read_records(argv[i])) records.push_back(std::move(record));
    }
    std::vector<Row> rows;
    for (measure::Comparison& row : measure::compare(records).rows) {
        if (model::machine_of_device(row.record.device) == model::find_machine("h200")) {
            Problem problem = measure::problem_of(row.record);
            rows.push_back({std::move(row), problem});
        }
    }
    if (rows.empty()) return fmt::print(stderr, "usage: fit_model RECORDS..., some of them of an H200\n"), 2;
    for (const Family& family : model::gpu_families()) {
        if (only.empty() || only == name_of(family)) report(family, rows, *model::find_machine("h200"));
    }
    return 0;
}

}  // namespace
}  // namespace tessera::fit

int main(int argc, char** argv) {
    try {
        return tessera::fit::run(argc, argv);
    } catch (const tessera::Error& error) {
        fmt::print(stderr, "fit_model: {}\n", error.what());
        return 1;
    }
}
