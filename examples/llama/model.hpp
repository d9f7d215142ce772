// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "llama/attention.hpp"
#include "llama/batch.hpp"
#include "llama/block.hpp"
#include "llama/config.hpp"
#include "llama/layers.hpp"
#include "llama/threads.hpp"
#include "llama/weights.hpp"

namespace llama {

/// The time of the attention blocks, from the norm to the residual, in steps of one token for each sequence.
struct BlockTimes {
    std::vector<double> ms_a_token;  ///< of each step

    std::int64_t steps() const { return std::ssize(ms_a_token); }
    void begin_step() { ms_a_token.push_back(0); }
    void add(double seconds, std::int64_t tokens) { ms_a_token.back() += 1e3 * seconds / static_cast<double>(tokens); }
    /// The median of the first steps; 0 if there is none.
    double median(std::int64_t first_steps) const;
};

/// The seconds that the steps took.
struct Times {
    double all = 0;
    double attention = 0;  ///< tessera's call, and K and V on their way into the cache; with --block the whole block
    double linear = 0;     ///< matrix products
    BlockTimes blocks;     ///< by tessera::decode_block()
    BlockTimes compared_kernels;  ///< by the separate kernels, in the first of these steps (compared_steps)
};

/// How to run a model.
struct ModelOptions {
    std::int32_t pages = 256;
    std::int64_t page_size = 16;                  ///< tokens
    tessera::DType dtype = tessera::DType::fp32;  ///< of the cache and of the attention: fp32 or bf16
    int threads = 0;                              ///< 0: as many as this process may use
    bool block = false;  ///< steps of one token for each sequence: attention blocks by tessera::decode_block()
    std::int64_t compared_steps = 0;  ///< the first of these steps also run, and time, the separate kernels
};

/// A decoder of Llama's or Qwen3's shape with its cache. Everything but the cache's dtype is fp32.
class Model {
 public:
    Model(const std::string& folder, const ModelOptions& options, Memory& memory);

    /// Computes the rows of the batch, whose K and V enter the cache, and returns the logits of batch.wanted_rows,
    /// [wanted, vocab_size].
    std::vector<float> forward(const Batch& batch);

    const Config& config() const { return config_; }
    const Weights& weights() const { return weights_; }
    const Attention& attention() const { return attention_; }
    const Times& times() const { return times_; }
    int threads() const { return threads_.count(); }

 private:
    void begin_blocks(const Batch& batch);
    void attention_of(std::int64_t layer, const Batch& batch);
    void compare(std::int64_t layer, const Batch& batch);
    void kernels_of(std::int64_t layer, const Batch& batch);
    void feed_forward_of(std::int64_t layer, std::int64_t rows);
    void linear(const Matrix& matrix, const std::vector<float>& x, std::int64_t rows, std::vector<float>& y);
    void add_to_residual();

    Config config_;
    Weights weights_;
    Rotary rotary_;
    Threads threads_;
    Attention attention_;
    std::optional<Block> block_;
    std::int64_t compared_steps_;
    bool by_block_ = false, compares_ = false;  // in this step
    Times times_;
    std::vector<float> x_;          // [rows, hidden_size]: the residual stream
    std::vector<float> normed_;     // [rows, hidden_size]
    std::vector<float> q_, k_, v_;  // [rows, heads, head_dim]
    std::vector<float> o_;          // [rows, heads_q, head_dim]
    std::vector<float> gate_, up_;  // [rows, intermediate_size]
    std::vector<float> update_;     // [rows, hidden_size]
};

}  // namespace llama
