// SPDX-License-Identifier: Apache-2.0
#include "llama/weights.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "llama/bf16.hpp"

namespace llama {
namespace {

using tessera::DType;

}  // namespace

tessera::TensorView Weights::expect(const std::string& name, const std::vector<std::int64_t>& shape) {
    const tessera::io::TensorFile& file = files_.holder(name);
    const tessera::TensorView view = file.view(name);
    const std::vector<std::int64_t> came(view.shape.begin(), view.shape.begin() + view.rank);
    const bool number = view.dtype == DType::bf16 || view.dtype == DType::fp32;
    if (came != shape || !number) {
        tessera::io::bad_data(file.origin(), fmt::format("tensor {}: expected bf16 or fp32 {}, got {} {}", name,
                                                         tessera::io::shape_text(shape), name_of(view.dtype),
                                                         tessera::io::shape_text(came)));
    }
    used_.push_back(name);
    parameters_ += view.size();
    bytes_ += view.size() * size_of(view.dtype);
    return view;
}

std::vector<float> Weights::vector(const std::string& name, std::int64_t size) {
    const tessera::TensorView view = expect(name, {size});
    std::vector<float> values(static_cast<std::size_t>(size));
    for (std::int64_t i = 0; i < size; ++i) {
        values[static_cast<std::size_t>(i)] =
            view.dtype == DType::bf16 ? from_bf16(*view.at<std::uint16_t>(i)) : *view.at<float>(i);
    }
    return values;
}

Matrix Weights::matrix(const std::string& name, std::int64_t outputs, std::int64_t inputs) {
    const tessera::TensorView view = expect(name, {outputs, inputs});
    return {view.data, view.dtype, outputs, inputs};
}

Weights::Weights(const std::string& folder, const Config& config) : files_(folder) {
    const std::int64_t hidden = config.hidden_size, dim = config.head_dim;
    embedding = matrix("model.embed_tokens.weight", config.vocab_size, hidden);
    for (std::int64_t n = 0; n < config.layers; ++n) {
        const std::string layer = fmt::format("model.layers.{}.", n);
        LayerWeights w;
        w.input_norm = vector(layer + "input_layernorm.weight", hidden);
        w.q = matrix(layer + "self_attn.q_proj.weight", config.heads_q * dim, hidden);
        w.k = matrix(layer + "self_attn.k_proj.weight", config.heads_kv * dim, hidden);
        w.v = matrix(layer + "self_attn.v_proj.weight", config.heads_kv * dim, hidden);
        w.o = matrix(layer + "self_attn.o_proj.weight", hidden, config.heads_q * dim);
        if (config.qk_norm) {
            w.q_norm = vector(layer + "self_attn.q_norm.weight", dim);
            w.k_norm = vector(layer + "self_attn.k_norm.weight", dim);
        }
        w.post_attention_norm = vector(layer + "post_attention_layernorm.weight", hidden);
        w.gate = matrix(layer + "mlp.gate_proj.weight", config.intermediate_size, hidden);
        w.up = matrix(layer + "mlp.up_proj.weight", config.intermediate_size, hidden);
        w.down = matrix(layer + "mlp.down_proj.weight", hidden, config.intermediate_size);
        layers.push_back(std::move(w));
    }
    final_norm = vector("model.norm.weight", hidden);
    output = config.tied_embeddings ? embedding : matrix("lm_head.weight", config.vocab_size, hidden);

    std::sort(used_.begin(), used_.end());
    for (const tessera::io::TensorFile& file : files_.files()) {
        for (const tessera::io::NamedTensor& tensor : file.tensors()) {
            const bool stored_twice = config.tied_embeddings && tensor.name == "lm_head.weight";
            if (!stored_twice && !std::binary_search(used_.begin(), used_.end(), tensor.name)) {
                tessera::io::bad_data(file.origin(),
                                      fmt::format("tensor {}: expected no such tensor in a {} model",
                                                  tessera::io::printable(tensor.name), config.model_type));
            }
        }
    }
}

}  // namespace llama
