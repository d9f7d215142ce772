// SPDX-License-Identifier: Apache-2.0
//
// Attention of one sequence whose rows are spread over the ranks of a group, each with a device of its own
// (docs/context-parallel.md):
//
//     auto ranks = nccl_communicator(comm);                                // an ncclComm_t that the caller made
//     ContextParallel attention = context_parallel(whole, *ranks, {.device = device});
//     attention.forward({.q = q, .k = k, .v = v, .o = o, .lse = lse}, workspace, {.stream = stream});
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/attention.hpp"
#include "tessera/problem.hpp"

struct ncclComm;  // of NCCL; ncclComm_t is a pointer to it

#pragma GCC visibility push(default)
namespace tessera {

/// A contiguous range of memory that is sent to a rank or received from it.
struct Message {
    int rank = 0;
    void* data = nullptr;
    std::size_t bytes = 0;
};

/// The ranks of a group, and how memory goes from one to another. nccl_communicator() makes one for NCCL; a class of
/// the caller's own can stand on any other library.
class Communicator {
 public:
    virtual ~Communicator();
    virtual int rank() const = 0;
    virtual int ranks() const = 0;

    /// Moves all messages. Two ranks have the messages between them in one order, and every rank makes its calls in one
    /// order. On a CUDA device the exchange is queued on `stream` (a cudaStream_t); otherwise it has ended on return.
    /// No message goes from a rank to itself.
    virtual void exchange(std::span<const Message> sends, std::span<const Message> receives, void* stream) = 0;
};

/// A Communicator over an ncclComm_t, which must outlive it and stays the caller's. libnccl is the one that the process
/// has loaded, or libnccl.so.2. Throws Error(unsupported) when there is none, Error(device_unavailable) with NCCL's
/// words when NCCL refuses the communicator.
std::unique_ptr<Communicator> nccl_communicator(ncclComm* comm);

/// Which rows of the sequence a rank holds.
enum class SequenceOrder : std::uint8_t {
    zigzag,       ///< the chunks r and 2 ranks - 1 - r of 2 ranks: equal work under a causal mask
    contiguous,   ///< chunk r of `ranks`
    permutation,  ///< row i of rank r is the position permutation[r * rows + i]
};

/// The caller's wishes. All ranks give the same ones, but for the device.
struct ContextParallelOptions {
    SequenceOrder order = SequenceOrder::zigzag;
    std::span<const std::int64_t> permutation{};  ///< [total], with SequenceOrder::permutation alone
    /// [batch + 1], with a ragged Problem alone: offsets of its documents in the whole sequence, in host memory.
    std::span<const std::int64_t> cu_seqlens{};
    /// Into how many equal blocks of rows the backward is cut. dQ, dK and dV then have the same bits on every number
    /// of ranks whose rows consist of whole blocks. 0: the runs of rows that a rank holds, which is the fastest.
    std::int64_t gradient_blocks = 0;
    /// Into how many groups the key heads are cut: one travels while the kernels of another run. No bit depends on it.
    /// 0: 1 on the CPU; on CUDA by the bytes of a rank's K and V, 1 to 8.
    int steps = 0;
    std::string forward_kernel{};   ///< name of a kernel; empty: plan() chooses
    std::string backward_kernel{};  ///< likewise
    int threads = 0;                ///< as in PlanOptions
    Device device{};                ///< where this rank's tensors lie
};

/// Attention of one Problem on this rank of a group. It serves any number of calls, one at a time, and every rank
/// makes the same calls in one order.
///
/// Tensors are this rank's rows: [batch, rows, heads, head_dim], or [rows, heads, head_dim] with documents; lse is
/// [batch, heads_q, rows] or [heads_q, rows]. The heads of a row of k, v, dk and dv lie side by side. Optional tensors
/// of ForwardArgs that this interface does not take (bias, slopes, sinks, a cache) and cu_seqlens are not given.
class ContextParallel {
 public:
    struct State;
    explicit ContextParallel(std::unique_ptr<State> state);
    ContextParallel(ContextParallel&&) noexcept;
    ContextParallel& operator=(ContextParallel&&) noexcept;
    ~ContextParallel();

    /// The position in the sequence of each of this rank's rows, [rows].
    std::span<const std::int64_t> positions() const;

    /// Bytes of the workspace of a call, which lies on the device and is aligned to Plan::kWorkspaceAlignment.
    std::size_t workspace_bytes(Pass pass) const;

    /// O and LSE of this rank's rows, with the bits of one process that computes the whole Problem with the same
    /// kernel. Errors are those of tessera::forward(), and Error(unsupported) for tensors that this interface does not
    /// take. An error on one rank alone leaves the others in the exchange.
    void forward(const ForwardArgs& args, std::span<std::byte> workspace, const Execution& how = {});

    /// dQ of this rank's queries, and dK and dV of its keys: the sums over the queries of all ranks, in fp32 and in the
    /// order of the sequence. All three are given. Errors are those of forward().
    void backward(const BackwardArgs& args, std::span<std::byte> workspace, const Execution& how = {});

 private:
    std::unique_ptr<State> state_;
};

/// Plans attention of `whole` on this rank. `whole` is the Problem of one process: dense with len_q == len_kv, or
/// ragged with total_q == total_kv, whose sequences are the documents. `communicator` must outlive the result.
///
/// All ranks call it together and compare what they were given: if one refuses its arguments or they differ, every
/// rank throws Error(invalid_argument) that names the argument and the ranks. The host waits for the others here, and
/// in no later call. Throws Error(unsupported) for bias, ALiBi, sinks, dropout and a cache of keys.
ContextParallel context_parallel(const Problem& whole, Communicator& communicator,
                                 const ContextParallelOptions& options = {});

/// Adds parts of dK and dV in a given order: row r of dk and dv is the sum, in fp32, of the rows sources[first[r]] up
/// to sources[first[r + 1]] of `parts`, in this order. For callers with an exchange of their own.
///
/// parts: [parts, heads * head_dim + heads * head_dim_v], a row of dK followed by the one of dV, packed. first: int64
/// [rows + 1]; sources: int64 [first[rows]]; on a CUDA device the host reads neither. dk: [rows, heads, head_dim] and
/// dv: [rows, heads, head_dim_v], whose heads lie side by side. Only how.stream is used. Throws
/// Error(invalid_argument).
void add_parts(const TensorView& parts, const TensorView& first, const TensorView& sources, const TensorView& dk,
               const TensorView& dv, const Execution& how = {});

/// Copies rows of K and V side by side, for callers with an exchange of their own: row to[i] of the targets is row
/// from[i] of k followed by the one of v. The rows of `first` and `second` are counted one after another.
///
/// first, second: [rows, heads * head_dim + heads * head_dim_v], packed; k: [rows, heads, head_dim], v: [rows, heads,
/// head_dim_v], whose heads lie side by side; from, to: int64 [copies], which the host does not read on a CUDA device.
/// Only how.stream is used. Throws Error(invalid_argument).
void copy_rows(const TensorView& first, const TensorView& second, const TensorView& k, const TensorView& v,
               const TensorView& from, const TensorView& to, const Execution& how = {});

}  // namespace tessera
#pragma GCC visibility pop
