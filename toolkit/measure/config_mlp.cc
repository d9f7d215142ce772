// SPDX-License-Identifier: Apache-2.0
#include "measure/config_mlp.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace tessera::measure {
namespace {

/// True if the MLP has a gate: one more matrix. No field says so, but of the families in transformers 5.24 those with
/// SiLU have one and those with other activations have none, except for the ones listed here.
bool has_gate(const Fields& fields, const ModelConfig& config) {
    if (is_one_of(config.name, {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "mpt",
                                "starcoder2", "codegen", "gpt_bigcode", "bert", "roberta", "nemotron", "vit",
                                "stablelm_alpha", "persimmon", "cpmant"}))
        return false;
    if (config.name.starts_with("gemma") || is_one_of(config.name, {"vaultgemma", "recurrent_gemma", "modernbert",
                                                                    "modernbert-decoder", "gte", "pixtral", "bitnet"}))
        return true;
    for (const char* name : {"hidden_act", "hidden_activation", "activation_function", "activation", "act_fn", "afn"}) {
        const std::string activation = fields.text(name);
        if (activation.empty()) continue;
        const bool gated = activation.find("glu") != std::string::npos || activation.find("gated") != std::string::npos;
        return gated || activation == "silu" || activation == "swish";
    }
    return true;
}

void finish_mlp(ModelConfig& config) {
    if (config.intermediate == 0 && config.moe_layers < config.layers) {
        constexpr std::int64_t kUsual = 4;
        config.intermediate = kUsual * config.hidden;
        config.assumed.push_back(fmt::format("the MLP is 4 * hidden_size = {} wide", config.intermediate));
    }
    config.assumed.push_back(fmt::format("the MLP has {} matrices{}", config.mlp_matrices,
                                         config.mlp_matrices == 3 ? " (it has a gate)" : ""));
}

}  // namespace

void read_mlp(const Fields& fields, ModelConfig& config) {
    config.mlp_matrices = has_gate(fields, config) ? 3 : 2;
    config.intermediate =
        fields.size({"intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "feed_forward_dim"}, 0);
    if (!fields.flag("is_moe", true)) return finish_mlp(config);
    config.experts = fields.count({"num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"});
    if (config.experts > 0) {
        config.experts_per_token =
            fields.required({"num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k"});
        if (config.experts_per_token > config.experts)
            bad_field("num_experts_per_tok", fmt::format("at most {}, the experts of a layer", config.experts),
                      config.experts_per_token);
        config.expert_width = fields.size({"moe_intermediate_size"}, config.intermediate);
        if (config.expert_width == 0) fields.required({"moe_intermediate_size", "intermediate_size"});
        config.shared_width = fields.count({"shared_expert_intermediate_size"});
        if (config.shared_width == 0)
            config.shared_width = fields.count({"n_shared_experts", "num_shared_experts", "moe_num_shared_experts"}) *
                                  config.expert_width;
        const std::int64_t dense =
            std::min(config.layers, fields.count({"first_k_dense_replace", "moe_layer_start_index"}));
        const std::int64_t step = std::max<std::int64_t>(
            1,
            fields.count(
                {"decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period", "moe_layer_interval"}, 1));
        config.moe_layers = (config.layers - dense) / step;
        if (config.name == "llama4_text") {  // one shared expert; dense layers have a width of their own
            config.shared_width = config.expert_width;
            config.intermediate = fields.size({"intermediate_size_mlp"}, config.intermediate);
        }
    }
    finish_mlp(config);
}

}  // namespace tessera::measure
