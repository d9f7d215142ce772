// SPDX-License-Identifier: Apache-2.0
//
// tessera plan --model: the kernel of each attention call of a whole model, by its config.json.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "measure/whole_model.hpp"
#include "parse.hpp"
#include "plan_model.hpp"
#include "plan_text.hpp"
#include "report.hpp"
#include "roofline_model_json.hpp"
#include "roofline_text.hpp"
#include "table.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

using measure::LayerGroup;
using measure::ModelConfig;

/// A pass of the layers of one group in one call of the model.
struct PlannedLayers {
    const char* call;
    const LayerGroup* group;
    Pass pass;
    Problem problem{};
    PlanOn plan{};
    std::string refusal{};  ///< why there is no plan

    const Candidate* chosen() const { return refusal.empty() ? plan.chosen() : nullptr; }
    /// Why no kernel runs it.
    std::string reasons() const {
        std::string text = refusal;
        for (const Candidate& one : plan.kernels)
            if (!one.reason.empty()) text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", one.kernel, one.reason);
        return text;
    }
};

std::vector<PlannedLayers> plan_layers(const ModelConfig& config, const model::Machine& machine, std::int64_t batch,
                                       std::int64_t len, DType dtype) {
    struct CallOfModel {
        const char* name;
        Pass pass;
        bool decode;
    };
    std::vector<CallOfModel> calls{{config.causal ? "prefill" : "forward", Pass::forward, false},
                                   {"training step", Pass::forward, false},
                                   {"training step", Pass::backward, false}};
    if (config.causal) calls.push_back({"decode", Pass::forward, true});
    std::vector<PlannedLayers> all;
    for (const CallOfModel& call : calls) {
        for (const LayerGroup& group : config.groups) {
            if (group.kind == LayerGroup::Kind::other || group.layers == 0) continue;
            PlannedLayers one{call.name, &group, call.pass};
            if (call.decode) one.refusal = measure::decode_refusal(config);
            one.problem = measure::layer_problem(config, group, batch, len, dtype, call.decode);
            if (one.refusal.empty()) one.plan = plan_on_with(machine, one.problem, {.pass = call.pass}, {});
            all.push_back(std::move(one));
        }
    }
    return all;
}

Json planned_json(const PlannedLayers& one) {
    Json entry{{"call", one.call},
               {"kind", kind_text(*one.group)},
               {"layers", one.group->layers},
               {"pass", name_of(one.pass)},
               {"problem", json_of(one.problem)}};
    const Candidate* chosen = one.chosen();
    if (chosen == nullptr) {
        entry["refusal"] = one.reasons();
        return entry;
    }
    entry["kernel"] = chosen->kernel;
    if (chosen->predicted) {
        entry["ms_of_layer"] = chosen->predicted->ms;
        entry["ms"] = chosen->predicted->ms * static_cast<double>(one.group->layers);
        entry["error"] = chosen->predicted->error;
        entry["not_modelled"] = chosen->predicted->not_modelled;
    }
    return entry;
}

std::string planned_text(const std::vector<PlannedLayers>& all, int width) {
    Table table({{"call"},
                 {"pass"},
                 {"layers"},
                 {"kernel"},
                 {"a layer", Align::right},
                 {"all layers", Align::right},
                 {"error", Align::right}});
    std::vector<std::pair<std::string, std::string>> reasons;
    for (const PlannedLayers& one : all) {
        const std::string layers = fmt::format("{} {}", one.group->layers, kind_text(*one.group));
        const Candidate* chosen = one.chosen();
        if (chosen == nullptr) {
            table.add({one.call, name_of(one.pass), layers, "none", "-", "-", "-"});
            reasons.emplace_back(fmt::format("{}, {}", one.call, kind_text(*one.group)), one.reasons());
            continue;
        }
        const auto& p = chosen->predicted;
        table.add({one.call, name_of(one.pass), layers, chosen->kernel, p ? milliseconds_text(p->ms) : "-",
                   p ? milliseconds_text(p->ms * static_cast<double>(one.group->layers)) : "-",
                   p ? fmt::format("+-{:.0f} %", 100 * p->error) : "-"});
        if (p && !p->not_modelled.empty()) reasons.emplace_back(chosen->kernel, "not modelled: " + p->not_modelled);
    }
    std::string text = table.text(width);
    if (!reasons.empty()) text += "\n" + facts_text(reasons, width);
    return text;
}

}  // namespace

void show_plan_of_model(const std::string& file, const model::Machine& machine, const ShapeOptions& shape,
                        bool dtype_given, const Session& session) {
    const ModelConfig config = measure::read_model_config(file);
    const std::int64_t batch = shape.batch.empty() ? 1 : parse_size("--batch", shape.batch);
    const std::int64_t len = shape.len.empty() ? 1024 : parse_size("--len", shape.len);
    constexpr std::int64_t kMostBatch = std::int64_t{1} << 20, kMostLen = std::int64_t{1} << 24;
    if (batch < 1 || batch > kMostBatch) unexpected("--batch", "1..2^20", shape.batch);
    if (len < 1 || len > kMostLen) unexpected("--len", "1..2^24", shape.len);
    DType dtype = machine.supports(DType::bf16) ? DType::bf16 : DType::fp16;
    if (machine.kind == model::MachineKind::cpu) dtype = DType::fp32;
    if (config.dtype && machine.supports(*config.dtype)) dtype = *config.dtype;
    if (dtype_given) dtype = parse_dtype(shape.dtype);
    const std::vector<PlannedLayers> all = plan_layers(config, machine, batch, len, dtype);
    if (all.empty()) throw Error(ErrorCode::unsupported, file, "the model has no layer of softmax attention");
    if (session.json || session.csv) {
        Json rows = Json::array();
        for (const PlannedLayers& one : all) rows.push_back(planned_json(one));
        if (session.csv) return session.print_csv(rows);
        return session.print_json(Json{{"device", machine.name},
                                       {"model", config_json(config)},
                                       {"batch", batch},
                                       {"len", len},
                                       {"dtype", name_of(dtype)},
                                       {"rows", rows}},
                                  "model");
    }
    const int width = terminal_width(STDOUT_FILENO);
    const std::vector<std::pair<std::string, std::string>> facts{
        {"on", fmt::format("{}: {}", machine.name, machine.title)},
        {"model", fmt::format("{}: {} layers, heads {}/{}, head_dim {}", config.name, config.layers, config.heads_q,
                              config.heads_kv, config.head_dim)},
        {"call", fmt::format("{}, batch {}, len {}", name_of(dtype), batch, count_text(len))}};
    session.print(facts_text(facts, width) + "\n" + planned_text(all, width));
}

}  // namespace tessera::cli
