// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace llama {

/// Llama 3.1's change of the rotary frequencies ("rope_type": "llama3"): long waves are stretched by `factor`.
struct Llama3Rotary {
    double factor = 1;
    double low_frequency_factor = 1;
    double high_frequency_factor = 4;
    double original_positions = 8192;
};

/// The shape of a model, from its config.json.
struct Config {
    std::string model_type;  ///< "llama" or "qwen3"
    std::int64_t vocab_size = 0;
    std::int64_t hidden_size = 0;
    std::int64_t intermediate_size = 0;
    std::int64_t layers = 0;
    std::int64_t heads_q = 0;
    std::int64_t heads_kv = 0;
    std::int64_t head_dim = 0;       ///< heads_q * head_dim need not be hidden_size
    std::int64_t max_positions = 0;  ///< the longest sequence
    double rms_norm_eps = 0;
    double rope_theta = 0;
    std::optional<Llama3Rotary> llama3_rotary;
    bool qk_norm = false;          ///< Qwen3: RMSNorm over each head of Q and K, ahead of the rotary embedding
    bool tied_embeddings = false;  ///< the output matrix is the embedding matrix
    std::vector<std::int32_t> end_tokens;
};

/// Reads FOLDER/config.json. Throws tessera::Error that names the file, the field, what was expected and what came; a
/// field that would change the computation in a way that this program does not know (attention_bias, a sliding window,
/// quantised weights) is such an error.
Config read_config(const std::string& folder);

}  // namespace llama
