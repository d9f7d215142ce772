// SPDX-License-Identifier: Apache-2.0
//
// The sizes of a transformer, read from the config.json of Hugging Face.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/dtype.hpp"

namespace tessera::measure {

/// Layers that compute the same attention.
struct LayerGroup {
    enum class Kind : std::uint8_t {
        full,     ///< every query sees all keys up to its own
        sliding,  ///< the `width` nearest keys, its own included
        chunked,  ///< the keys of its own chunk of `width`
        other,    ///< no softmax attention: linear attention, a state space model, ...
    };
    Kind kind = Kind::full;
    std::int64_t layers = 0;
    std::int64_t width = 0;
};

/// A decoder of transformer layers (or an encoder, then not causal).
struct ModelConfig {
    std::string name;  ///< "llama", the model_type
    std::int64_t layers = 0;
    std::vector<LayerGroup> groups;  ///< add up to `layers`
    std::int64_t heads_q = 0, heads_kv = 0;
    std::int64_t head_dim = 0, head_dim_v = 0;
    bool causal = true;
    bool sinks = false;
    double softcap = 0;
    std::optional<DType> dtype;  ///< of the activations, if the file says bf16 or fp16
    std::string weights;         ///< format of the weights: "bf16", "fp32", "mxfp4", "gptq, 4 bits"; empty: not said

    std::int64_t hidden = 0;
    std::int64_t intermediate = 0;  ///< width of the dense layers' MLP
    std::int64_t mlp_matrices = 3;  ///< 3 with a gate, else 2
    std::int64_t vocab = 0;
    bool tied = false;  ///< the output layer has the weights of the embedding

    /// A mixture of experts; 0 experts: none.
    std::int64_t experts = 0, experts_per_token = 0, expert_width = 0;
    std::int64_t shared_width = 0;  ///< of all shared experts together
    std::int64_t moe_layers = 0;

    /// Multi-head latent attention (DeepSeek); kv_rank 0: none.
    std::int64_t q_rank = 0, kv_rank = 0, rope_dim = 0;

    std::vector<std::string> assumed;  ///< sentences on what the file does not say
};

/// Parses the text of a config.json; a discarded value if it is no JSON. Infinity and NaN, which Python writes, are
/// null.
nlohmann::json parse_config(std::string_view text);

/// Reads the sizes from a config. Unknown fields are allowed. Throws Error(bad_data) that names the missing or wrong
/// field, Error(unsupported) that names a field of a model that is not such a stack of layers.
ModelConfig model_config_from_json(const nlohmann::json& json);

/// Reads a config.json, or that of a folder. Throws Error(cannot_open), or as model_config_from_json() with the file's
/// name.
ModelConfig read_model_config(const std::string& path);

}  // namespace tessera::measure
