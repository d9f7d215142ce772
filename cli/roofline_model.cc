// SPDX-License-Identifier: Apache-2.0
//
// tessera roofline --model: attention in a whole model, by its config.json.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>

#include "device_option.hpp"
#include "measure/accuracy.hpp"
#include "measure/whole_model.hpp"
#include "parse.hpp"
#include "roofline_questions.hpp"
#include "table.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

using measure::CallCost;
using measure::GroupCost;
using measure::LayerGroup;
using measure::ModelConfig;
using measure::ModelCost;

constexpr double kGib = 1073741824.0;

std::string kind_text(const LayerGroup& group) {
    switch (group.kind) {
        case LayerGroup::Kind::full: return "full";
        case LayerGroup::Kind::sliding: return "window " + count_text(group.width);
        case LayerGroup::Kind::chunked: return "chunks of " + count_text(group.width);
        case LayerGroup::Kind::other: return "without softmax attention";
    }
    return "";
}

std::string groups_of(const ModelConfig& config) {
    std::string text;
    for (const LayerGroup& group : config.groups)
        text += fmt::format("{}{} {}", text.empty() ? "" : ", ", group.layers, kind_text(group));
    return text;
}

std::string config_text(const ModelConfig& config) {
    std::string text = fmt::format("{}: {} layers ({}), heads {}/{}, head_dim {}", config.name, config.layers,
                                   groups_of(config), config.heads_q, config.heads_kv, config.head_dim);
    if (config.head_dim_v != config.head_dim) text += fmt::format("/{}", config.head_dim_v);
    text += fmt::format(", hidden_size {}", config.hidden);
    if (config.experts > 0) text += fmt::format(", {} of {} experts", config.experts_per_token, config.experts);
    if (config.softcap > 0) text += fmt::format(", softcap {:g}", config.softcap);
    if (config.sinks) text += ", sinks";
    return text;
}

bool fits_memory(const ModelCost& cost, const model::Machine& machine) {
    return cost.weight_bytes + cost.cache_bytes <= machine.memory_gib * kGib;
}

std::string needed_text(const ModelCost& cost) {
    const std::string weights =
        fmt::format("weights {} ({:.3g} billion parameters)", bytes_text(cost.weight_bytes), cost.parameters * 1e-9);
    if (cost.cache_bytes == 0) return weights;
    return fmt::format("{}, K and V {} ({} a token)", weights, bytes_text(cost.cache_bytes),
                       bytes_text(cost.cache_token_bytes));
}

/// The part of the model's work that attention is.
std::string part_text(const CallCost& call) {
    if (!call.known()) return "not predicted: " + (call.refusal.empty() ? "see the table" : call.refusal);
    if (call.cache_bytes > 0) {
        const double all = call.cache_bytes + call.weight_bytes;
        return fmt::format("K and V are {:.1f} % of the bytes that a step reads ({} of {}; the weights are the rest)",
                           100 * call.cache_bytes / all, bytes_text(call.cache_bytes), bytes_text(all));
    }
    const double all = call.attention_flop + call.other_flop;
    return fmt::format("attention is {:.1f} % of the FLOP of the model ({:.4g} of {:.4g} TFLOP)",
                       100 * call.attention_flop / all, call.attention_flop * 1e-12, all * 1e-12);
}

std::string model_calls_text(const ModelCost& cost, int width) {
    Table table({{"call"},
                 {"layers"},
                 {"kernel"},
                 {"a layer", Align::right},
                 {"all layers", Align::right},
                 {"rate", Align::right},
                 {"error", Align::right}});
    for (const CallCost& call : cost.calls) {
        for (const GroupCost& group : call.groups) {
            const std::string layers = fmt::format("{} {}", group.group.layers, kind_text(group.group));
            const measure::SweepCell* best = group.best();
            if (best == nullptr) {
                table.add({call.call, layers, "none", "-", "-", "-", group.refusal()});
                continue;
            }
            table.add({call.call, layers, name_of(best->schedule), milliseconds_text(best->ms()),
                       milliseconds_text(best->ms() * static_cast<double>(group.group.layers)), rate_text(*best),
                       error_percent_text(*best)});
        }
    }
    return table.text(width);
}

Json group_json(const GroupCost& group) {
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
    return entry;
}

Json call_json(const CallCost& call) {
    Json entry{{"call", call.call}};
    if (!call.refusal.empty()) entry["refusal"] = call.refusal;
    if (call.known()) entry["ms"] = call.ms();
    entry["layers"] = Json::array();
    for (const GroupCost& group : call.groups) entry["layers"].push_back(group_json(group));
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

Json config_json(const ModelConfig& config) {
    Json groups = Json::array();
    for (const LayerGroup& group : config.groups)
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

/// The answer for one machine and one length.
struct ModelAnswer {
    const model::Machine* machine;
    std::int64_t len;
    DType dtype;
    ModelCost cost;
};

Json answer_json(const ModelAnswer& answer, std::int64_t batch) {
    Json calls = Json::array();
    for (const CallCost& call : answer.cost.calls) calls.push_back(call_json(call));
    return {{"device", answer.machine->name},
            {"batch", batch},
            {"len", answer.len},
            {"dtype", name_of(answer.dtype)},
            {"parameters", answer.cost.parameters},
            {"weight_bytes", answer.cost.weight_bytes},
            {"cache_bytes", answer.cost.cache_bytes},
            {"cache_bytes_of_token", answer.cost.cache_token_bytes},
            {"fits", fits_memory(answer.cost, *answer.machine)},
            {"calls", calls},
            {"assumed", answer.cost.assumed}};
}

/// A line for each call and group of layers.
void add_csv_rows(const ModelAnswer& answer, std::int64_t batch, Json& rows) {
    for (const CallCost& call : answer.cost.calls) {
        for (const GroupCost& group : call.groups) {
            Json row{{"device", answer.machine->name},
                     {"batch", batch},
                     {"len", answer.len},
                     {"dtype", name_of(answer.dtype)},
                     {"call", call.call}};
            const Json entries = group_json(group);
            for (const auto& [key, value] : entries.items()) row[key] = value;
            rows.push_back(row);
        }
    }
}

/// A table of the calls on several machines: attention in all layers.
std::string answers_text(const std::vector<ModelAnswer>& answers, int width) {
    Table table({{"call"},
                 {"device"},
                 {"attention", Align::right},
                 {"error", Align::right},
                 {"speed", Align::right},
                 {"weights, K and V"}});
    for (std::size_t c = 0; c < answers.front().cost.calls.size(); ++c) {
        const CallCost& first = answers.front().cost.calls[c];
        for (const ModelAnswer& answer : answers) {
            const CallCost& call = answer.cost.calls[c];
            double error = 0;
            for (const GroupCost& group : call.groups)
                if (group.best() != nullptr) error = std::max(error, error_of(*group.best()));
            table.add({call.call, answer.machine->name, call.known() ? milliseconds_text(call.ms()) : "-",
                       call.known() ? fmt::format("+-{:.0f} %", 100 * error) : "-",
                       call.known() && first.known() ? fmt::format("{:.2f}x", first.ms() / call.ms()) : "-",
                       fits_memory(answer.cost, *answer.machine) ? "fit" : "do not fit"});
        }
    }
    return table.text(width);
}

/// The libraries of the kernels, and the error bars in words, which have the caveats of a machine.
std::vector<std::pair<std::string, std::string>> notes_of(const std::vector<ModelAnswer>& answers) {
    std::vector<std::string> kernels;
    std::vector<std::pair<std::string, std::string>> bars;
    for (const ModelAnswer& answer : answers) {
        std::string bar;
        for (const CallCost& call : answer.cost.calls) {
            for (const GroupCost& group : call.groups) {
                if (group.best() == nullptr) continue;
                add_kernel(kernels, *group.best());
                if (bar.empty())
                    bar = measure::error_bar_text(group.row.problem, group.best()->longest(), *answer.machine);
            }
        }
        if (!bar.empty()) bars.emplace_back(answer.machine->name, bar);
    }
    std::vector<std::pair<std::string, std::string>> notes{
        {"kernels", kernels.empty() ? "none is predicted" : fmt::format("{}", fmt::join(kernels, ", "))}};
    if (answers.size() > 1)
        notes.emplace_back("speed",
                           fmt::format("the time of {} over that of the device", answers.front().machine->name));
    notes.insert(notes.end(), bars.begin(), bars.end());
    return notes;
}

std::string text_of_answers(const ModelConfig& config, const std::vector<ModelAnswer>& answers, std::int64_t batch,
                            int width) {
    const ModelAnswer& first = answers.front();
    std::vector<std::pair<std::string, std::string>> facts;
    if (answers.size() == 1)
        facts.emplace_back("device", fmt::format("{}: {}", first.machine->name, first.machine->title));
    facts.emplace_back("model", config_text(config));
    facts.emplace_back("call", fmt::format("{}, batch {}, len {}", name_of(first.dtype), batch, count_text(first.len)));
    std::string memory = needed_text(first.cost);
    if (answers.size() == 1)
        memory += fmt::format("; they {} {} of {}", fits_memory(first.cost, *first.machine) ? "fit the" : "exceed the",
                              bytes_text(first.machine->memory_gib * kGib), first.machine->name);
    facts.emplace_back("memory", memory);
    std::string text = facts_text(facts, width) + "\n";
    text += answers.size() == 1 ? model_calls_text(first.cost, width) : answers_text(answers, width);
    text += "\n" + facts_text(notes_of(answers), width);
    facts.clear();
    for (const CallCost& call : first.cost.calls) facts.emplace_back(call.call, part_text(call));
    text += "\n" + facts_text(facts, width);
    facts.clear();
    for (const std::string& one : first.cost.assumed)
        facts.emplace_back(&one == &first.cost.assumed.front() ? "assumed" : "", one);
    return text + "\n" + facts_text(facts, width);
}

/// Predicts the calls. A size that no kernel takes comes from the file, so the error names the file.
ModelCost cost_of_file(const measure::ModelQuestion& question, const std::string& file) {
    try {
        return measure::cost_of(question);
    } catch (const Error& error) {
        if (error.code() != ErrorCode::invalid_argument) throw;
        throw Error(ErrorCode::unsupported, file, error.what());
    }
}

/// The dtype of --dtype, or of the file, or of the machines.
DType model_dtype(const RooflineOptions& options, const ModelConfig& config,
                  const std::vector<model::Machine>& machines) {
    if (options.dtype_given) return parse_dtype(options.shape.dtype);
    const auto all_have = [&](DType dtype) {
        return std::all_of(machines.begin(), machines.end(), [&](const auto& one) { return one.supports(dtype); });
    };
    if (machines.front().kind == model::MachineKind::cpu) return config.dtype.value_or(DType::fp32);
    if (config.dtype && all_have(*config.dtype)) return *config.dtype;
    return all_have(DType::bf16) ? DType::bf16 : DType::fp16;
}

}  // namespace

void show_model(const RooflineOptions& options, const Session& session) {
    const ModelConfig config = measure::read_model_config(options.model);
    std::vector<model::Machine> machines;
    if (options.compare.empty()) machines.push_back(machine_of_option(options.device));
    else machines = machines_to_compare(options);
    const std::int64_t batch = options.shape.batch.empty() ? 1 : parse_size("--batch", options.shape.batch);
    constexpr std::int64_t kMostBatch = std::int64_t{1} << 20;
    if (batch < 1 || batch > kMostBatch) unexpected("--batch", "1..2^20", options.shape.batch);
    const DType dtype = model_dtype(options, config, machines);
    Json rows = Json::array();
    std::string text;
    for (const std::int64_t len : options.model_lengths()) {
        std::vector<ModelAnswer> answers;
        for (const model::Machine& machine : machines) {
            const measure::ModelQuestion question{
                config, machine, batch, len, dtype, options.schedule_list(), options.predict_options(machine)};
            answers.push_back({&machine, len, dtype, cost_of_file(question, options.model)});
        }
        for (const ModelAnswer& answer : answers) {
            if (session.csv) add_csv_rows(answer, batch, rows);
            else rows.push_back(answer_json(answer, batch));
        }
        text += (text.empty() ? "" : "\n") + text_of_answers(config, answers, batch, terminal_width(STDOUT_FILENO));
    }
    if (session.csv) session.print_csv(rows);
    else if (session.json) session.print_json(Json{{"model", config_json(config)}, {"rows", rows}}, "model");
    else session.print(text);
}

}  // namespace tessera::cli
