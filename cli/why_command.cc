// SPDX-License-Identifier: Apache-2.0
//
// tessera why: which kernel would run a problem, and why no other.
#include <fmt/format.h>
#include <unistd.h>

#include <memory>

#include "commands.hpp"
#include "options.hpp"
#include "report.hpp"
#include "table.hpp"

namespace tessera::cli {
namespace {

struct WhyOptions {
    ShapeOptions shape;
    ScoreOptions scores;
    HowOptions how;
    bool backward = false;
};

void print_json(const Session& session, const Plan& plan) {
    Json refused = Json::array();
    for (const Refusal& r : plan.refused) {
        refused.push_back({{"kernel", r.kernel->name}, {"reason", r.reason}, {"capable", r.capable}});
    }
    session.print_json(Json{{"problem", json_of(plan.problem)}, {"chosen", json_of(plan)}, {"refused", refused}});
}

void print_text(const Session& session, const Plan& plan) {
    const int width = terminal_width(STDOUT_FILENO);
    const std::pair<std::string, std::string> runs_on =
        plan.device.type == DeviceType::cuda ? std::pair("device", fmt::format("CUDA device {}", plan.device.index))
                                             : std::pair("threads", fmt::format("{}", plan.threads));
    std::string text = facts_text({{"problem", plan.problem.describe()},
                                   {"pass", name_of(plan.pass)},
                                   {"chosen", fmt::format("{}: {}", plan.kernel->name, plan.kernel->summary)},
                                   {"target", plan.target},
                                   {"tile", fmt::format("{} queries x {} keys", plan.tile.block_q, plan.tile.block_kv)},
                                   runs_on,
                                   {"workspace", bytes_text(static_cast<double>(plan.workspace_bytes))}},
                                  width);
    Table table({{"not chosen"}, {"because"}});
    for (const Refusal& r : plan.refused) table.add({r.kernel->name, r.reason});
    session.print(text + "\n" + table.text(width));
}

void execute(const WhyOptions& options, const Session& session) {
    Problem problem = options.shape.problem(options.scores);
    const Plan plan = plan_with(
        problem, options.how.plan_options(options.backward ? Pass::backward : Pass::forward, options.how.schedule));
    if (session.json) print_json(session, plan);
    else print_text(session, plan);
}

}  // namespace

void add_why_command(CLI::App& app, Session& session) {
    CLI::App* command =
        add_command(app, session, "why", "Say which kernel would run a problem, and why no other; computes nothing",
                    {{"tessera why --len 4096 --heads 32/8 --head-dim 128 --causal bottom-right", "a causal prefill"},
                     {"tessera why --len-q 1 --len-kv 8192 --dtype bf16", "one query against a long cache"},
                     {"tessera why --ragged 100,37,1x512 --backward --schedule fa1",
                      "the backward of a ragged batch, by one schedule"}});
    auto options = std::make_shared<WhyOptions>();
    options->shape.declare(*command, false);
    options->scores.declare(*command);
    options->how.declare(*command, false);
    command->add_flag("--backward", options->backward, "The backward instead of the forward");
    command->callback([options, &session] { execute(*options, session); });
}

}  // namespace tessera::cli
