// SPDX-License-Identifier: Apache-2.0
#include "llama/model.hpp"

#include <algorithm>
#include <chrono>

#include "llama/bf16.hpp"
#include "llama/linear.hpp"

namespace llama {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Row r of a packed matrix with rows of `size`.
std::span<float> row(std::vector<float>& data, std::int64_t r, std::int64_t size) {
    return std::span(data).subspan(static_cast<std::size_t>(r * size), static_cast<std::size_t>(size));
}

void norm_rows(std::vector<float>& x, const std::vector<float>& weight, double eps, std::vector<float>& out) {
    out.resize(x.size());
    const auto size = static_cast<std::int64_t>(weight.size());
    for (std::int64_t r = 0; r * size < static_cast<std::int64_t>(x.size()); ++r) {
        rms_norm(row(x, r, size), weight, eps, row(out, r, size));
    }
}

/// The row of a token in the embedding matrix.
void embed(const Matrix& embedding, std::int32_t token, std::span<float> out) {
    for (std::size_t i = 0; i < out.size(); ++i) {
        const std::size_t at = static_cast<std::size_t>(token) * out.size() + i;
        out[i] = embedding.dtype == tessera::DType::bf16
                     ? from_bf16(static_cast<const std::uint16_t*>(embedding.data)[at])
                     : static_cast<const float*>(embedding.data)[at];
    }
}

}  // namespace

double BlockTimes::median(std::int64_t first_steps) const {
    std::vector<double> some(ms_a_token.begin(), ms_a_token.begin() + std::min(first_steps, steps()));
    if (some.empty()) return 0;
    const auto middle = some.begin() + std::ssize(some) / 2;
    std::nth_element(some.begin(), middle, some.end());
    return *middle;
}

Model::Model(const std::string& folder, const ModelOptions& options, Memory& memory)
    : config_(read_config(folder)),
      weights_(folder, config_),
      rotary_(config_),
      threads_(options.threads),
      attention_(config_, options.pages, options.page_size, options.dtype, memory),
      compared_steps_(options.compared_steps) {
    if (!options.block) return;
    const std::int64_t positions = std::min(options.pages * options.page_size, config_.max_positions);
    block_.emplace(config_, weights_, options.dtype, positions, memory);
}

std::vector<float> Model::forward(const Batch& batch) {
    const Clock::time_point start = Clock::now();
    const std::int64_t rows = batch.rows(), hidden = config_.hidden_size;
    x_.resize(static_cast<std::size_t>(rows * hidden));
    for (std::int64_t r = 0; r < rows; ++r) {
        embed(weights_.embedding, batch.tokens[static_cast<std::size_t>(r)], row(x_, r, hidden));
    }
    attention_.begin(batch, threads_);
    begin_blocks(batch);
    for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
        attention_of(layer, batch);
        feed_forward_of(layer, rows);
    }

    // The other rows were there for their keys and values only.
    const auto wanted = static_cast<std::int64_t>(batch.wanted_rows.size());
    for (std::int64_t n = 0; n < wanted; ++n) {
        const std::span<const float> from = row(x_, batch.wanted_rows[static_cast<std::size_t>(n)], hidden);
        std::copy(from.begin(), from.end(), row(x_, n, hidden).begin());
    }
    x_.resize(static_cast<std::size_t>(wanted * hidden));
    norm_rows(x_, weights_.final_norm, config_.rms_norm_eps, normed_);
    std::vector<float> logits;
    linear(weights_.output, normed_, wanted, logits);
    times_.all += seconds_since(start);
    return logits;
}

void Model::begin_blocks(const Batch& batch) {
    const Clock::time_point begin = Clock::now();
    by_block_ = block_ && block_->begin(batch, attention_.page_size(), threads_);
    if (!by_block_) return;
    compares_ = times_.blocks.steps() < compared_steps_;
    times_.blocks.begin_step();
    times_.blocks.add(seconds_since(begin), batch.rows());
    if (compares_) times_.compared_kernels.begin_step();
}

void Model::attention_of(std::int64_t layer, const Batch& batch) {
    if (!by_block_) return kernels_of(layer, batch);
    if (compares_) compare(layer, batch);
    const Clock::time_point begin = Clock::now();
    block_->run(layer, attention_, x_, threads_);
    const double seconds = seconds_since(begin);
    times_.attention += seconds;
    times_.blocks.add(seconds, batch.rows());
}

/// Times the separate kernels. Their result is dropped, and decode_block() writes the new key of the cache once more.
void Model::compare(std::int64_t layer, const Batch& batch) {
    const std::vector<float> x = x_;
    const Clock::time_point begin = Clock::now();
    kernels_of(layer, batch);
    times_.compared_kernels.add(seconds_since(begin), batch.rows());
    x_ = x;
}

void Model::kernels_of(std::int64_t layer, const Batch& batch) {
    const LayerWeights& w = weights_.layers[static_cast<std::size_t>(layer)];
    const std::int64_t rows = batch.rows(), dim = config_.head_dim;
    norm_rows(x_, w.input_norm, config_.rms_norm_eps, normed_);
    linear(w.q, normed_, rows, q_);
    linear(w.k, normed_, rows, k_);
    linear(w.v, normed_, rows, v_);
    if (config_.qk_norm) {
        norm_rows(q_, w.q_norm, config_.rms_norm_eps, q_);
        norm_rows(k_, w.k_norm, config_.rms_norm_eps, k_);
    }
    for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t position = batch.positions[static_cast<std::size_t>(r)];
        rotary_.rotate(row(q_, r, config_.heads_q * dim), position);
        rotary_.rotate(row(k_, r, config_.heads_kv * dim), position);
    }
    const Clock::time_point start = Clock::now();
    o_.resize(q_.size());
    attention_.run(layer, batch, q_.data(), k_.data(), v_.data(), o_.data(), threads_);
    times_.attention += seconds_since(start);
    linear(w.o, o_, rows, update_);
    add_to_residual();
}

void Model::feed_forward_of(std::int64_t layer, std::int64_t rows) {
    const LayerWeights& w = weights_.layers[static_cast<std::size_t>(layer)];
    norm_rows(x_, w.post_attention_norm, config_.rms_norm_eps, normed_);
    linear(w.gate, normed_, rows, gate_);
    linear(w.up, normed_, rows, up_);
    silu_times(gate_, up_);
    linear(w.down, gate_, rows, update_);
    add_to_residual();
}

void Model::linear(const Matrix& matrix, const std::vector<float>& x, std::int64_t rows, std::vector<float>& y) {
    const Clock::time_point start = Clock::now();
    y.resize(static_cast<std::size_t>(rows * matrix.outputs));
    llama::linear(matrix, x.data(), rows, y.data(), threads_);
    times_.linear += seconds_since(start);
}

void Model::add_to_residual() {
    for (std::size_t i = 0; i < x_.size(); ++i) x_[i] += update_[i];
}

}  // namespace llama
