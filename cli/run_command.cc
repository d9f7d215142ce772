// SPDX-License-Identifier: Apache-2.0
//
// tessera run: computes attention of the tensors in files.
#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <memory>

#include "check/compare.hpp"
#include "commands.hpp"
#include "commit.hpp"
#include "core/arguments.hpp"
#include "device/device_copy.hpp"
#include "inputs.hpp"
#include "io/memory.hpp"
#include "io/safetensors.hpp"
#include "measure/record.hpp"
#include "measure/timer.hpp"
#include "measure/work.hpp"
#include "outputs.hpp"
#include "parse.hpp"
#include "progress.hpp"
#include "report.hpp"
#include "table.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

struct RunOptions {
    InputOptions inputs;
    ScoreOptions scores;
    HowOptions how;
    PassOptions pass;
    bool backward = false;  // set from `pass`
    bool check = false;
    std::string output;
};

/// One pass: its plan, its time, and its comparison.
struct PassResult {
    Plan plan;
    double ms = 0;
    double gflops = 0;
    TileCounters tiles;
    std::optional<check::Report> report;
};

/// The results, in the shapes of the output file.
struct Outputs {
    OwnedTensor o, lse, dq, dk, dv, dsinks;
    OwnedTensor o_residual;  ///< for the backward, if both kernels support it
    std::vector<std::pair<std::string, TensorView>> named;
};

struct Run {
    const RunOptions& options;
    Inputs inputs;
    Outputs outputs;
    PassResult forward;
    PassResult backward;
};

void set_problem(Run& run) {
    validate_problem_of(run.inputs);
    run.options.scores.apply(run.inputs.problem);
    validate_options(run.inputs.problem);
}

OwnedTensor make_like(const Run& run, const char* name, const TensorView& canonical, std::int64_t dim, DType dtype) {
    std::vector<std::int64_t> shape(canonical.shape.begin(), canonical.shape.begin() + canonical.rank);
    shape.back() = dim;
    return make_tensor(name, dtype, run.inputs.layout.in_file(shape));
}

void make_outputs(Run& run) {
    const Problem& p = run.inputs.problem;
    Outputs& out = run.outputs;
    out.o = make_like(run, "o", run.inputs.tensors.q, p.head_dim_v, p.dtype);
    out.lse = make_tensor("lse", DType::fp32, run.inputs.layout.lse_in_file(p));
    out.named = {{"o", out.o.view}, {"lse", out.lse.view}};
    if (!run.options.backward) return;
    out.dq = make_like(run, "dq", run.inputs.tensors.q, p.head_dim, p.dtype);
    out.dk = make_like(run, "dk", run.inputs.tensors.k, p.head_dim, p.dtype);
    out.dv = make_like(run, "dv", run.inputs.tensors.v, p.head_dim_v, p.dtype);
    if (run.forward.plan.o_residual && run.backward.plan.o_residual) {
        out.o_residual = make_like(run, "o_residual", run.inputs.tensors.q, p.head_dim_v, DType::int8);
    }
    out.named.insert(out.named.end(), {{"dq", out.dq.view}, {"dk", out.dk.view}, {"dv", out.dv.view}});
    if (!p.sinks) return;
    out.dsinks = make_tensor("dsinks", DType::fp32, std::vector<std::int64_t>{p.heads_q});
    out.named.emplace_back("dsinks", out.dsinks.view);
}

ForwardArgs forward_args(const Run& run) {
    const FileLayout& layout = run.inputs.layout;
    ForwardArgs args = run.inputs.forward_args();
    args.o = layout.canonical(run.outputs.o.view);
    args.lse = layout.canonical_lse(run.outputs.lse.view);
    args.o_residual = layout.canonical(run.outputs.o_residual.view);
    return args;
}

BackwardArgs backward_args(const Run& run) {
    const auto canonical = [&](const OwnedTensor& t) { return run.inputs.layout.canonical(t.view); };
    BackwardArgs args = run.inputs.tensors;
    args.o = canonical(run.outputs.o);
    args.lse = run.inputs.layout.canonical_lse(run.outputs.lse.view);
    args.o_residual = canonical(run.outputs.o_residual);
    args.dq = canonical(run.outputs.dq);
    args.dk = canonical(run.outputs.dk);
    args.dv = canonical(run.outputs.dv);
    args.dsinks = run.outputs.dsinks.view;
    return args;
}

/// Times call(tensors, workspace, how) on tensors that are placed on the plan's device; copies are not timed.
template <class Args, class Call>
void time_pass(const Run& run, PassResult& result, const Args& args, Progress& progress, const Call& call) {
    progress.step(fmt::format("{} with {}", name_of(result.plan.pass), result.plan.kernel->name));
    expect_workspace(result.plan);
    const Execution how{.parallel_for = progress.counted_parallel_for(), .counters = &result.tiles};
    try {
        device::run_on_host_tensors(result.plan, args, [&](const Args& placed, std::span<std::byte> workspace) {
            const measure::Timer timer;
            call(placed, workspace, how);
            device::synchronize(result.plan.device);
            result.ms = timer.milliseconds();
        });
    } catch (const Error& error) {
        rethrow_for_files(error, run.inputs);
    }
    const auto pairs = measure::visible_pairs(run.inputs.problem, run.inputs.forward_args());
    result.gflops = measure::gflops(measure::flop(run.inputs.problem, result.plan.pass, pairs), result.ms);
}

void compute(Run& run, Progress& progress) {
    const RunOptions& options = run.options;
    run.forward.plan = plan_with(run.inputs.problem, options.how.plan_options(Pass::forward, options.how.schedule));
    if (options.backward) {
        run.backward.plan =
            plan_with(run.inputs.problem, options.how.plan_options(Pass::backward, options.how.schedule));
    }
    make_outputs(run);
    time_pass(run, run.forward, forward_args(run), progress,
              [&](const ForwardArgs& args, std::span<std::byte> workspace, const Execution& how) {
                  forward(run.forward.plan, args, workspace, how);
              });
    if (!options.backward) return;
    time_pass(run, run.backward, backward_args(run), progress,
              [&](const BackwardArgs& args, std::span<std::byte> workspace, const Execution& how) {
                  backward(run.backward.plan, args, workspace, how);
              });
}

/// The memory of the reference: every tensor of both passes in fp64, and what compare.hpp needs for each result.
std::uint64_t bytes_to_check(const Run& run) {
    const TensorView &q = run.inputs.tensors.q, &k = run.inputs.tensors.k, &v = run.inputs.tensors.v,
                     &o = run.outputs.o.view;
    constexpr std::int64_t kOfResult = 5 * 8;
    const std::int64_t inputs = 8 * (q.size() + k.size() + v.size());
    if (!run.options.backward) return static_cast<std::uint64_t>(inputs + kOfResult * o.size());
    const std::int64_t gradients = kOfResult * (q.size() + k.size() + v.size());
    return static_cast<std::uint64_t>(inputs + 2 * 8 * o.size() + gradients);
}

void compare(Run& run, Progress& progress) {
    io::expect_memory(bytes_to_check(run), "the fp64 reference");
    progress.step("checking the forward against fp64");
    run.forward.report = check::check_forward(run.inputs.problem, forward_args(run));
    if (!run.options.backward) return;
    progress.step("checking the backward against fp64");
    run.backward.report = check::check_backward(run.inputs.problem, backward_args(run));
}

/// The metadata of the output: the input's own, and how the results were computed.
std::map<std::string, std::string> metadata_of(const Run& run) {
    const Problem& p = run.inputs.problem;
    std::map<std::string, std::string> metadata = run.inputs.metadata;
    metadata["tessera.version"] = TESSERA_VERSION;
    metadata["tessera.commit"] = TESSERA_COMMIT;
    metadata["tessera.problem"] = p.describe();
    metadata["tessera.mask"] = measure::mask_text(p.mask);
    metadata["tessera.scale"] = fmt::format("{}", p.effective_scale());
    metadata["tessera.layout"] = name_of(run.inputs.layout.layout);
    metadata["tessera.forward"] = run.forward.plan.kernel->name;
    if (run.options.backward) metadata["tessera.backward"] = run.backward.plan.kernel->name;
    return metadata;
}

std::string written_text(const Run& run) {
    std::string names;
    double bytes = 0;
    for (const auto& [name, view] : run.outputs.named) {
        names += (names.empty() ? "" : ", ") + name;
        bytes += static_cast<double>(view.size() * size_of(view.dtype));
    }
    return fmt::format("{} ({}; {})", run.options.output, names, bytes_text(bytes));
}

std::vector<std::pair<std::string, std::string>> pass_facts(const PassResult& result) {
    std::vector<std::pair<std::string, std::string>> facts = {{name_of(result.plan.pass), plan_text(result.plan)}};
    facts.emplace_back("", fmt::format("{}, {:.4g} GFLOP/s", milliseconds_text(result.ms), result.gflops));
    const std::int64_t tiles = result.tiles.full + result.tiles.partial + result.tiles.skipped;
    if (tiles > 0) {
        facts.emplace_back("", fmt::format("tiles: {} full, {} partial, {} skipped", count_text(result.tiles.full),
                                           count_text(result.tiles.partial), count_text(result.tiles.skipped)));
    }
    return facts;
}

/// Describes outputs with NaN: "all 128 elements of o". The check passes if the reference has NaN there too.
std::string nan_text(const Run& run) {
    std::string text;
    for (const auto& [name, view] : run.outputs.named) {
        const std::int64_t count = count_nan(view);
        if (count == 0) continue;
        const std::string elements = count == view.size()
                                         ? fmt::format("all {} elements", count_text(count))
                                         : fmt::format("{} of {} elements", count_text(count), count_text(view.size()));
        text += fmt::format("{}{} of {}", text.empty() ? "" : ", ", elements, name);
    }
    return text;
}

std::string run_text(const Run& run) {
    const int width = terminal_width(STDOUT_FILENO);
    std::vector<std::pair<std::string, std::string>> facts = {
        {"input", fmt::format("{} ({})", run.inputs.origin(), name_of(run.inputs.layout.layout))},
        {"problem", run.inputs.problem.describe()}};
    for (const PassResult* result : {&run.forward, &run.backward}) {
        if (result->plan.kernel == nullptr) continue;
        for (auto& fact : pass_facts(*result)) facts.push_back(std::move(fact));
    }
    if (!run.options.output.empty()) facts.emplace_back("written", written_text(run));
    if (const std::string nan = nan_text(run); !nan.empty()) facts.emplace_back("NaN", nan);
    std::string text = facts_text(facts, width);
    if (run.forward.report) {
        check::Report both = *run.forward.report;
        if (run.backward.report)
            both.tensors.insert(both.tensors.end(), run.backward.report->tensors.begin(),
                                run.backward.report->tensors.end());
        text += fmt::format("\nAgainst the fp64 reference: {}\n{}",
                            both.pass() ? "within the contract" : "OUTSIDE the contract", report_text(both, width));
    }
    return text;
}

Json pass_json(const PassResult& result) {
    Json json = {{"plan", json_of(result.plan)},
                 {"ms", result.ms},
                 {"gflops", result.gflops},
                 {"tiles",
                  {{"full", result.tiles.full.load()},
                   {"partial", result.tiles.partial.load()},
                   {"skipped", result.tiles.skipped.load()}}}};
    if (result.report) json["check"] = json_of(*result.report);
    return json;
}

Json run_json(const Run& run) {
    Json json = {{"input", run.options.inputs.files},
                 {"layout", run.options.inputs.layout},
                 {"problem", json_of(run.inputs.problem)},
                 {"forward", pass_json(run.forward)}};
    if (run.options.backward) json["backward"] = pass_json(run.backward);
    if (!run.options.output.empty()) json["output"] = run.options.output;
    Json nan = Json::object();
    for (const auto& [name, view] : run.outputs.named) {
        if (const std::int64_t count = count_nan(view); count > 0) nan[name] = count;
    }
    if (!nan.empty()) json["nan"] = nan;
    return json;
}

/// Validates every option before a file is read.
void validate_all_options(const RunOptions& options) {
    Problem problem;
    options.scores.apply(problem);
    validate_options(problem);
    options.how.plan_options(Pass::forward, options.how.schedule);
}

/// Throws before the work if the result could not be written after it.
void expect_writable(const RunOptions& options) {
    if (options.output.empty()) return;
    if (!options.output.ends_with(".safetensors"))
        unexpected("--output", "a name that ends in .safetensors", options.output);
    expect_other_file(options.output, options.inputs.files);
    expect_own_output(options.output, OutputKind::tensors);
    const auto folder = std::filesystem::path(options.output).parent_path();
    if (::access(folder.empty() ? "." : folder.c_str(), W_OK | X_OK) != 0) {
        throw Error(ErrorCode::cannot_write, options.output,
                    fmt::format("cannot write into its folder: {}", std::strerror(errno)));
    }
}

void execute(const RunOptions& options, Session& session) {
    const int steps = 1 + (options.backward ? 2 : 1) * (options.check ? 2 : 1) + (options.output.empty() ? 0 : 1);
    Run run{.options = options};
    {
        Progress progress(steps);
        validate_all_options(options);
        expect_writable(options);
        progress.step("reading");
        run.inputs = read_inputs(options.inputs, options.backward);
        set_problem(run);
        compute(run, progress);
        if (options.check) compare(run, progress);
        if (!options.output.empty()) {
            progress.step("writing " + options.output);
            io::write_safetensors(options.output, run.outputs.named, metadata_of(run));
        }
    }
    for (const auto* report : {&run.forward.report, &run.backward.report}) {
        if (*report && !(*report)->pass()) session.exit_code = kCheckFailed;
    }
    if (session.json) session.print_json(run_json(run));
    else session.print(run_text(run));
}

}  // namespace

void add_run_command(CLI::App& app, Session& session) {
    CLI::App* command = add_command(
        app, session, "run",
        "Compute attention of tensors in files; say which kernel ran, how fast and, with --check, how exactly",
        {{"tessera run qkv.safetensors --causal bottom-right -o out.safetensors",
          "o and lse of the tensors q, k and v"},
         {"tessera run q.npy k.npy v.npy do.npy --backward -o grads.safetensors", "gradients too, from .npy files"},
         {"tessera run layer.safetensors --layout bhsd --schedule fa1 --check",
          "one schedule, compared with the fp64 reference"}});
    auto options = std::make_shared<RunOptions>();
    options->inputs.declare(*command);
    options->scores.declare(*command);
    options->how.declare(*command, false);
    options->pass.declare(*command, "forward (default); backward or both: compute dq, dk and dv too",
                          "Compute dq, dk and dv too");
    command->add_flag("--check", options->check, "Compare with the fp64 reference; exit code 1 outside the contract");
    command->add_option("-o,--output", options->output, "Write o, lse (and dq, dk, dv) there, in the input's layout")
        ->type_name("FILE");
    command->callback([options, &session] {
        options->backward = options->pass.list().back() == Pass::backward;
        execute(*options, session);
    });
}

}  // namespace tessera::cli
