// SPDX-License-Identifier: Apache-2.0
//
// tessera plan (or why): the kernel that would run a problem, its predicted cost, and why others do not run.
#include <fmt/format.h>
#include <unistd.h>

#include <memory>

#include "commands.hpp"
#include "device_option.hpp"
#include "options.hpp"
#include "plan_model.hpp"
#include "plan_text.hpp"
#include "report.hpp"
#include "roofline_text.hpp"
#include "table.hpp"

namespace tessera::cli {
namespace {

struct PlanCommandOptions {
    ShapeOptions shape;
    ScoreOptions scores;
    HowOptions how;
    PassOptions pass;
    std::string device;
    std::string model;
    bool dtype_given = false;
};

/// The Problem; without --dtype in the dtype of `machine`, or if that is null, of the backend.
Problem problem_of(const PlanCommandOptions& options, const model::Machine* machine) {
    ShapeOptions shape = options.shape;
    if (!options.dtype_given && machine != nullptr) shape.dtype = default_dtype(*machine);
    else if (!options.dtype_given && options.how.backend == "cuda") shape.dtype = "bf16";
    return shape.problem(options.scores);
}

/// Predictions for kernels on this machine, if the model knows it.
class Predictor {
 public:
    Predictor(const PlanCommandOptions& options, const Plan& plan)
        : sequences_(options.shape.sequences()), plan_(plan) {
        if (const model::Machine* known = model::machine_of_device(plan.target)) machine_ = *known;
    }

    const std::optional<model::Machine>& machine() const { return machine_; }

    /// Predicts this kernel for the plan's Problem; nothing if the machine is of another kind or unknown.
    std::optional<model::Prediction> operator()(const KernelInfo& kernel, std::optional<Tile> tile) const {
        if (!machine_ || kernel.pass != plan_.pass) return std::nullopt;
        const bool gpu = machine_->kind == model::MachineKind::gpu;
        if (kernel.backend != (gpu ? Backend::cuda : Backend::cpu)) return std::nullopt;
        model::PredictOptions options{.by = "tessera", .tile = tile, .sequences = sequences_};
        if (gpu) options.kernel = kernel.name;
        else options.threads = plan_.threads;
        if (model::refusal(plan_.problem, kernel.schedule, kernel.pass, *machine_, options)) return std::nullopt;
        return model::predict(plan_.problem, kernel.schedule, kernel.pass, *machine_, options);
    }

 private:
    std::vector<std::pair<std::int64_t, std::int64_t>> sequences_;
    const Plan& plan_;
    std::optional<model::Machine> machine_;
};

void print_json(const Session& session, const Plan& plan, const Predictor& predict) {
    Json chosen = json_of(plan);
    if (const auto p = predict(*plan.kernel, plan.tile)) chosen["predicted"] = json_of(*p);
    Json refused = Json::array();
    for (const Refusal& r : plan.refused) {
        Json entry{{"kernel", r.kernel->name}, {"reason", r.reason}, {"capable", r.capable}};
        if (r.capable) {
            if (const auto p = predict(*r.kernel, std::nullopt)) entry["predicted"] = json_of(*p);
        }
        refused.push_back(entry);
    }
    Json document{{"problem", json_of(plan.problem)}, {"chosen", chosen}, {"refused", refused}};
    if (predict.machine()) document["device"] = predict.machine()->name;
    if (session.csv) session.print_csv(plan_rows(document));
    else session.print_json(document);
}

void print_text(const Session& session, const Plan& plan, const Predictor& predict) {
    const int width = terminal_width(STDOUT_FILENO);
    const auto chosen = predict(*plan.kernel, plan.tile);
    std::vector<std::pair<std::string, std::string>> facts{
        {"problem", plan.problem.describe()},
        {"pass", name_of(plan.pass)},
        {"chosen", fmt::format("{}: {}", plan.kernel->name, plan.kernel->summary)},
        {"runs as", plan_text(plan)},
        {"cost", predict.machine() ? cost_text(chosen)
                                   : "not predicted: the model does not know this machine; --device names one"}};
    if (predict.machine())
        facts.emplace_back("on", fmt::format("{}: {}", predict.machine()->name, predict.machine()->title));
    if (chosen) add_cost_facts(*chosen, facts);
    Table table({{"not chosen"}, {"predicted", Align::right}, {"because"}});
    for (const Refusal& r : plan.refused) {
        if (r.kernel->pass != plan.pass) continue;
        const auto p = r.capable ? predict(*r.kernel, std::nullopt) : std::nullopt;
        table.add({r.kernel->name, p ? milliseconds_text(p->ms) : "-", r.reason});
    }
    session.print(facts_text(facts, width) + "\n" + table.text(width));
}

void execute(const PlanCommandOptions& options, const Session& session) {
    if (!options.model.empty()) {
        if (options.device.empty()) throw UsageError("--model", "expected --device with it: the machine to plan for");
        return show_plan_of_model(options.model, machine_of_option(options.device), options.shape, options.dtype_given,
                                  session);
    }
    const Pass pass = options.pass.one();
    if (!options.device.empty()) {
        const model::Machine machine = machine_of_option(options.device);
        expect_for_machine(options.how, machine);
        const Problem problem = problem_of(options, &machine);
        const PlanOn plan = plan_on_with(machine, problem, options.how.plan_options(pass, options.how.schedule),
                                         options.shape.sequences());
        return show_plan_on(machine, problem, pass, plan, session);
    }
    const Problem problem = problem_of(options, nullptr);
    const Plan plan = plan_with(problem, options.how.plan_options(pass, options.how.schedule));
    const Predictor predict(options, plan);
    if (session.json || session.csv) print_json(session, plan, predict);
    else print_text(session, plan, predict);
}

}  // namespace

void add_plan_command(CLI::App& app, Session& session) {
    CLI::App* command = add_command(
        app, session, "plan", "Say which kernel would run a problem, at what predicted cost, and why no other",
        {{"tessera plan --len 4096 --heads 32/8 --head-dim 128 --causal bottom-right --device xeon-16",
          "a causal prefill on a known host"},
         {"tessera plan --len 4096 --heads 32/8 --head-dim 128 --dtype bf16 --device h200",
          "which kernel a GPU would run that is not here"},
         {"tessera plan --model config.json --device h200 --batch 4 --len 8k", "the kernels of a whole model"},
         {"tessera plan --len-q 1 --len-kv 8192 --dtype bf16", "one query against a long cache"},
         {"tessera plan --ragged 100,37,1x512 --backward --schedule fa1",
          "the backward of a ragged batch, by one schedule"},
         {"tessera calibrate -o host.json && tessera plan --len 2048 --device host.json", "on this machine"}});
    command->alias("why");
    auto options = std::make_shared<PlanCommandOptions>();
    options->shape.declare(*command, false);
    options->scores.declare(*command);
    options->how.declare(*command, false);
    options->pass.declare(*command, "forward (default) or backward", "The backward instead of the forward");
    command
        ->add_option(kDeviceOption, options->device,
                     "Plan for another machine: a file of tessera calibrate, or one of " + machine_names())
        ->type_name("NAME");
    command
        ->add_option(
            "--model", options->model,
            "config.json of a model (Hugging Face), with --device: the kernels of its attention in a prefill, a "
            "training step and a decode step")
        ->type_name("FILE");
    add_csv_flag(*command, session);
    command->get_option("--dtype")->description(kDefaultDtype);
    command->callback([options, command, &session] {
        options->dtype_given = command->count("--dtype") > 0;
        if (!options->model.empty()) expect_only(*command, "--model", {"--device", "--batch", "--len", "--dtype"});
        execute(*options, session);
    });
}

}  // namespace tessera::cli
