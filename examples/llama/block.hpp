// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "llama/attention.hpp"
#include "llama/layers.hpp"
#include "llama/weights.hpp"
#include "tessera/decode_block.hpp"

namespace llama {

/// Attention blocks of steps in which every sequence brings one token, by tessera::decode_block(): norm, products,
/// rotary embedding, append, attention, output product and residual in one call. It keeps a copy of the weights, with
/// those of Q, K and V one after another.
class Block {
 public:
    /// `dtype`: that of the cache, fp32 or bf16. With bf16 the residual stream is rounded to it in each block. Throws
    /// tessera::Error if matrices of a layer have several dtypes, or fp32 weights meet bf16.
    Block(const Config& config, const Weights& weights, tessera::DType dtype, std::int64_t positions, Memory& memory);

    /// Plans the calls of all layers of one step. False: a sequence brings several tokens, so that the step has to be
    /// computed otherwise.
    bool begin(const Batch& batch, std::int64_t page_size, Threads& threads);

    /// Computes the block of a layer in place. x: [rows, hidden_size], fp32 in host memory.
    void run(std::int64_t layer, const Attention& attention, std::vector<float>& x, Threads& threads);

 private:
    using Bytes = std::shared_ptr<std::byte>;
    struct Layer {
        Bytes norm, w_qkv, w_o, q_norm, k_norm;
    };
    Bytes upload(const void* from, std::size_t bytes);
    void upload(Buffer& buffer, const std::vector<std::int32_t>& from);
    tessera::TensorView view(const Bytes& data, tessera::DType dtype, std::initializer_list<std::int64_t> shape) const;

    const Config& config_;
    Memory& memory_;
    tessera::DecodeBlockProblem problem_;
    std::int64_t positions_;
    std::vector<Layer> layers_;
    Bytes cos_, sin_;
    // The data of a step.
    std::optional<tessera::DecodeBlockPlan> plan_;
    Buffer workspace_, x_, lengths_, page_table_;
    std::vector<std::uint16_t> narrow_;
};

}  // namespace llama
