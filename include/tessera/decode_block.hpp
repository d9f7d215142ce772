// SPDX-License-Identifier: Apache-2.0
//
// The attention block of a decode step in one call: decode_block().
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/attention.hpp"
#include "tessera/plan.hpp"

#pragma GCC visibility push(default)
namespace tessera {

/// The attention block of a decoder layer for `batch` sequences with one new token each:
///
///     n = RMSNorm(x) * norm;   q, k, v = n w_qkv^T + b_qkv;   q, k: QK norm, rotary embedding;   k, v into the cache
///     o = attention(q, the cache up to and with the new key);   out = o w_o^T + b_o + residual
///
/// docs/decode-block.md says where results are rounded and in which order products are added.
struct DecodeBlockProblem {
    DType dtype = DType::bf16;          ///< of x, residual, the cache, o and out: bf16 or fp32 (CUDA: bf16)
    DType weights_dtype = DType::bf16;  ///< of w_qkv, b_qkv, w_o and b_o: bf16, or fp32 with a dtype of fp32
    std::int64_t batch = 1;
    std::int64_t hidden = 0;
    std::int64_t heads_q = 1;  ///< a multiple of heads_kv
    std::int64_t heads_kv = 1;
    std::int64_t head_dim = 64;  ///< 1..256; of v too

    std::int64_t capacity = 0;       ///< keys that a sequence can have; a multiple of page_size
    std::int64_t page_size = 0;      ///< 0: the cache is [slots, capacity, heads_kv, head_dim]
    bool cache_batch_index = false;  ///< without pages: the slot of each sequence is given
    bool left_padding = false;       ///< the first key of each sequence that counts is given

    std::int64_t window_left = unbounded;  ///< keys before the new one that its query sees
    std::optional<double> scale{};         ///< default 1 / sqrt(head_dim)
    double softcap = 0;                    ///< 0: none
    bool sinks = false;

    bool qkv_bias = false;
    bool out_bias = false;
    bool qk_norm = false;             ///< q_norm and k_norm are given (Qwen3)
    std::int64_t rotary_dim = 0;      ///< even, at most head_dim; 0: no rotary embedding
    bool rotary_interleaved = false;  ///< pairs are neighbours (GPT-J); otherwise i and i + rotary_dim / 2 (GPT-NeoX)
    double norm_eps = 1e-6;           ///< of the norm of x and of the QK norm

    /// Rows of w_qkv: those of Q, then K, then V, heads in order.
    std::int64_t qkv_rows() const { return (heads_q + 2 * heads_kv) * head_dim; }

    /// The attention of the block, as forward() would compute it: queries [batch, 1, heads_q, head_dim] on a cache.
    Problem attention() const;

    /// Throws Error(invalid_argument) naming the first field that breaks the contract.
    void validate() const;

    /// A line of text: "bf16 batch 1, hidden 2048, heads 32/8 of 64, capacity 1024 in pages of 16".
    std::string describe() const;

    friend bool operator==(const DecodeBlockProblem&, const DecodeBlockProblem&) = default;
};

/// How a block is computed. Both ways give the same bits on a device.
enum class DecodeBlockWay : std::uint8_t {
    one_launch,  ///< one persistent CUDA kernel
    chain        ///< one kernel after another: norm and GEMM, append, attention, GEMM
};

constexpr const char* name_of(DecodeBlockWay way) { return way == DecodeBlockWay::one_launch ? "one launch" : "chain"; }

struct DecodeBlockOptions {
    std::optional<DecodeBlockWay> way{};  ///< default: one launch where it runs
    std::optional<Device> device{};       ///< of the tensors; default: host memory
    int threads = 0;                      ///< on the CPU; 0: one per core that this process may use
    /// CUDA: one launch reads w_qkv before the kernel in front of it in the stream has ended (programmatic dependent
    /// launch). Neither that kernel nor one that it may itself run beside writes w_qkv.
    bool early_weights = false;
};

/// Says how a DecodeBlockProblem runs. It has no data pointer: one plan serves any number of calls.
struct DecodeBlockPlan {
    DecodeBlockProblem problem;
    DecodeBlockWay way = DecodeBlockWay::chain;
    Device device{};
    int threads = 1;
    bool early_weights = false;
    Plan attention{};                 ///< of the chain's forward()
    std::size_t workspace_bytes = 0;  ///< aligned to Plan::kWorkspaceAlignment
    /// The first bytes of the workspace, which have to be 0 before its first call and belong to decode_block() from
    /// then on: through them the thread blocks of one launch hand results to each other. Plans for one launch may share
    /// a workspace, of which the most bytes that one of them names have to be 0. All other bytes may hold anything at
    /// any call.
    std::size_t counter_bytes = 0;
    std::string refused{};  ///< why one launch does not run this Problem; empty if it does or `way` was asked for

    /// Several lines of text: the way with the reason, threads, workspace, and the plan of the attention.
    std::string describe() const;
};

/// The tensors of a call, all on plan.device. A row of a matrix or of x is contiguous; all other strides are free.
struct DecodeBlockArgs {
    TensorView x;         ///< [batch, hidden]
    TensorView norm;      ///< [hidden], the weights of the RMS norm, fp32 or the dtype of x
    TensorView w_qkv;     ///< [(heads_q + 2 * heads_kv) * head_dim, hidden], as in PyTorch's Linear
    TensorView b_qkv{};   ///< [(heads_q + 2 * heads_kv) * head_dim]
    TensorView q_norm{};  ///< [head_dim], fp32 or the dtype of x
    TensorView k_norm{};
    TensorView rotary_cos{};  ///< [positions, rotary_dim / 2], fp32 or the dtype of x
    TensorView rotary_sin{};
    TensorView positions{};          ///< int32 or int64 [batch], in rotary_cos. Default: kv_lengths
    TensorView k_cache;              ///< in and out: [pages or slots, page_size or capacity, heads_kv, head_dim]
    TensorView v_cache;              ///< the same; it may share memory with k_cache
    TensorView kv_lengths;           ///< int32 [batch]: keys before the call, which is the row of the new key
    TensorView page_table{};         ///< int32 [batch, capacity / page_size]
    TensorView cache_batch_index{};  ///< int32 [batch]
    TensorView left_padding{};       ///< int32 [batch]
    TensorView sinks{};              ///< fp32 [heads_q]
    TensorView w_o;                  ///< [hidden, heads_q * head_dim]
    TensorView b_o{};                ///< [hidden]
    TensorView residual{};           ///< [batch, hidden]. Default: x
    TensorView out;                  ///< out: [batch, hidden]; it may be x or residual itself
    TensorView o{};                  ///< out, optional: [batch, heads_q, head_dim], packed
    TensorView lse{};                ///< out, optional: fp32 [batch, heads_q]
};

/// Chooses the way. Throws Error(invalid_argument) for a Problem or option that breaks the contract, and
/// Error(device_unavailable) for a CUDA device that can't be used. If the way that was asked for, or every way, does
/// not run the Problem, it throws Error(unsupported) with the reason.
DecodeBlockPlan decode_block_plan(const DecodeBlockProblem& problem, const DecodeBlockOptions& options = {});

/// Computes the block. Everything is validated first: a call that throws has changed nothing. A sequence whose length
/// has no place in the cache (negative, past the capacity, no page) gets no new key, as in append(); its query then
/// sees the keys of its cache up to that length. On a CUDA device the work is queued on how.stream, and the host reads
/// no lengths, tables or positions. Calls that may run at the same time need workspaces of their own. Throws the errors
/// of forward() and append().
void decode_block(const DecodeBlockPlan& plan, const DecodeBlockArgs& args, std::span<std::byte> workspace,
                  const Execution& how = {});

}  // namespace tessera
#pragma GCC visibility pop
