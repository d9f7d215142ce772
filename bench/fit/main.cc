// SPDX-License-Identifier: Apache-2.0
//
// Fits the constants of the cost model: those of src/model/families_gpu.cc to Records of an H200, those of
// src/model/cpu_families.cc to Records of CPUs:
//
//     cd bench/results/h200 && fit_model [--only "tessera fa2 backward"] [--free exp_exposed,end_cycles]
//         {forward,peers,drawn*,held_out,now/*}.jsonl
//
//     fit_model [--only "bf16 forward"] --cpu bench/results/cpu/probes_95001_xeon16.jsonl
//
//     fit_model --host probes.jsonl drawn.jsonl
//
//     fit_model --probe probes.jsonl
//
// --host runs the fit of `tessera calibrate` with the rows of the first file as its probes. It fits the shares of that
// host's kernels and judges them by the rows of the other files. --write FILE writes its machine file, --all prints
// every row. --probe FILE runs `tessera calibrate` and appends each timed call as a Record, so that a fit can be
// repeated. The machine file is written beside it (probes.machine.json).
//
// For each family of kernels, the constants in the table are free (fit.hpp). Rows that `tessera roofline --accuracy`
// counts as held out are predicted but not fitted. A machine file beside Records of a CPU (x.machine.json beside
// x.jsonl) is their machine.
#include <filesystem>
#include <string_view>

#include "fit.hpp"
#include "measure/calibrate.hpp"
#include "measure/calibrate_kernels.hpp"
#include "measure/host.hpp"
#include "measure/machine_file.hpp"
#include "measure/timer.hpp"
#include "measure/work.hpp"
#include "model/cpu.hpp"
#include "model/gpu.hpp"
#include "tessera/error.hpp"
#include "tessera/tessera.h"

namespace tessera::fit {
namespace {

using model::Constants;
using model::CpuConstants;
using model::Family;

constexpr Named<Constants> kConstants[] = {
    {"exp_exposed", &Constants::exp_exposed},
    {"padded_exposed", &Constants::padded_exposed},
    {"shared_exposed", &Constants::shared_exposed},
    {"uneven_exposed", &Constants::uneven_exposed},
    {"adds_exposed", &Constants::adds_exposed},
    {"step_cycles", &Constants::step_cycles},
    {"end_cycles", &Constants::end_cycles},
    {"end_cycles_per_dim", &Constants::end_cycles_per_dim},
    {"mask_exposed", &Constants::mask_exposed},
    {"dram_exposed", &Constants::dram_exposed},
    {"dq_exp_exposed", &Constants::dq_exp_exposed},
    {"dq_end_cycles", &Constants::dq_end_cycles},
    {"dq_add_cycles", &Constants::dq_add_cycles},
    {"lone_exposed", &Constants::lone_exposed},
    {"stream_exposed", &Constants::stream_exposed},
    {"split_us", &Constants::split_us},
    {"gemm_stretch", &Constants::gemm_stretch},
    {"page_us", &Constants::page_us},
    {"call_us", &Constants::call_us},
    {"dropout_exposed", &Constants::dropout_exposed},
    {"small_end_cycles", &Constants::small_end_cycles},
    {"empty_cycles", &Constants::empty_cycles},
    {"residual_cycles", &Constants::residual_cycles},
    {"list_us", &Constants::list_us},
    {"sequence_cycles", &Constants::sequence_cycles},
    {"combine_cycles", &Constants::combine_cycles},
    {"single_block_factor", &Constants::single_block_factor},
    {"row_cycles", &Constants::row_cycles},
    {"row_exposed", &Constants::row_exposed},
    {"pass_exposed", &Constants::pass_exposed},
};

constexpr Named<CpuConstants> kCpuConstants[] = {
    {"gemm_share", &CpuConstants::gemm_share},
    {"exp_share", &CpuConstants::exp_share},
    {"extra_tiles", &CpuConstants::extra_tiles},
    {"loop_starts", &CpuConstants::loop_starts},
    {"call_us", &CpuConstants::call_us},
    {"pack_ns", &CpuConstants::pack_ns},
    {"contended_speed", &CpuConstants::contended_speed},
    {"mask_share", &CpuConstants::mask_share},
};

struct Asked {
    std::string only;
    std::string free;  ///< names of constants, with commas: others stay
    std::string write;
    bool cpu = false;
    bool host = false;
    std::string device = "h200";  ///< the fit's GPUs: a name, or several with commas
    bool all = false;             ///< print every row of a host, not only those that are far off
    std::vector<Row> rows;

    bool may_move(std::string_view name) const {
        return free.empty() || fmt::format(",{},", free).find(fmt::format(",{},", name)) != std::string::npos;
    }
    bool wants(const std::string& family) const { return only.empty() || only == family; }
};

model::PredictOptions options_of(const Row& row) {
    return {.by = row.measured.prediction.by,
            .threads = row.measured.record.threads,
            .sequences = measure::sequences_of(row.measured.record),
            .kernel = row.measured.kernel,
            .o_residual = measure::writes_residual(row.measured.record)};
}

model::Question question(const Row& row) {
    const model::Prediction& p = row.measured.prediction;
    model::PredictOptions options = options_of(row);
    options.threads = 0;
    model::Question asked = model::question_of(row.problem, p.schedule, p.pass, row.machine, options);
    asked.empty_blocks = measure::had_empty_blocks(row.measured.record);
    return asked;
}

void fit_gpu(const Asked& asked) {
    for (const Family& family : model::gpu_families()) {
        const std::string name =
            fmt::format("{} {} {}{}", family.by, tessera::name_of(family.schedule), tessera::name_of(family.pass),
                        family.over_dim > 0 ? fmt::format(" over {}", family.over_dim) : "") +
            (family.few_queries ? " few" : "") + (family.tcgen05 ? " tcgen05" : "");
        if (!asked.wants(name)) continue;
        std::vector<const Row*> rows;
        for (const Row& row : asked.rows) {
            const model::Prediction& p = row.measured.prediction;
            const bool kind = p.by == family.by && p.schedule == family.schedule && p.pass == family.pass;
            if (kind && &model::family_of(question(row)) == &family) rows.push_back(&row);
        }
        const LogError<Constants> log_error = [&](const Row& row, const Constants& constants) {
            Family moved = family;
            moved.constants = constants;
            model::Prediction prediction;
            model::predict_family(question(row), moved, prediction);
            return std::log(prediction.ms / row.measured.record.ms);
        };
        std::vector<Named<Constants>> names;
        for (const Named<Constants>& constant : kConstants) {
            if (asked.may_move(constant.name)) names.push_back(constant);
        }
        report<Constants>(name, family.constants, names, rows, log_error);
    }
}

void fit_cpu(const Asked& asked) {
    const auto question_of = [](const Row& row, const model::PredictOptions& options) {
        const model::Prediction& p = row.measured.prediction;
        return model::Question{row.problem, p.schedule, p.pass, row.machine, options};
    };
    const LogError<CpuConstants> log_error = [&](const Row& row, const CpuConstants& constants) {
        const model::PredictOptions options = options_of(row);
        const model::Prediction& p = row.measured.prediction;
        model::Prediction prediction{.schedule = p.schedule, .pass = p.pass};
        model::predict_cpu_family(question_of(row, options), constants, prediction);
        return std::log(prediction.ms / row.measured.record.ms);
    };
    for (const model::CpuFamily& family : model::cpu_families()) {
        if (!asked.wants(family.name)) continue;
        std::vector<const Row*> rows;
        for (const Row& row : asked.rows) {
            const model::PredictOptions options = options_of(row);
            if (&model::cpu_family_of(question_of(row, options)) == &family) rows.push_back(&row);
        }
        report<CpuConstants>(family.name, family.constants, kCpuConstants, rows, log_error);
    }
}

/// Runs the fit of `tessera calibrate` on the Records of `first`; all others are held out.
void judge_host(const Asked& asked, const std::string& first) {
    std::map<std::string, std::vector<const Row*>> kinds;
    for (const Row& row : asked.rows) {
        const model::Prediction& p = row.measured.prediction;
        kinds[model::cpu_kernel_kind(p.schedule, p.pass, row.problem.dtype)].push_back(&row);
    }
    std::vector<double> errors[2];
    model::Machine calibrated;
    std::vector<MeasuredKernels> found;
    for (const auto& [name, rows] : kinds) {
        if (!asked.wants(name)) continue;
        std::vector<measure::TimedCall> calls;
        for (const Row* row : rows)
            if (row->measured.record.file == first)
                calls.push_back({row->problem, options_of(*row), row->measured.record.ms});
        calls = measure::medians_of(calls);
        const model::Prediction& kind = rows.front()->measured.prediction;
        if (calls.empty()) continue;
        const model::Machine& machine = (*std::find_if(rows.begin(), rows.end(), [&](const Row* row) {
                                            return row->measured.record.file == first;
                                        }))->machine;
        const KernelShares shares = measure::fitted_shares(machine, kind.schedule, kind.pass, calls);
        if (calibrated.name.empty()) calibrated = machine;
        found.push_back({name, shares, fmt::format("{} calls of {}", calls.size(), first)});
        fmt::print("\n{}, {} calls:", name, calls.size());
        for_each_share(shares, [](const char* share, double value) { fmt::print(" {} {:.4g}", share, value); });
        fmt::print("\n");
        std::vector<double> own[2];
        for (const Row* row : rows) {
            model::Machine there = machine;
            set_measured_kernels(there, {{name, shares, first}});
            const double ms = predict(row->problem, kind.schedule, kind.pass, there, options_of(*row)).ms;
            const measure::Record& r = row->measured.record;
            const bool held_out = r.file != first;
            own[held_out ? 1 : 0].push_back(std::abs(ms / r.ms - 1));
            if (std::abs(ms / r.ms - 1) > (asked.all ? 0.0 : 0.25))
                fmt::print("    {}: {} threads {}: {:.3g} ms, predicted {:+.0f} %\n", held_out ? "held out" : "fitted",
                           row->problem.describe(), r.threads, r.ms, 100 * (ms / r.ms - 1));
        }
        for (int i = 0; i < 2; ++i) {
            fmt::print("  {}: {}\n", i == 1 ? "held out" : "fitted", errors_text(own[i]));
            errors[i].insert(errors[i].end(), own[i].begin(), own[i].end());
        }
    }
    if (found.empty())
        throw Error(ErrorCode::bad_data, first, "expected Records of kernels that are asked for: nothing was fitted");
    if (!asked.write.empty()) {
        set_measured_kernels(calibrated, std::move(found));
        measure::write_machine(asked.write, calibrated);
    }
    fmt::print("\nall, fitted:   {}\nall, held out: {}\n", errors_text(errors[0]), errors_text(errors[1]));
}

/// Runs the measurements of `tessera calibrate`: writes each call as a Record as soon as it is timed, and the machine
/// file.
void probe(const std::string& path) {
    const std::string beside = std::filesystem::path(path).replace_extension(".machine.json").string();
    const measure::Timer timer;
    const auto progress = [&](const std::string& at) { fmt::print("{:6.1f} s {}\n", timer.seconds(), at); };
    model::Machine machine = measure::measure_roofs(0, progress);
    measure::write_machine(beside, machine);
    const measure::Host host = measure::describe_host();
    const auto keep = [&](const measure::ProbedKind& kind, Pass pass, const measure::KernelProbe& one,
                          const measure::Summary& ms) {
        const Problem problem = measure::problem_of(one, kind.dtype);
        const Plan plan = tessera::plan(
            problem, {.pass = pass, .backend = Backend::cpu, .schedule = kind.schedule, .threads = one.threads});
        measure::Record record =
            measure::record_of(plan, ms, measure::flop(problem, pass, measure::visible_pairs(problem)));
        record.device = measure::text_of(host);
        record.date = measure::utc_date();
        record.versions = {{"tessera", tessera_version()}};
        measure::append_records(path, {record});
    };
    set_measured_kernels(machine, measure::measure_kernels(machine, progress, keep));
    measure::write_machine(beside, machine);
    progress("done");
}

/// The machine of a file's Records; null: one that the model does not know.
std::optional<model::Machine> machine_of(const std::string& path, const measure::Record& record) {
    if (auto beside = measure::machine_beside(path)) return beside;
    const model::Machine* known = model::machine_of_device(record.device);
    if (known == nullptr) return std::nullopt;
    return *known;
}

void read(const std::string& path, Asked& asked) {
    const std::vector<measure::Record> records = measure::read_records(path);
    for (measure::Comparison& row : measure::compare(records).rows) {
        const auto machine = machine_of(path, row.record);
        const bool wanted =
            machine && (asked.cpu ? machine->kind == model::MachineKind::cpu
                                  : fmt::format(",{},", asked.device).find(fmt::format(",{},", machine->name)) !=
                                        std::string::npos);
        if (!wanted) continue;
        Problem problem = measure::problem_of(row.record);
        asked.rows.push_back({std::move(row), problem, *machine});
    }
}

int run(int argc, char** argv) {
    Asked asked;
    std::vector<std::string> paths;
    for (int i = 1; i < argc; ++i) {
        const std::string_view argument = argv[i];
        if (argument == "--only" && i + 1 < argc) asked.only = argv[++i];
        else if (argument == "--free" && i + 1 < argc) asked.free = argv[++i];
        else if (argument == "--write" && i + 1 < argc) asked.write = argv[++i];
        else if (argument == "--probe" && i + 1 < argc) return probe(argv[i + 1]), 0;
        else if (argument == "--device" && i + 1 < argc) asked.device = argv[++i];
        else if (argument == "--all") asked.all = true;
        else if (argument == "--cpu") asked.cpu = true;
        else if (argument == "--host") asked.cpu = asked.host = true;
        else paths.emplace_back(argument);
    }
    const bool lost = !asked.write.empty() && !asked.host;  // only a host has a machine file
    for (const std::string& path : paths) read(path, asked);
    if (lost || asked.rows.empty())
        return fmt::print(stderr,
                          "usage: fit_model [--only FAMILY] [--free CONSTANTS] [--cpu | --host [--all] [--write FILE]] "
                          "RECORDS..., some "
                          "of them of "
                          "{}; or fit_model --probe FILE\n",
                          asked.cpu ? "a CPU" : "an H200"),
               2;
    if (asked.host) judge_host(asked, paths.front());
    else if (asked.cpu) fit_cpu(asked);
    else fit_gpu(asked);
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
