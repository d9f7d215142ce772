// SPDX-License-Identifier: Apache-2.0
//
// tessera check: runs kernels on cases of the whole contract and compares every result with the fp64 reference.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "check/feature_cases.hpp"
#include "check/run_case.hpp"
#include "commands.hpp"
#include "device/device_copy.hpp"
#include "options.hpp"
#include "parse.hpp"
#include "progress.hpp"
#include "report.hpp"
#include "table.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

struct CheckOptions {
    std::string cases = "100";
    std::string seed = "1";
    std::string backend = "auto";
    std::string schedule = "all";
    PassOptions pass;
    std::string kernel;
    std::string only;     // --case
    bool shapes = false;  // --shapes
};

/// The largest error of one tensor, relative to its limit.
struct Worst {
    double used = -1;
    std::string rule;
    std::string case_id;
};

/// The results of one kernel on the cases.
struct Tally {
    const KernelInfo* kernel = nullptr;
    std::int64_t ran = 0;
    std::int64_t refused = 0;
    std::int64_t failed = 0;
    std::map<std::string, Worst> worst;  // by tensor
};

struct Failure {
    std::string command;
    std::string problem;
    std::string error;  // the exception instead of a result; empty if there is a report
    check::Report report;
};

struct CheckResult {
    std::vector<Tally> tallies;
    std::vector<Failure> failures;
    std::int64_t cases = 0;
};

/// All kernels, or those that `--backend`, `--schedule`, `--pass` and `--kernel` select.
std::vector<Tally> wanted_kernels(const CheckOptions& options) {
    const std::string& name = options.kernel;
    const auto backend = HowOptions{.backend = options.backend}.plan_options(Pass::forward, "auto").backend;
    if (backend == Backend::cuda && !device::cuda_available()) {
        throw Error(ErrorCode::device_unavailable, "--backend", "no CUDA device that this build can use");
    }
    const auto schedule = parse_schedule<std::optional<Schedule>>("--schedule", options.schedule, {{"all", {}}});
    const auto passes = options.pass.given() ? options.pass.list() : std::vector{Pass::forward, Pass::backward};
    std::vector<Tally> tallies;
    std::string known;
    for (const KernelInfo& kernel : kernels()) {
        if (backend && kernel.backend != *backend) continue;
        if (schedule && kernel.schedule != *schedule) continue;
        if (std::find(passes.begin(), passes.end(), kernel.pass) == passes.end()) continue;
        known += (known.empty() ? "" : ", ") + kernel.name;
        if (name.empty() || kernel.name == name) tallies.push_back({.kernel = &kernel});
    }
    if (known.empty())
        throw Error(ErrorCode::unsupported, "--schedule",
                    fmt::format("this build has no {}kernel of schedule {} (tessera list shows those it has)",
                                backend ? options.backend + " " : "", options.schedule));
    if (tallies.empty()) unexpected("--kernel", "one of " + known, name);
    const bool all_cuda = std::all_of(tallies.begin(), tallies.end(),
                                      [](const Tally& tally) { return tally.kernel->backend == Backend::cuda; });
    if (all_cuda && !device::cuda_available())
        throw Error(ErrorCode::device_unavailable, name.empty() ? "--schedule" : "--kernel",
                    "no CUDA device that this build can use");
    return tallies;
}

/// The cases to run: named cases, then random ones, which are generated one by one, then cases for some kernels only.
struct Selection {
    std::vector<check::Case> named;
    std::int64_t random = 0;
    std::vector<check::SelectedCase> chosen{};

    std::int64_t size() const { return static_cast<std::int64_t>(named.size()) + random; }
    check::Case at(std::int64_t index, std::uint64_t seed) const {
        const auto names = static_cast<std::int64_t>(named.size());
        if (index < names) return named[static_cast<std::size_t>(index)];
        return check::random_case(seed, static_cast<std::uint64_t>(index - names));
    }
};

/// The corner cases, the `--cases` random ones and those of `--shapes`, or the single one of `--case`.
Selection wanted_cases(const CheckOptions& options, std::uint64_t seed, const std::vector<Tally>& tallies) {
    const std::int64_t count = parse_size("--cases", options.cases);
    if (options.only.empty()) {
        Selection all{check::corner_cases(), count};
        std::vector<const KernelInfo*> wanted;
        for (const Tally& tally : tallies) wanted.push_back(tally.kernel);
        if (options.shapes) all.chosen = check::select_feature_cases(seed, wanted);
        return all;
    }
    auto found = check::find_case(seed, options.only);
    if (found) return {{std::move(*found)}, 0};
    std::string names;
    for (const check::Case& c : check::corner_cases()) names += ", " + c.id;
    names += fmt::format(", or one of --shapes, like {}", check::feature_cases(seed).front().which.id);
    unexpected("--case", "a number" + names, options.only);
}

void note_worst(Tally& tally, const check::Report& report, const std::string& case_id) {
    for (const check::TensorReport& t : report.tensors) {
        Worst& worst = tally.worst[t.name];
        if (t.used() > worst.used) worst = {t.used(), t.rule, case_id};
    }
}

/// Runs one case on one kernel. An exception fails the case, but does not end the run.
void run_one(check::CaseRunner& runner, const check::Case& which, Tally& tally, std::vector<Failure>& failures) {
    Failure failure{check::to_command(which, tally.kernel->name), which.describe(), {}, {}};
    try {
        check::Outcome outcome = runner.run(*tally.kernel);
        if (outcome.refusal) {
            ++tally.refused;
            if (outcome.may_refuse) return;
            failure.error = "refused a problem that it must take: " + *outcome.refusal;
        } else {
            ++tally.ran;
            note_worst(tally, outcome.report, which.id);
            if (outcome.pass()) return;
            failure.report = std::move(outcome.report);
        }
    } catch (const Error& error) {
        if (error.code() == ErrorCode::out_of_memory) throw;
        failure.error = error.what();
    }
    ++tally.failed;
    failures.push_back(std::move(failure));
}

CheckResult run_all(const CheckOptions& options) {
    const std::uint64_t seed = parse_seed("--seed", options.seed);
    CheckResult result{.tallies = wanted_kernels(options)};
    const Selection cases = wanted_cases(options, seed, result.tallies);
    result.cases = cases.size() + static_cast<std::int64_t>(cases.chosen.size());
    Progress progress(result.cases);
    for (std::int64_t i = 0; i < cases.size(); ++i) {
        const check::Case which = cases.at(i, seed);
        progress.step(fmt::format("case {}: {}", which.id, which.problem.describe()));
        check::CaseRunner runner(which);
        for (Tally& tally : result.tallies) run_one(runner, which, tally, result.failures);
    }
    for (const check::SelectedCase& chosen : cases.chosen) {
        const check::Case& which = chosen.item.which;
        progress.step(fmt::format("case {}: {}", which.id, which.problem.describe()));
        check::CaseRunner runner(which);
        for (Tally& tally : result.tallies) {
            const auto& of = chosen.kernels;
            if (std::find(of.begin(), of.end(), tally.kernel) == of.end()) continue;
            run_one(runner, which, tally, result.failures);
        }
    }
    return result;
}

bool ran_any(const CheckResult& result) {
    return std::any_of(result.tallies.begin(), result.tallies.end(), [](const Tally& t) { return t.ran > 0; });
}

void print_json(const Session& session, const CheckOptions& options, const CheckResult& result) {
    Json rows = Json::array();
    for (const Tally& tally : result.tallies) {
        Json tensors = Json::object();
        for (const auto& [name, worst] : tally.worst) {
            tensors[name] = {{"share_of_limit", worst.used}, {"rule", worst.rule}, {"case", worst.case_id}};
        }
        rows.push_back({{"kernel", tally.kernel->name},
                        {"ran", tally.ran},
                        {"refused", tally.refused},
                        {"failed", tally.failed},
                        {"worst", tensors}});
    }
    Json failures = Json::array();
    for (const Failure& f : result.failures) {
        Json row = {{"command", f.command}, {"problem", f.problem}};
        if (f.error.empty()) row["report"] = json_of(f.report);
        else row["error"] = f.error;
        failures.push_back(row);
    }
    if (session.csv) return session.print_csv(rows);
    session.print_json(Json{{"pass", result.failures.empty() && ran_any(result)},
                            {"seed", parse_seed("--seed", options.seed)},
                            {"cases", result.cases},
                            {"kernels", rows},
                            {"failures", failures}});
}

std::string worst_text(const Tally& tally) {
    std::string text;
    for (const auto& [name, worst] : tally.worst) {
        text += fmt::format("{}{} {:.0f}%", text.empty() ? "" : ", ", name, std::min(worst.used, 9.99) * 100);
    }
    return text.empty() ? "-" : text;
}

void print_failures(const Session& session, const std::vector<Failure>& failures, int width) {
    constexpr std::size_t kShown = 5;
    for (std::size_t i = 0; i < std::min(kShown, failures.size()); ++i) {
        const Failure& f = failures[i];
        const std::string what = f.error.empty() ? report_text(f.report, width) : f.error + "\n";
        session.print(fmt::format("\n{}\n    {}\n{}", f.command, f.problem, what));
    }
    if (failures.size() > kShown) session.print(fmt::format("\nand {} more, by:\n", failures.size() - kShown));
    for (std::size_t i = kShown; i < failures.size(); ++i) session.print(failures[i].command + "\n");
}

std::string verdict_of(const CheckResult& result) {
    if (!result.failures.empty()) return fmt::format("FAIL: {} of the runs above", result.failures.size());
    const std::string cases = fmt::format("{} case{}", result.cases, result.cases == 1 ? "" : "s");
    return ran_any(result) ? "ok: " + cases : "FAIL: nothing ran, every kernel refused all of " + cases;
}

void print_text(const Session& session, const CheckResult& result) {
    const int width = terminal_width(STDOUT_FILENO);
    Table table({{"kernel"},
                 {"ran", Align::right},
                 {"refused", Align::right},
                 {"failed", Align::right},
                 {"largest error, in percent of its limit"}});
    for (const Tally& tally : result.tallies) {
        table.add({tally.kernel->name, std::to_string(tally.ran), std::to_string(tally.refused),
                   std::to_string(tally.failed), worst_text(tally)});
    }
    session.print(table.text(width));
    print_failures(session, result.failures, width);
    session.print("\n" + verdict_of(result) + "\n");
}

void execute(const CheckOptions& options, Session& session) {
    const CheckResult result = run_all(options);
    if (session.json || session.csv) print_json(session, options, result);
    else print_text(session, result);
    if (!result.failures.empty() || !ran_any(result)) session.exit_code = kCheckFailed;
}

}  // namespace

void add_check_command(CLI::App& app, Session& session) {
    CLI::App* command = add_command(
        app, session, "check", "Run kernels on cases of the whole contract and compare with the fp64 reference",
        {{"tessera check", "every kernel on the corner cases and 100 random ones"},
         {"tessera check --cases 10000 --seed 7 --kernel cpu.fa2.backward", "one kernel, for longer"},
         {"tessera check --schedule fa1 --backward", "the backwards of one schedule"},
         {"tessera check --shapes --cases 0", "every compiled shape of every kernel, with every feature that it takes"},
         {"tessera check --case causal_square", "one case by its name"},
         {"tessera check --kernel cpu.fa2.forward --seed 7 --case 1234", "a random case again, by its number"}});
    auto options = std::make_shared<CheckOptions>();
    command->add_option("--cases", options->cases, "Random cases besides the corner cases; default 100")
        ->type_name("N");
    command->add_option("--seed", options->seed, "Seed of the random cases; default 1")->type_name("N");
    command
        ->add_option("--backend", options->backend, "Only kernels of this backend: cpu, cuda or reference; default all")
        ->type_name("NAME");
    command
        ->add_option("--schedule", options->schedule,
                     "Only kernels of this schedule: " + schedule_names() + "; default all")
        ->type_name("NAME");
    options->pass.declare(*command, "Only kernels of this pass: forward or backward; default both",
                          "Short for --pass backward");
    command->add_option("--kernel", options->kernel, "Only this kernel, by its name in tessera list; default all")
        ->type_name("NAME");
    command
        ->add_option("--case", options->only,
                     "Only this case: the number of a random case, or the name of a corner case or of one of --shapes")
        ->type_name("ID");
    command->add_flag("--shapes", options->shapes,
                      "Add cases for every compiled shape of the kernels with every feature and dtype that it takes");
    add_csv_flag(*command, session);
    command->callback([options, command, &session] {
        if (!options->only.empty())
            expect_only(*command, "--case", {"--seed", "--backend", "--schedule", "--pass", "--backward", "--kernel"});
        else if (options->cases == "0" && !options->shapes && command->count("--seed") > 0)
            throw UsageError("--seed", "has no effect with --cases 0; leave it out");
        execute(*options, session);
    });
}

}  // namespace tessera::cli
