// SPDX-License-Identifier: Apache-2.0
#include "plan_text.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include "measure/accuracy.hpp"
#include "parse.hpp"
#include "report.hpp"
#include "roofline_text.hpp"
#include "table.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {

std::string cost_text(const std::optional<model::Prediction>& p) {
    if (!p) return "-";
    std::string text = fmt::format("{}, {:.4g} TFLOP/s, bound by {} ({:.0f} % of it)", milliseconds_text(p->ms),
                                   p->tflops, p->bound, p->percent_of_bound);
    if (!p->not_modelled.empty()) text += "; not modelled: " + p->not_modelled;
    return text;
}

void add_cost_facts(const model::Prediction& p, std::vector<std::pair<std::string, std::string>>& facts) {
    facts.emplace_back(
        "moves", fmt::format("{} of DRAM, {} through the L2", bytes_text(static_cast<double>(p.cost.work.bytes.dram)),
                             bytes_text(static_cast<double>(p.cost.work.bytes.l2))));
    facts.emplace_back("tiles", fmt::format("{} full, {} partial, {} skipped", count_text(p.cost.full),
                                            count_text(p.cost.partial), count_text(p.cost.skipped)));
    facts.emplace_back("memory", bytes_text(static_cast<double>(p.memory.total())));
}

void expect_for_machine(const HowOptions& how, const model::Machine& machine) {
    const bool gpu = machine.kind == model::MachineKind::gpu;
    const char* own = gpu ? "cuda" : "cpu";
    if (how.backend != "auto" && how.backend != own)
        unexpected("--backend", fmt::format("auto or {}: {} is a {}", own, machine.name, gpu ? "GPU" : "CPU"),
                   how.backend);
    if (how.threads.empty()) return;
    if (gpu) throw UsageError("--threads", fmt::format("expected a CPU as --device, {} is a GPU", machine.name));
    const auto most = static_cast<std::int64_t>(machine.cores.value);
    if (parse_size("--threads", how.threads) > most)
        unexpected("--threads", fmt::format("1..{}, the cores of {}", most, machine.name), how.threads);
}

namespace {

void print_json(const model::Machine& machine, const Problem& problem, Pass pass, const PlanOn& plan,
                const Session& session) {
    Json chosen, refused = Json::array();
    for (const Candidate& c : plan.kernels) {
        Json entry{{"kernel", c.kernel}, {"schedule", name_of(c.schedule)}, {"pass", name_of(pass)}};
        if (c.capable) {
            entry["block_q"] = c.tile.block_q;
            entry["block_kv"] = c.tile.block_kv;
            entry["workspace_bytes"] = c.workspace_bytes;
        }
        if (plan.threads > 0) entry["threads"] = plan.threads;
        if (c.predicted) entry["predicted"] = json_of(*c.predicted);
        if (c.reason.empty()) {
            chosen = entry;
            continue;
        }
        entry["reason"] = c.reason;
        entry["capable"] = c.capable;
        refused.push_back(entry);
    }
    const Json document{
        {"problem", json_of(problem)}, {"chosen", chosen}, {"refused", refused}, {"device", machine.name}};
    if (session.csv) session.print_csv(plan_rows(document));
    else session.print_json(document);
}

}  // namespace

Json plan_rows(const Json& document) {
    Json rows = Json::array();
    const auto add = [&](const Json& entry, bool chosen) {
        Json row{{"kernel", entry.at("kernel")}, {"chosen", chosen}};
        if (entry.contains("predicted")) {
            row["ms"] = entry.at("predicted").at("ms");
            row["error"] = entry.at("predicted").at("error");
        }
        if (entry.contains("reason")) row["reason"] = entry.at("reason");
        rows.push_back(row);
    };
    add(document.at("chosen"), true);
    for (const Json& entry : document.at("refused")) add(entry, false);
    return rows;
}

void show_plan_on(const model::Machine& machine, const Problem& problem, Pass pass, const PlanOn& plan,
                  const Session& session) {
    const Candidate* chosen = plan.chosen();
    if (chosen == nullptr) {
        std::string reasons;
        for (const Candidate& c : plan.kernels) reasons += fmt::format("\n  {}: {}", c.kernel, c.reason);
        throw Error(ErrorCode::unsupported, "",
                    fmt::format("no kernel takes this {} ({}) on {}:{}", name_of(pass), problem.describe(),
                                machine.name, reasons));
    }
    if (session.json || session.csv) return print_json(machine, problem, pass, plan, session);
    const int width = terminal_width(STDOUT_FILENO);
    std::string runs = fmt::format("tile {} x {}, workspace {}", chosen->tile.block_q, chosen->tile.block_kv,
                                   bytes_text(static_cast<double>(chosen->workspace_bytes)));
    if (plan.threads > 0) runs += fmt::format(", {} thread{}", plan.threads, plan.threads == 1 ? "" : "s");
    std::vector<std::pair<std::string, std::string>> facts{
        {"problem", problem.describe()},
        {"pass", name_of(pass)},
        {"on", fmt::format("{}: {}", machine.name, machine.title)},
        {"chosen", chosen->kernel},
        {"runs as", runs},
        {"cost", chosen->predicted ? cost_text(chosen->predicted)
                                   : "not predicted: the model has no constants of this kernel"}};
    if (chosen->predicted) {
        const bool fitted = !chosen->predicted->fitted_on.empty();
        facts.emplace_back("error", fitted ? measure::error_bar_text(problem, *chosen->predicted, machine)
                                           : "not known: the constants are those of a related kernel");
    }
    if (chosen->predicted) add_cost_facts(*chosen->predicted, facts);
    Table table({{"not chosen"}, {"predicted", Align::right}, {"because"}});
    for (const Candidate& c : plan.kernels) {
        if (c.reason.empty()) continue;
        table.add({c.kernel, c.capable && c.predicted ? milliseconds_text(c.predicted->ms) : "-", c.reason});
    }
    session.print(facts_text(facts, width) + "\n" + table.text(width));
}

}  // namespace tessera::cli
