// SPDX-License-Identifier: Apache-2.0
#include "roofline_model_json.hpp"

#include "roofline_questions.hpp"
#include "table.hpp"

namespace tessera::cli {
namespace {

Json group_json(const measure::GroupCost& group) {
    Json entry{{"kind", kind_text(group.group)}, {"layers", group.group.layers}};
    const measure::SweepCell* best = group.best();
    if (best == nullptr) {
        entry["refusal"] = group.refusal();
        return entry;
    }
    entry["schedule"] = name_of(best->schedule);
    entry["by"] = best->longest().by;
    entry["ms_of_layer"] = best->ms();
    entry["ms"] = best->ms() * static_cast<double>(group.group.layers);
    entry["error"] = error_of(*best);
    entry["tflops"] = best->tflops();
    entry["gbs"] = gigabytes_per_second(*best);
    entry["bound"] = best->longest().bound;
    entry["not_modelled"] = group.not_modelled();
    return entry;
}

Json call_json(const measure::CallCost& call) {
    Json entry{{"call", call.call}};
    if (!call.refusal.empty()) entry["refusal"] = call.refusal;
    if (call.known()) entry["ms"] = call.ms();
    entry["layers"] = Json::array();
    for (const measure::GroupCost& group : call.groups) entry["layers"].push_back(group_json(group));
    if (call.known()) {
        entry["attention_flop"] = call.attention_flop;
        entry["other_flop"] = call.other_flop;
        entry["share_of_flop"] = call.attention_flop / (call.attention_flop + call.other_flop);
    }
    if (call.cache_bytes > 0) {
        entry["cache_bytes"] = call.cache_bytes;
        entry["weight_bytes"] = call.weight_bytes;
        entry["share_of_bytes"] = call.cache_bytes / (call.cache_bytes + call.weight_bytes);
    }
    return entry;
}

}  // namespace

std::string kind_text(const measure::LayerGroup& group) {
    switch (group.kind) {
        case measure::LayerGroup::Kind::full: return "full";
        case measure::LayerGroup::Kind::sliding: return "window " + count_text(group.width);
        case measure::LayerGroup::Kind::chunked: return "chunks of " + count_text(group.width);
        case measure::LayerGroup::Kind::other: return "without softmax attention";
    }
    return "";
}

std::optional<bool> fits_memory(const measure::ModelCost& cost, const model::Machine& machine) {
    if (!cost.weights_known) return std::nullopt;
    return cost.weight_bytes + cost.cache_bytes <= machine.memory_gib * kBytesOfGib;
}

Json config_json(const measure::ModelConfig& config) {
    Json groups = Json::array();
    for (const measure::LayerGroup& group : config.groups)
        groups.push_back({{"kind", kind_text(group)}, {"layers", group.layers}});
    return {{"name", config.name},
            {"layers", config.layers},
            {"groups", groups},
            {"heads_q", config.heads_q},
            {"heads_kv", config.heads_kv},
            {"head_dim", config.head_dim},
            {"head_dim_v", config.head_dim_v},
            {"hidden_size", config.hidden},
            {"experts", config.experts},
            {"causal", config.causal}};
}

Json answer_json(const ModelAnswer& answer, std::int64_t batch) {
    Json entry{{"device", answer.machine->name},
               {"batch", batch},
               {"len", answer.len},
               {"dtype", name_of(answer.dtype)},
               {"parameters", answer.cost.parameters},
               {"weight_bytes", answer.cost.weight_bytes},
               {"cache_bytes", answer.cost.cache_bytes},
               {"cache_bytes_of_token", answer.cost.cache_token_bytes}};
    if (const auto fits = fits_memory(answer.cost, *answer.machine)) entry["fits"] = *fits;
    entry["calls"] = Json::array();
    for (const measure::CallCost& call : answer.cost.calls) entry["calls"].push_back(call_json(call));
    entry["assumed"] = answer.cost.assumed;
    return entry;
}

void add_csv_rows(const ModelAnswer& answer, std::int64_t batch, Json& rows) {
    for (const measure::CallCost& call : answer.cost.calls) {
        const Json of_call{{"device", answer.machine->name},
                           {"batch", batch},
                           {"len", answer.len},
                           {"dtype", name_of(answer.dtype)},
                           {"call", call.call}};
        if (call.groups.empty()) {
            rows.push_back(of_call);
            rows.back()["refusal"] = call.refusal;
        }
        for (const measure::GroupCost& group : call.groups) {
            Json row = of_call;
            const Json entries = group_json(group);
            for (const auto& [key, value] : entries.items()) row[key] = value;
            rows.push_back(row);
        }
    }
}

}  // namespace tessera::cli
