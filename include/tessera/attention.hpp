// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "tessera/observer.hpp"
#include "tessera/plan.hpp"
#include "tessera/tensor.hpp"

#pragma GCC visibility push(default)
namespace tessera {

/// One task of a parallel loop. `worker` is in [0, workers); two tasks that run at the same time have different ones.
using TaskBody = std::function<void(std::int64_t task, int worker)>;

/// Runs body(task, worker) once for every task in [0, tasks), in any order, on at most `workers` threads, and returns
/// when all are done. An exception of a body is to be rethrown to the caller. No task waits for another.
using ParallelFor = std::function<void(std::int64_t tasks, int workers, const TaskBody& body)>;

/// How many tiles a call touched. The kernel itself counts them.
struct TileCounters {
    std::atomic<std::int64_t> full{0};            ///< tiles whose pairs are all visible: they ran without mask code
    std::atomic<std::int64_t> partial{0};         ///< tiles with visible and hidden pairs: they ran with the mask
    std::atomic<std::int64_t> skipped{0};         ///< tiles without a visible pair: nothing of them was read
    std::atomic<std::int64_t> computed_pairs{0};  ///< (query, key) pairs of the full and partial tiles, hidden ones too
};

/// How to run. Everything is optional.
struct Execution {
    ParallelFor parallel_for{};        ///< empty: tessera's own threads
    TileCounters* counters = nullptr;  ///< when set, the CPU kernels add their tile counts
    void* stream = nullptr;            ///< cudaStream_t; null: the default stream. Unused on the CPU
    TileObserver* observer = nullptr;  ///< when set, the CPU kernels report every tile to it
    /// CUDA: true takes every pointer to be memory of its view's device. Otherwise the call asks the driver for each
    /// one and throws for host memory, on which a kernel would fault.
    bool skip_memory_check = false;
};

/// The tensors of a forward call, all on plan.device. Shapes are [...] dense | [...] ragged; each tensor has strides of
/// its own. An optional tensor is left out by a default-constructed view (TensorView::given()).
///
/// cu_seqlens on a CUDA device are not validated, since reading them would wait for the device. The kernels clamp every
/// entry to 0..total and every length to the Problem's bound: entries that break the contract give wrong results, never
/// an access outside the tensors.
struct ForwardArgs {
    TensorView q;  ///< [batch, len_q, heads_q, head_dim]     | [total_q, heads_q, head_dim]
    /// [batch, len_kv, heads_kv, head_dim] | [total_kv, heads_kv, head_dim]; a cache: [slots, len_kv, heads_kv,
    /// head_dim] or [pages, page_size, heads_kv, head_dim]. k and v may share memory.
    TensorView k;
    TensorView v;               ///< [batch, len_kv, heads_kv, head_dim_v] | [total_kv, heads_kv, head_dim_v]
    TensorView bias{};          ///< [batch or 1, heads_q or 1, len_q or 1, len_kv or 1]; fp32 or the Problem's dtype
    TensorView alibi_slopes{};  ///< fp32 [heads_q] or [batch, heads_q]
    TensorView cu_seqlens_q{};  ///< ragged: int32 or int64 [batch + 1], from 0 up to at most total_q, never falling
    TensorView cu_seqlens_kv{};
    TensorView o;      ///< out: [batch, len_q, heads_q, head_dim_v] | [total_q, heads_q, head_dim_v]
    TensorView lse{};  ///< out, optional: fp32 [batch, heads_q, len_q] | [heads_q, total_q]; natural logarithm
    /// out, optional, for a bf16 or fp16 Problem whose Plan says o_residual: int8, shape of o. It is the part of O that
    /// rounding removed, in 256ths of O's last place (docs/numerics.md, "The residual of O").
    TensorView o_residual{};
    /// fp32 [heads_q], natural-log scores. exp(sink) is added to the sum of the softmax of each row of its head, as a
    /// key without a value adds its weight. Scale, softcap, bias, mask and dropout do not apply to it.
    TensorView sinks{};
    // A cache of keys, int32 each; on a CUDA device the host reads none of them. Lengths are clamped to 0..len_kv.
    TensorView kv_lengths{};         ///< [batch]: keys of each sequence, its left padding included
    TensorView page_table{};         ///< [batch, len_kv / page_size]: pages; entries past the length may be anything
    TensorView cache_batch_index{};  ///< [batch]: slots
    TensorView left_padding{};       ///< [batch]: the first key of each sequence; keys before it are ignored
};

/// The tensors of a backward call: inputs and results of the forward, the gradients of O and LSE, and the outputs.
struct BackwardArgs {
    TensorView q;
    TensorView k;
    TensorView v;
    TensorView bias{};
    TensorView alibi_slopes{};
    TensorView cu_seqlens_q{};
    TensorView cu_seqlens_kv{};
    TensorView o;        ///< as the forward gave it
    TensorView lse;      ///< as the forward gave it
    TensorView d_o;      ///< gradient of O, shape of o, strides of its own; "do" in messages
    TensorView dlse{};   ///< gradient of LSE, optional, shape and dtype of lse
    TensorView dq;       ///< out, optional like dk and dv: shape of q
    TensorView dk;       ///< out, shape of k
    TensorView dv;       ///< out, shape of v
    TensorView dbias{};  ///< out, when problem.bias_gradient: shape of bias (sizes 1 are summed over)
    /// The forward's o_residual, optional. A kernel whose Plan says o_residual saves two of its seven GEMMs with
    /// it; the others do not read it. The contract of the results is the same with and without it.
    TensorView o_residual{};
    TensorView sinks{};   ///< as the forward had them
    TensorView dsinks{};  ///< out, optional, only with problem.sinks: fp32 [heads_q]
};

/// Computes O = attention(Q, K, V), and LSE. Everything is validated first: a call that throws has changed nothing. On
/// a CUDA device the work is queued on how.stream: the call returns before it is done, and `workspace` is memory of
/// that device. Throws Error(invalid_argument) naming the tensor, Error(workspace_too_small) when `workspace` is
/// shorter than plan.workspace_bytes or not aligned to Plan::kWorkspaceAlignment, Error(unsupported) naming a tensor
/// whose strides or alignment a CUDA kernel does not take, Error(internal) when CUDA refuses a launch.
void forward(const Plan& plan, const ForwardArgs& args, std::span<std::byte> workspace, const Execution& how = {});

/// Computes dQ, dK, dV (and dbias, dsinks) from P, which is recomputed from Q, K and LSE: no N x N matrix is kept from
/// the forward. It is deterministic: the bits do not depend on the number of threads. Errors are those of forward().
void backward(const Plan& plan, const BackwardArgs& args, std::span<std::byte> workspace, const Execution& how = {});

/// Owns a workspace of the right size and alignment for plans, in host memory.
/// Throws Error(out_of_memory) when there is not so much memory.
class Workspace {
 public:
    explicit Workspace(std::size_t bytes);
    explicit Workspace(const Plan& plan) : Workspace(plan.workspace_bytes) {}
    std::span<std::byte> span() const { return {data_.get(), bytes_}; }
    operator std::span<std::byte>() const { return span(); }

 private:
    struct Free {
        void operator()(std::byte* p) const;
    };
    std::unique_ptr<std::byte[], Free> data_;
    std::size_t bytes_ = 0;
};

}  // namespace tessera
#pragma GCC visibility pop
