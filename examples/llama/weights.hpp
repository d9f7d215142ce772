// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llama/config.hpp"
#include "llama/weight_files.hpp"
#include "tessera/dtype.hpp"

namespace llama {

/// A matrix of a linear layer, [outputs, inputs] in C order, bf16 or fp32. It borrows its memory.
struct Matrix {
    const void* data = nullptr;
    tessera::DType dtype = tessera::DType::fp32;
    std::int64_t outputs = 0;
    std::int64_t inputs = 0;
};

/// The weights of a layer.
struct LayerWeights {
    std::vector<float> input_norm;           ///< [hidden_size]
    Matrix q, k, v, o;                       ///< [heads * head_dim, hidden_size], and back
    std::vector<float> q_norm, k_norm;       ///< [head_dim], empty without qk_norm
    std::vector<float> post_attention_norm;  ///< [hidden_size]
    Matrix gate, up, down;                   ///< [intermediate_size, hidden_size], and back
};

/// The weights of a model, which own their memory.
class Weights {
 public:
    /// Reads FOLDER/model.safetensors, or the files of its index. Throws tessera::Error if a tensor is missing, has
    /// another shape than the Config says, or belongs to no part of the model: ignoring a bias would give plausible
    /// nonsense.
    Weights(const std::string& folder, const Config& config);

    std::int64_t parameters() const { return parameters_; }
    std::int64_t bytes() const { return bytes_; }

    Matrix embedding;  ///< [vocab_size, hidden_size]
    std::vector<LayerWeights> layers;
    std::vector<float> final_norm;  ///< [hidden_size]
    Matrix output;                  ///< [vocab_size, hidden_size]

 private:
    Matrix matrix(const std::string& name, std::int64_t outputs, std::int64_t inputs);
    std::vector<float> vector(const std::string& name, std::int64_t size);
    tessera::TensorView expect(const std::string& name, const std::vector<std::int64_t>& shape);

    WeightFiles files_;
    std::vector<std::string> used_;
    std::int64_t parameters_ = 0;
    std::int64_t bytes_ = 0;
};

}  // namespace llama
