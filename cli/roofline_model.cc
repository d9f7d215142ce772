// SPDX-License-Identifier: Apache-2.0
//
// tessera roofline --model: attention in a whole model, by its config.json.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <optional>

#include "device_option.hpp"
#include "measure/accuracy.hpp"
#include "measure/whole_model.hpp"
#include "parse.hpp"
#include "roofline_model_json.hpp"
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

/// The cell of a table on memory. It is "-" for a training step, whose gradients need memory besides weights, K and V.
std::string fits_text(const CallCost& call, const ModelCost& cost, const model::Machine& machine) {
    const std::optional<bool> fits = fits_memory(cost, machine);
    if (!fits || call.call == "training step") return "-";
    return *fits ? "fit" : "do not fit";
}

std::string needed_text(const ModelCost& cost) {
    const std::string weights =
        fmt::format("weights {} ({:.3g} billion parameters)", bytes_text(cost.weight_bytes), cost.parameters * 1e-9);
    if (cost.cache_bytes == 0) return weights;
    return fmt::format("{}, K and V {} ({} a token)", weights, bytes_text(cost.cache_bytes),
                       bytes_text(cost.cache_token_bytes));
}

/// The reasons why a call is not predicted, with its layers where these differ.
std::string why_text(const CallCost& call) {
    if (!call.refusal.empty()) return call.refusal;
    std::vector<std::pair<std::string, std::string>> reasons;  // a reason, and its layers
    for (const GroupCost& group : call.groups) {
        if (group.best() != nullptr) continue;
        const std::string why = group.refusal();
        const auto same =
            std::find_if(reasons.begin(), reasons.end(), [&](const auto& one) { return one.first == why; });
        if (same == reasons.end()) reasons.emplace_back(why, kind_text(group.group));
        else same->second += ", " + kind_text(group.group);
    }
    if (reasons.size() == 1) return reasons.front().first;
    std::string text;
    for (const auto& [why, layers] : reasons)
        text += fmt::format("{}layers of {}: {}", text.empty() ? "" : "; ", layers, why);
    return text;
}

/// The part of the model's work that attention is.
std::string part_text(const CallCost& call) {
    if (!call.known()) return "not predicted: " + why_text(call);
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
    constexpr std::size_t kKeys = 2;  // call and layers name a row, also if the table continues below
    Table table({{"call"},
                 {"layers"},
                 {"kernel"},
                 {"a layer", Align::right},
                 {"all layers", Align::right},
                 {"rate", Align::right},
                 {"error", Align::right}},
                kKeys);
    for (const CallCost& call : cost.calls) {
        for (const GroupCost& group : call.groups) {
            const std::string layers = fmt::format("{} {}", group.group.layers, kind_text(group.group));
            const measure::SweepCell* best = group.best();
            if (best == nullptr) {
                table.add({call.call, layers, "none", "-", "-", "-", "-"});
                continue;
            }
            table.add({call.call, layers, name_of(best->schedule), milliseconds_text(best->ms()),
                       milliseconds_text(best->ms() * static_cast<double>(group.group.layers)), rate_text(*best),
                       error_percent_text(*best)});
        }
    }
    return table.text(width);
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
                       fits_text(call, answer.cost, *answer.machine)});
        }
    }
    return table.text(width);
}

/// The bar that the table shows for these layers, in words.
std::string bar_of_layers(const GroupCost& group, const model::Machine& machine) {
    const std::vector<model::Prediction>& passes = group.best()->passes;
    const auto widest =
        std::max_element(passes.begin(), passes.end(), [](const auto& a, const auto& b) { return a.error < b.error; });
    return measure::error_bar_text(group.row.problem, *widest, machine);
}

/// The libraries of the kernels, what their times leave out, and each error bar in words, which has the caveats of its
/// machine.
std::vector<std::pair<std::string, std::string>> notes_of(const std::vector<ModelAnswer>& answers) {
    std::vector<std::string> kernels, missing;
    std::vector<std::pair<std::string, std::string>> bars;
    const auto add_once = [](std::vector<std::string>& list, const std::string& text) {
        if (!text.empty() && std::find(list.begin(), list.end(), text) == list.end()) list.push_back(text);
    };
    for (const ModelAnswer& answer : answers) {
        std::vector<std::string> of_machine;
        for (const CallCost& call : answer.cost.calls) {
            for (const GroupCost& group : call.groups) {
                if (group.best() == nullptr) continue;
                add_kernel(kernels, *group.best());
                add_once(missing, group.not_modelled());
                add_once(of_machine, bar_of_layers(group, *answer.machine));
            }
        }
        for (const std::string& bar : of_machine)
            bars.emplace_back(&bar == &of_machine.front() ? answer.machine->name : "", bar);
    }
    std::vector<std::pair<std::string, std::string>> notes{
        {"kernels", kernels.empty() ? "none is predicted" : fmt::format("{}", fmt::join(kernels, ", "))}};
    if (!missing.empty())
        notes.emplace_back("not modelled",
                           fmt::format("{}: the kernels take longer by its cost", fmt::join(missing, "; ")));
    if (answers.size() > 1)
        notes.emplace_back("speed",
                           fmt::format("the time of {} over that of the device", answers.front().machine->name));
    notes.insert(notes.end(), bars.begin(), bars.end());
    return notes;
}

/// The calls in words: the part of the model that attention is, on each machine why a call is not predicted, and what
/// helps.
std::vector<std::pair<std::string, std::string>> parts_of_calls(const std::vector<ModelAnswer>& answers) {
    std::vector<std::pair<std::string, std::string>> parts;
    for (const ModelAnswer& answer : answers) {
        const bool first = &answer == &answers.front();
        for (const CallCost& call : answer.cost.calls) {
            const bool on_all = answers.size() == 1 || !call.refusal.empty();  // for a reason that no machine changes
            if (first && (call.known() || on_all)) parts.emplace_back(call.call, part_text(call));
            else if (!call.known() && !on_all)
                parts.emplace_back(call.call + ", " + answer.machine->name, part_text(call));
        }
    }
    for (const ModelAnswer& answer : answers) {
        if (answer.by_tessera.empty()) continue;
        std::string text = fmt::format("predicts {}", fmt::join(answer.by_tessera, ", "));
        if (answers.size() > 1) text += " on " + answer.machine->name;
        parts.emplace_back("--by tessera", text);
    }
    return parts;
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
    const std::optional<bool> fits = fits_memory(first.cost, *first.machine);
    if (answers.size() == 1 && fits)
        memory += fmt::format("; they {} {} of {}", *fits ? "fit the" : "exceed the",
                              bytes_text(first.machine->memory_gib * kBytesOfGib), first.machine->name);
    facts.emplace_back("memory", memory);
    std::string text = facts_text(facts, width) + "\n";
    text += answers.size() == 1 ? model_calls_text(first.cost, width) : answers_text(answers, width);
    text += "\n" + facts_text(notes_of(answers), width);
    text += "\n" + facts_text(parts_of_calls(answers), width);
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

/// The calls without an answer that tessera's own kernels would have.
std::vector<std::string> known_by_tessera(const ModelCost& cost, const measure::ModelQuestion& question,
                                          const std::string& file) {
    std::vector<std::string> calls;
    const bool all_known =
        std::all_of(cost.calls.begin(), cost.calls.end(), [](const CallCost& call) { return call.known(); });
    if (all_known || question.options.by == "tessera") return calls;
    measure::ModelQuestion by_tessera = question;
    by_tessera.options.by = "tessera";
    const ModelCost other = cost_of_file(by_tessera, file);
    for (std::size_t c = 0; c < cost.calls.size(); ++c)
        if (!cost.calls[c].known() && other.calls[c].known()) calls.push_back(cost.calls[c].call);
    return calls;
}

/// Throws if no call has an answer on any machine.
void expect_answers(const std::vector<ModelAnswer>& answers) {
    for (const ModelAnswer& answer : answers)
        for (const CallCost& call : answer.cost.calls)
            if (call.known()) return;
    std::string text = "no call of the model can be predicted:";
    for (const auto& [call, why] : parts_of_calls(answers)) text += fmt::format("\n  {}: {}", call, why);
    throw Error(ErrorCode::unsupported, "", text);
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
            ModelCost cost = cost_of_file(question, options.model);
            std::vector<std::string> by_tessera = known_by_tessera(cost, question, options.model);
            answers.push_back({&machine, len, dtype, std::move(cost), std::move(by_tessera)});
        }
        expect_answers(answers);
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
