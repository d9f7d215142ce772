// SPDX-License-Identifier: Apache-2.0
//
// tessera bench: measures time and throughput of problems by schedules.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "bench_case.hpp"
#include "bench_table.hpp"
#include "commands.hpp"
#include "device_option.hpp"
#include "measure/calibrate.hpp"
#include "measure/predicted.hpp"
#include "outputs.hpp"
#include "parse.hpp"
#include "records.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

using measure::Record;

struct BenchOptions {
    BenchSet set;
    std::string suite;
    std::string repeat = "9";
    std::string warm_up = "20";
    std::string output;
    std::string device;
    bool resume = false;
    bool list_suites = false;
    bool roofs = false;
};

/// A set, its plans, and the plans that remain to be measured.
struct Work {
    BenchSet set;
    std::vector<Plan> plans;
};

constexpr int kRounds = 3;  // rounds of a noisy measurement

measure::Method method_of(const BenchOptions& options) {
    constexpr std::int64_t kMostRepeats = 1'000'000;
    const std::int64_t repeat = parse_size("--repeat", options.repeat);
    if (repeat < 1 || repeat > kMostRepeats) unexpected("--repeat", fmt::format("1..{}", kMostRepeats), options.repeat);
    const double warm_up = parse_number("--warm-up", options.warm_up);
    if (!(warm_up >= 0 && warm_up <= 60'000)) unexpected("--warm-up", "0..60000 milliseconds", options.warm_up);
    return {.repeat = static_cast<int>(repeat), .warm_up_ms = warm_up, .rounds = kRounds};
}

/// The sets of the suite, or the one set of the command line.
std::vector<BenchSet> sets_of(const BenchOptions& options) {
    if (options.suite.empty()) return {options.set};
    return read_suite(options.suite).sets;
}

std::vector<Plan> plans_of(const BenchOptions& options, const BenchSet& set, std::size_t index) {
    if (options.suite.empty()) return set.plans(false);
    try {
        return set.plans(true);
    } catch (const UsageError& error) {  // the options are in the suite's file
        throw Error(ErrorCode::bad_data, options.suite, fmt::format("sets[{}]: {}", index, error.what()));
    }
}

/// Skips cases that the file already has, measured at this commit on this device.
void drop_measured(const BenchOptions& options, const measure::Host& host, std::vector<Work>& works) {
    if (!options.resume) return;
    if (options.output.empty()) throw UsageError("--resume", "expected --output with it, whose records it continues");
    std::vector<Record> done;
    std::error_code error;  // an unreadable file is unwritable too, and writing reports it
    if (std::filesystem::exists(options.output, error)) done = records_of(std::span(&options.output, 1));
    std::size_t dropped = 0;
    for (Work& work : works) {
        dropped += std::erase_if(work.plans, [&](const Plan& plan) {
            const Record wanted = described(plan, host);
            return std::any_of(done.begin(), done.end(), [&](const Record& record) {
                return measure::same_case(record, wanted) && record.commit == wanted.commit;
            });
        });
    }
    std::erase_if(works, [](const Work& work) { return work.plans.empty(); });
    print_note(fmt::format("skipped {} cases that {} already holds", dropped, options.output));
}

/// A measurement, the model's prediction for it, and whether it exceeds a roof.
struct Result {
    Record measured;
    std::optional<Record> predicted;
    std::optional<measure::AboveRoof> above;
};

/// Predicts the measurement and compares it with the roofs. `machine` is that of --device; null selects the machine
/// that the Record's device names.
Result result_of(const Plan& plan, Record measured, const model::Machine* machine) {
    Result result{.measured = std::move(measured)};
    if (const auto prediction = measure::predict(result.measured, machine)) {
        result.predicted = measure::record_of(*prediction, result.measured);
        result.measured.bound = prediction->bound;
        for (const model::Roof& roof : prediction->roofs) {
            if (roof.name == prediction->bound) result.measured.percent_of_bound = 100 * roof.ms / result.measured.ms;
        }
    }
    if (machine == nullptr) machine = model::machine_of_device(result.measured.device);
    if (machine == nullptr) return result;
    result.above = measure::above_roof(result.measured, plan.problem, *machine);
    return result;
}

/// Reports a measurement above a roof; returns true if it must not become a Record.
bool refused(const Result& result) {
    if (!result.above) return false;
    const std::string what = fmt::format("{}, len {} x {}: {}", result.measured.kernel, result.measured.len_q,
                                         result.measured.len_kv, result.above->reason);
    if (!result.above->certain) {
        print_note(what + ", but that roof is an estimate");
        return false;
    }
    print_error(what + "; not recorded");
    return true;
}

void run_set(const BenchOptions& options, const model::Machine* machine, const Work& work, BenchRun& run,
             Session& session, Progress& progress, std::vector<Record>& records) {
    const BenchTable table(work.plans, run.host, machine);
    if (!session.json && !session.csv) session.print(table.head());
    for (const Plan& plan : work.plans) {
        progress.step(fmt::format("{}, len {} x {}", plan.kernel->name, plan.problem.len_q, plan.problem.len_kv));
        const Result result = result_of(plan, measure_case(plan, work.set, run, progress), machine);
        if (refused(result)) {
            session.exit_code = kCheckFailed;
            continue;
        }
        std::vector<Record> lines = {result.measured};
        if (result.predicted) lines.push_back(*result.predicted);
        if (!options.output.empty()) measure::append_records(options.output, lines);
        if (!session.json && !session.csv) session.print(table.row(result.measured, result.predicted));
        records.insert(records.end(), lines.begin(), lines.end());
    }
}

/// Explains once how to get predictions, if no machine is known for a case.
void note_unknown_machine(const BenchOptions& options, const measure::Host& host, const std::vector<Work>& works) {
    if (!options.device.empty() || options.roofs) return;
    for (const Work& work : works) {
        for (const Plan& plan : work.plans) {
            const std::string device = described(plan, host).device;
            if (plan.kernel->backend == Backend::reference || model::machine_of_device(device) != nullptr) continue;
            return print_note(
                fmt::format("no predictions and roofs: the model does not know {}; tessera calibrate -o FILE "
                            "measures it for --device FILE",
                            device));
        }
    }
}

/// Reports the number of measurements that are too noisy to decide anything.
void note_noise(std::span<const Record> records) {
    std::int64_t cases = 0, noisy = 0;
    for (const Record& record : records) {
        if (record.what != "measured") continue;
        ++cases;
        noisy += measure::is_noisy(record.ms, record.ms_spread) ? 1 : 0;
    }
    if (noisy == 0) return;
    print_note(
        fmt::format("{} of {} measurements are noisy: their spread exceeds {:.0f} % of the median after {} rounds",
                    noisy, cases, 100 * measure::kNoisySpread, kRounds));
}

void print_suites(const Session& session) {
    const std::vector<Suite> suites = find_suites();
    if (session.json) {
        Json json = Json::array();
        for (const Suite& suite : suites) json.push_back({{"name", suite.name}, {"about", suite.about}});
        return session.print_json(json, "suites");
    }
    Table table({{"suite"}, {"about"}});
    for (const Suite& suite : suites) table.add({suite.name, suite.about});
    session.print(table.text(terminal_width(STDOUT_FILENO)));
}

/// Warns if there are more threads than cores.
void note_oversubscription(const measure::Host& host, const std::vector<Work>& works) {
    int most = 0;
    for (const Work& work : works) {
        for (const Plan& plan : work.plans) {
            if (plan.kernel->backend == Backend::cpu) most = std::max(most, plan.threads);
        }
    }
    if (most > host.cores) print_note(fmt::format("{} threads share {} cores", most, host.cores));
}

/// This machine's CPU with measured roofs; its kernels are not calibrated, because bench judges them.
model::Machine measured_machine() {
    Progress progress(measure::kRoofMeasurements);
    return measure::measure_roofs(0, [&](const std::string& what) { progress.step(what); });
}

/// Throws if a CPU's times would be compared with a GPU's predictions.
void expect_kind(const model::Machine& machine, const std::vector<Work>& works) {
    for (const Work& work : works) {
        for (const Plan& plan : work.plans) {
            if (plan.kernel->backend == Backend::reference) continue;
            const bool on_gpu = plan.kernel->backend == Backend::cuda;
            if (on_gpu == (machine.kind == model::MachineKind::gpu)) continue;
            throw UsageError("--device", fmt::format("expected a {} for {}, {} is a {}", on_gpu ? "GPU" : "CPU",
                                                     plan.kernel->name, machine.name, on_gpu ? "CPU" : "GPU"));
        }
    }
}

void execute(const BenchOptions& options, Session& session) {
    BenchRun run{.method = method_of(options)};
    expect_own_output(options.output, OutputKind::records);
    if (options.roofs && !options.device.empty())
        throw UsageError("--roofs", "expected without --device: it measures the machine that --device names");
    std::optional<model::Machine> machine;
    if (!options.device.empty()) machine = machine_of_option(options.device);  // an error must come before the work
    const std::vector<BenchSet> sets = sets_of(options);
    std::vector<Work> works;
    for (std::size_t i = 0; i < sets.size(); ++i) {
        works.push_back({sets[i], plans_of(options, sets[i], i)});
        if (works.back().plans.empty()) works.pop_back();
    }
    if (machine) expect_kind(*machine, works);
    drop_measured(options, run.host, works);
    if (!options.output.empty()) measure::append_records(options.output, {});  // an error must come before the work

    note_unknown_machine(options, run.host, works);
    note_oversubscription(run.host, works);
    if (!session.json && !session.csv) session.print(bench_method_text(run.host, run.method));
    if (options.roofs) machine = measured_machine();
    std::int64_t cases = 0;
    for (const Work& work : works) cases += static_cast<std::int64_t>(work.plans.size());
    std::vector<Record> records;
    Progress progress(cases);
    for (const Work& work : works)
        run_set(options, machine ? &*machine : nullptr, work, run, session, progress, records);
    note_noise(records);
    if (!session.json && !session.csv) return;
    Json document = Json::array();
    for (const Record& record : records) document.push_back(measure::to_json(record));
    if (session.csv) session.print_csv(document);
    else session.print_json(document);
}

}  // namespace

void add_bench_command(CLI::App& app, Session& session) {
    CLI::App* command = add_command(
        app, session, "bench",
        "Measure time and rate: median and interquartile range, caches cold, only visible pairs counted",
        {{"tessera bench --len 512,2048,8192 --causal bottom-right", "how time grows with the length"},
         {"tessera bench --schedule all --pass forward,backward --len 1024", "every schedule, both passes"},
         {"tessera bench --suite lengths -o results.jsonl --resume", "a whole suite, continued after an interruption"},
         {"tessera bench --heads 32/8 --head-dim 128 --dtype fp32,bf16 -o results.jsonl",
          "append records to a file, one JSON object per line"}});
    auto options = std::make_shared<BenchOptions>();
    options->set.shape.declare(*command, true);
    options->set.scores.declare(*command);
    options->set.how.declare(*command, true);
    const auto add_text = [&](const char* name, std::string& value, const char* type, const char* description) {
        return command->add_option(name, value, description)->type_name(type);
    };
    command->get_option("--dtype")->description(
        "fp32 (default), or bf16 (default with --backend cuda), fp16, fp64 (reference only); a list gives several "
        "problems");
    options->set.pass.declare(*command, "forward (default), backward or both, which is forward,backward",
                              "Short for --pass backward");
    add_text("--suite", options->suite, "NAME", "Cases of a suite, by name or from a file, instead of those options");
    command->add_flag("--list-suites", options->list_suites, "Show the suites that have names");
    add_text("--repeat", options->repeat, "N", "Measured calls per case; default 9");
    add_text("--warm-up", options->warm_up, "MS",
             "Warm-up calls, which are not counted: at least one, for this time; default 20");
    add_text("-o,--output", options->output, "FILE", "Append the records to this file, one line of JSON each");
    add_text(kDeviceOption, options->device, "NAME",
             "Machine to predict with: a file of tessera calibrate, or a name; default: this one, if it is known");
    command->add_flag("--roofs", options->roofs, "Measure the roofs of this CPU first, and predict and judge by them");
    command->add_flag("--resume", options->resume, "Skip cases that the output holds from this commit and device");
    add_csv_flag(*command, session);
    command->callback([options, command, &session] {
        if (options->list_suites) {
            expect_only(*command, "--list-suites", {});
            return print_suites(session);
        }
        if (command->count("--dtype") == 0 && options->set.how.backend == "cuda") options->set.shape.dtype = "bf16";
        if (!options->suite.empty())
            expect_only(*command, "--suite", {"--repeat", "--warm-up", "--output", "--device", "--roofs", "--resume"});
        execute(*options, session);
    });
}

}  // namespace tessera::cli
