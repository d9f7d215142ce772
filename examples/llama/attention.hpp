// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llama/batch.hpp"
#include "llama/config.hpp"
#include "llama/memory.hpp"
#include "llama/threads.hpp"
#include "tessera/tessera.hpp"

namespace llama {

/// The cache of keys and values of all layers, and the attention over it: the part of this program that shows tessera.
class Attention {
 public:
    /// A cache of `pages` pages of `page_size` tokens, in `dtype` (fp32 or bf16; Q and O have the same).
    Attention(const Config& config, std::int32_t pages, std::int64_t page_size, tessera::DType dtype, Memory& memory);

    /// Plans the calls of all layers of one step, and takes the batch's lengths and page table to the device.
    void begin(const Batch& batch, Threads& threads);

    /// Writes the new rows of K and V into their slots, then computes O. q, o: [rows, heads_q, head_dim]; k, v: [rows,
    /// heads_kv, head_dim], fp32 in host memory.
    void run(std::int64_t layer, const Batch& batch, const float* q, const float* k, const float* v, float* o,
             Threads& threads);

    /// K (which = 0) or V (which = 1) of a layer: [pages, page_size, heads_kv, head_dim].
    tessera::TensorView pages(std::int64_t layer, std::int64_t which) const {
        return tessera::dense_view(cache(layer, which), dtype_,
                                   {pages_, page_size_, config_.heads_kv, config_.head_dim}, memory_.device());
    }
    std::int64_t page_size() const { return page_size_; }

    std::int64_t bytes() const { return 2 * layer_bytes_ * config_.layers; }

    /// The kernel and the instruction set or device, once a step has been planned: "cpu.fa2.forward on AVX3".
    std::string kernel() const { return plan_ ? plan_->kernel->name + " on " + plan_->target : "none"; }

 private:
    void upload(Buffer& buffer, const float* from, std::int64_t elements);
    void upload(Buffer& buffer, const std::vector<std::int32_t>& from);
    void append(std::byte* cache, const Batch& batch, const float* rows);
    std::byte* cache(std::int64_t layer, std::int64_t which) const {
        return cache_.get() + (2 * layer + which) * layer_bytes_;
    }
    /// The numbers in the cache's dtype.
    const void* converted(const float* from, std::int64_t elements);

    const Config& config_;
    Memory& memory_;
    tessera::DType dtype_;
    std::int64_t pages_;
    std::int64_t page_size_;
    std::int64_t layer_bytes_;  // of K or of V
    std::shared_ptr<std::byte> cache_;
    std::optional<tessera::Plan> plan_;
    Buffer workspace_, q_, o_, first_rows_, lengths_, page_table_;
    std::vector<std::uint16_t> narrow_;
};

}  // namespace llama
