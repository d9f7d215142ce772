// SPDX-License-Identifier: Apache-2.0
#include "llama/attention.hpp"

#include <algorithm>
#include <cstddef>

#include "llama/bf16.hpp"

namespace llama {

using tessera::DType, tessera::TensorView, tessera::dense_view;

Attention::Attention(const Config& config, std::int32_t pages, std::int64_t page_size, DType dtype, Memory& memory)
    : config_(config),
      memory_(memory),
      dtype_(dtype),
      pages_(pages),
      page_size_(page_size),
      layer_bytes_(pages * page_size * config.heads_kv * config.head_dim * size_of(dtype)) {
    cache_ = memory.allocate(static_cast<std::size_t>(bytes()), "the cache (pages)");
}

void Attention::begin(const Batch& batch, Threads& threads) {
    tessera::Problem problem;
    problem.dtype = dtype_;
    problem.batch = batch.sequences();
    problem.heads_q = config_.heads_q, problem.heads_kv = config_.heads_kv;
    problem.head_dim = problem.head_dim_v = config_.head_dim;
    problem.mask.causal = tessera::Causal::bottom_right;  // the last new token sees the last key
    problem.ragged = true;                                // sequences bring different numbers of new tokens
    problem.total_q = batch.rows();
    for (std::size_t b = 0; b + 1 < batch.first_rows.size(); ++b) {
        problem.len_q = std::max<std::int64_t>(problem.len_q, batch.first_rows[b + 1] - batch.first_rows[b]);
    }
    problem.kv_lengths = true;
    problem.page_size = page_size_;
    problem.len_kv = batch.pages_each * page_size_;  // the capacity; every sequence has a length of its own

    // The bits of a row are promised for each kernel, so every step uses the kernel of the first one: a text must not
    // depend on the sequences that happen to run beside it.
    tessera::PlanOptions options{.threads = threads.count(), .device = memory_.device()};
    if (plan_) options.kernel = plan_->kernel->name;
    plan_ = tessera::plan(problem, options);

    workspace_.reserve(memory_, plan_->workspace_bytes);
    upload(first_rows_, batch.first_rows);
    upload(lengths_, batch.lengths);
    upload(page_table_, batch.page_table);
}

void Attention::run(std::int64_t layer, const Batch& batch, const float* q, const float* k, const float* v, float* o,
                    Threads& threads) {
    append(cache(layer, 0), batch, k);
    append(cache(layer, 1), batch, v);
    const std::int64_t elements = batch.rows() * config_.heads_q * config_.head_dim;
    upload(q_, q, elements);
    std::byte* const o_there = o_.reserve(memory_, static_cast<std::size_t>(elements * size_of(dtype_)));

    const tessera::Device device = memory_.device();
    const auto rows = [&](const Buffer& data) {
        return dense_view(data.data.get(), dtype_, {batch.rows(), config_.heads_q, config_.head_dim}, device);
    };
    const std::int64_t sequences = batch.sequences();
    tessera::forward(
        *plan_,
        {.q = rows(q_),
         .k = pages(layer, 0),
         .v = pages(layer, 1),
         .cu_seqlens_q = dense_view(first_rows_.data.get(), DType::int32, {sequences + 1}, device),
         .o = rows(o_),
         .kv_lengths = dense_view(lengths_.data.get(), DType::int32, {sequences}, device),
         .page_table = dense_view(page_table_.data.get(), DType::int32, {sequences, batch.pages_each}, device)},
        {workspace_.data.get(), plan_->workspace_bytes},
        {.parallel_for = [&](std::int64_t tasks, int workers, const tessera::TaskBody& body) {
            threads.run(tasks, workers, body);
        }});

    if (dtype_ == DType::fp32) {
        memory_.copy_out(o, o_there, static_cast<std::size_t>(elements) * sizeof(float));
        return;
    }
    narrow_.resize(static_cast<std::size_t>(elements));
    memory_.copy_out(narrow_.data(), o_there, narrow_.size() * sizeof(std::uint16_t));
    for (const std::uint16_t bits : narrow_) *o++ = from_bf16(bits);
}

/// Rows of the batch in neighbouring slots are copied at once.
void Attention::append(std::byte* cache, const Batch& batch, const float* rows) {
    const std::int64_t row = config_.heads_kv * config_.head_dim;
    for (std::size_t first = 0, next = 0; first < batch.slots.size(); first = next) {
        while (next < batch.slots.size() &&
               batch.slots[next] - batch.slots[first] == static_cast<std::int64_t>(next - first)) {
            ++next;
        }
        const std::int64_t elements = static_cast<std::int64_t>(next - first) * row;
        memory_.copy_in(cache + batch.slots[first] * row * size_of(dtype_),
                        converted(rows + static_cast<std::int64_t>(first) * row, elements),
                        static_cast<std::size_t>(elements * size_of(dtype_)));
    }
}

const void* Attention::converted(const float* from, std::int64_t elements) {
    if (dtype_ == DType::fp32) return from;
    narrow_.resize(static_cast<std::size_t>(elements));
    for (std::size_t i = 0; i < narrow_.size(); ++i) narrow_[i] = to_bf16(from[i]);
    return narrow_.data();
}

void Attention::upload(Buffer& buffer, const float* from, std::int64_t elements) {
    const auto bytes = static_cast<std::size_t>(elements * size_of(dtype_));
    memory_.copy_in(buffer.reserve(memory_, bytes), converted(from, elements), bytes);
}

void Attention::upload(Buffer& buffer, const std::vector<std::int32_t>& from) {
    const std::size_t bytes = from.size() * sizeof(std::int32_t);
    memory_.copy_in(buffer.reserve(memory_, bytes), from.data(), bytes);
}

}  // namespace llama
