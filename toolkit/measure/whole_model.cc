// SPDX-License-Identifier: Apache-2.0
#include "measure/whole_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tessera::measure {
namespace {

using Kind = LayerGroup::Kind;

/// Parameters of the matrices of a model.
struct Parameters {
    double projections = 0;  // of one layer: q, k, v, o
    double mlp = 0;          // of one dense layer
    double expert = 0, shared = 0, router = 0;
    double output = 0;

    explicit Parameters(const ModelConfig& c) {
        const auto of = [](std::int64_t a, std::int64_t b) { return static_cast<double>(a) * static_cast<double>(b); };
        if (c.kv_rank > 0) {
            const std::int64_t nope = c.head_dim - c.rope_dim;
            projections = c.q_rank > 0 ? of(c.hidden, c.q_rank) + of(c.q_rank, c.heads_q * c.head_dim)
                                       : of(c.hidden, c.heads_q * c.head_dim);
            projections += of(c.hidden, c.kv_rank + c.rope_dim) + of(c.kv_rank, c.heads_q * (nope + c.head_dim_v));
        } else {
            projections = of(c.hidden, c.heads_q * c.head_dim) + of(c.hidden, c.heads_kv * (c.head_dim + c.head_dim_v));
        }
        projections += of(c.heads_q * c.head_dim_v, c.hidden);
        mlp = static_cast<double>(c.mlp_matrices) * of(c.hidden, c.intermediate);
        expert = static_cast<double>(c.mlp_matrices) * of(c.hidden, c.expert_width);
        shared = static_cast<double>(c.mlp_matrices) * of(c.hidden, c.shared_width);
        router = of(c.hidden, c.experts);
        output = of(c.hidden, c.vocab);
    }

    /// The parameters of all layers, with `experts` of the experts of a layer counted.
    double layers(const ModelConfig& c, double experts) const {
        return static_cast<double>(c.layers) * projections + static_cast<double>(c.layers - c.moe_layers) * mlp +
               static_cast<double>(c.moe_layers) * (experts * expert + shared + router);
    }
};

/// The experts of a layer that `tokens` tokens use together, if each token chooses at random.
double experts_used(const ModelConfig& c, double tokens) {
    if (c.experts == 0) return 0;
    const double share = static_cast<double>(c.experts_per_token) / static_cast<double>(c.experts);
    return static_cast<double>(c.experts) * (1 - std::pow(1 - std::min(share, 1.0), tokens));
}

std::int64_t keys_of(const LayerGroup& group, std::int64_t len) {
    return group.width > 0 ? std::min(group.width, len) : len;
}

CallCost call_of(const ModelQuestion& q, const char* name, const std::vector<Pass>& passes, bool decode) {
    CallCost call{.call = name};
    if (decode && !(call.refusal = decode_refusal(q.config)).empty()) return call;
    const SweepQuestion sweep{q.machine, q.schedules, passes, q.options};
    for (const LayerGroup& group : q.config.groups) {
        if (group.kind == Kind::other || group.layers == 0) continue;
        const Problem problem = layer_problem(q.config, group, q.batch, q.len, q.dtype, decode);
        problem.validate();
        call.groups.push_back({group, sweep_one(problem, sweep)});
        if (const SweepCell* best = call.groups.back().best())
            call.attention_flop += static_cast<double>(group.layers) * best->tflops() * best->ms() * 1e9;
    }
    if (call.groups.empty()) call.refusal = "the model has no layer of softmax attention";
    return call;
}

}  // namespace

Problem layer_problem(const ModelConfig& c, const LayerGroup& group, std::int64_t batch, std::int64_t len, DType dtype,
                      bool decode) {
    Problem p;
    p.dtype = dtype;
    p.batch = batch;
    p.heads_q = c.heads_q, p.heads_kv = c.heads_kv;
    p.head_dim = c.head_dim, p.head_dim_v = c.head_dim_v;
    p.softcap = c.softcap;
    p.sinks = c.sinks;
    if (decode) {
        p.len_q = 1;
        p.len_kv = keys_of(group, len);
        return p;  // one query at the end sees every key of its window
    }
    p.len_q = p.len_kv = len;
    if (c.causal) p.mask.causal = Causal::bottom_right;
    if (group.width == 0 || group.width >= len) return p;
    if (group.kind == Kind::chunked) {
        p.batch = batch * ((len + group.width - 1) / group.width);
        p.len_q = p.len_kv = group.width;
    } else if (c.causal) {
        p.mask.window_left = group.width - 1;
    } else {
        p.mask.window_left = p.mask.window_right = group.width / 2;
    }
    return p;
}

std::string decode_refusal(const ModelConfig& config) {
    if (config.kv_rank == 0) return "";
    return fmt::format(
        "multi-head latent attention decodes on its compressed cache (keys of {} and values of {}, one head for all), "
        "for which tessera has no kernel and the model no constants",
        config.kv_rank + config.rope_dim, config.kv_rank);
}

std::string GroupCost::refusal() const {
    std::vector<std::pair<std::string, std::string>> reasons;  // a reason, and its schedules
    for (const SweepCell& cell : row.cells) {
        const std::string why = cell.known() ? "its tensors do not fit the memory" : cell.refusal;
        const auto same =
            std::find_if(reasons.begin(), reasons.end(), [&](const auto& one) { return one.first == why; });
        if (same == reasons.end()) reasons.emplace_back(why, name_of(cell.schedule));
        else same->second += std::string(", ") + name_of(cell.schedule);
    }
    std::string text;
    for (const auto& [why, schedules] : reasons) text += (text.empty() ? "" : "; ") + schedules + ": " + why;
    return text;
}

std::string GroupCost::not_modelled() const { return best() == nullptr ? "" : best()->passes.front().not_modelled; }

bool CallCost::known() const {
    return refusal.empty() && !groups.empty() &&
           std::all_of(groups.begin(), groups.end(), [](const auto& g) { return g.best() != nullptr; });
}

double CallCost::ms() const {
    double sum = 0;
    for (const GroupCost& group : groups)
        if (const SweepCell* best = group.best()) sum += static_cast<double>(group.group.layers) * best->ms();
    return sum;
}

ModelCost cost_of(const ModelQuestion& q) {
    const ModelConfig& c = q.config;
    const Parameters parameters(c);
    const auto batch = static_cast<double>(q.batch), tokens = batch * static_cast<double>(q.len);
    const auto bytes = static_cast<double>(size_of(q.dtype));
    ModelCost cost;
    cost.assumed = c.assumed;
    cost.parameters = parameters.layers(c, static_cast<double>(c.experts)) + parameters.output * (c.tied ? 1 : 2);
    cost.weight_bytes = bytes * cost.parameters;
    const std::string counted = name_of(q.dtype);
    const bool same_size = c.weights == counted || (bytes == 2 && (c.weights == "bf16" || c.weights == "fp16"));
    cost.weights_known = c.weights.empty() || same_size;
    if (!cost.weights_known)
        cost.assumed.push_back("weights are counted in " + counted + ", while the file says " + c.weights);
    const auto per_token =
        static_cast<double>(c.kv_rank > 0 ? c.kv_rank + c.rope_dim : c.heads_kv * (c.head_dim + c.head_dim_v));
    for (const LayerGroup& group : c.groups) {
        if (group.kind == Kind::other || !c.causal) continue;
        const double token = bytes * per_token * static_cast<double>(group.layers);
        cost.cache_token_bytes += token;
        cost.cache_bytes += token * batch * static_cast<double>(keys_of(group, q.len));
    }

    // A matrix of N parameters takes 2 N FLOP for a token, and twice as many in the backward.
    const double of_token = 2 * parameters.layers(c, static_cast<double>(c.experts_per_token));
    const double of_output = 2 * parameters.output;
    if (c.causal) {
        CallCost prefill = call_of(q, "prefill", {Pass::forward}, false);
        prefill.other_flop = tokens * of_token + batch * of_output;
        cost.calls.push_back(std::move(prefill));
        cost.assumed.emplace_back("a prefill computes the output layer for the last token of each sequence");
    } else {
        CallCost forward = call_of(q, "forward", {Pass::forward}, false);
        forward.other_flop = tokens * (of_token + of_output);
        cost.calls.push_back(std::move(forward));
    }
    CallCost training = call_of(q, "training step", {Pass::forward, Pass::backward}, false);
    training.other_flop = 3 * tokens * (of_token + of_output);
    cost.calls.push_back(std::move(training));
    cost.assumed.emplace_back(
        "a training step is one forward and one backward, without recomputation; the memory of its gradients, "
        "optimizer "
        "and activations is not counted");
    if (c.causal) {
        CallCost decode = call_of(q, "decode", {Pass::forward}, true);
        decode.other_flop = batch * (of_token + of_output);
        decode.cache_bytes = cost.cache_bytes;
        decode.weight_bytes = bytes * (parameters.layers(c, experts_used(c, batch)) + parameters.output);
        const bool answered = decode.refusal.empty();
        cost.calls.push_back(std::move(decode));
        if (answered)
            cost.assumed.emplace_back("a decode step makes one token of each sequence, and reads each weight once");
        if (answered && c.experts > 0) cost.assumed.emplace_back("tokens choose their experts at random");
    }
    if (std::any_of(c.groups.begin(), c.groups.end(), [](const auto& g) { return g.kind == Kind::other; }))
        cost.assumed.emplace_back(
            "layers without softmax attention have projections of the same size, and their own "
            "mixing is left out");
    cost.assumed.emplace_back("norms, rotary embeddings and activations are left out");
    return cost;
}

}  // namespace tessera::measure
