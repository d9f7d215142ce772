// SPDX-License-Identifier: Apache-2.0
//
// The arguments of the backward's kernels, passed by value, and the functions that launch them.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/fa3/host/backward_config.h"
#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/fa3/host/key_block_list.hpp"
#include "cuda/fa3/host/numbering.hpp"
#include "cuda/fa3/host/softcap.hpp"
#include "cuda/host/work_list.hpp"
#include "cuda/tile/params.hpp"

namespace tessera::cuda::fa3::backward {

/// Data of 64 queries of a head, which the delta kernels pass to the main kernel. Query q of them stands at slot(q).
struct alignas(16) RowStats {
    /// A thread's accumulators are of columns 8 * j + 2 * t and the next one. The slots let it read those of two j with
    /// one 16-byte load.
    TESSERA_HOST_DEVICE static constexpr int slot(int q) { return q / 16 * 16 + q % 8 / 2 * 4 + q / 8 % 2 * 2 + q % 2; }
    /// In units of log2; -inf for rows without keys and rows past the end. In rows with a large |LSE| it is minus the
    /// largest score, in units of the natural logarithm: in those of log2 it may be infinite.
    float minus_lse[Config::kRows];
    float delta[Config::kRows];        ///< sum of P dP - dLSE
    float inverse_sum[Config::kRows];  ///< the factor of P in rows with a large |LSE|; 0 in others
    int some_large;                    ///< some row's inverse_sum is not 0
    int some_nonfinite;                ///< NaN or infinities in rows of Q or dO
    float slope;                       ///< the head's ALiBi slope; 0 without ALiBi
    int unused;
};

/// State of the call. The memset before the first kernel sets it to 0; in a ragged call, list_kernel does.
struct CallState {
    int cu_seqlens_decreased;  ///< sequences overlap, so their CTAs would wait for each other forever: nothing runs
    int some_large;            ///< with o_residual: some rows are left to the kernel that sums delta
    int nonfinite_keys;        ///< the main kernel has met NaN or infinities in K
};

/// fp16: upper bounds for |dS| over a head split (common/fp16_scale.cuh). |dS| is at most
/// sqrt(max_do_squares * max_v_squares) * keep_scale + addend. The memset sets them to 0, too.
struct DsBounds {
    float max_do_squares;  ///< with o_residual: the largest dO . dO of a row, as |dP| <= |dO| |V|
    float max_v_squares;   ///< with o_residual: the largest V . V of a row; only the first split's is used
    float addend;          ///< |delta|; without o_residual |delta| + |dP|
    int unused;
};

/// Memory of a call, in its workspace. The query blocks of a head are counted over all sequences.
struct Workspace {
    CallState* state;        // [1]
    unsigned* next_numbers;  // [parts of the queries]: number of the next key block to start. They start at 0, or, in a
                             // ragged call, where list_kernel sets them
    DsBounds* ds_bounds;     // fp16: [batch, heads_kv, head splits]
    ListedSequence* list;    // ragged: [list_items()]
    SequenceBlock* query_blocks;  // ragged: [query blocks], of one head
    RowStats* stats;              // [heads_q, query blocks, block_q / 64]
    int* dq_semaphores;  // [accumulators, heads_q, query blocks, 2 halves]: key blocks that have added to this half of
                         // dQ; with an order thread the semaphore of half 0 counts for both halves
    float* dq;           // [accumulators, heads_q, query blocks, block_q * padded head_dim], in accumulator layout
    float* split_dk;     // with head splits or parts of queries:
                         // [head splits, heads_kv, key blocks, block_kv * padded head_dim], in accumulator layout
    float* split_dv;     // like split_dk, with head_dim_v
};

struct TensorMaps {
    CUtensorMap q, k, v, d_o, dq, dk, dv;
};

/// The inputs that the kernels before the main one read with O.
struct OutputInputs {
    Rows residual;    ///< the low-order bits of O, a byte an element; null: delta is summed from P dP
    bool by_vectors;  ///< O, the residual and dO are read eight elements at a time
};

/// How gradients are written.
struct Outputs {
    bool tma_dq, tma_dk, tma_dv;           ///< the gradient is stored by TMA: it has a tensor map
    bool vector_dq, vector_dk, vector_dv;  ///< their rows can be written 16 bytes at a time
    bool only_dq;    ///< the main kernel is not launched, so the dQ kernel must look for NaN in K itself
    bool writes_dq;  ///< the last key block to add writes dQ: dq_convert_kernel is not launched
};

struct Launch {
    BackwardParams params;
    TensorMaps maps;
    Workspace workspace;
    OutputInputs output;
    Outputs gradients;
    KeyBlockNumbering key_blocks;
    QueryTileNumbering query_tiles;
    SequenceSchedule schedule;  ///< the schedule of every sequence, unless ragged
    float scale_log2;           ///< factor from Q K^T to units of log2; in shapes with a bias and general ones, of the
                                ///< scores
    int dq_accumulators;        ///< 0, 1 or 2
    int blocks_q;               ///< query blocks of one head, over all sequences
    int blocks_kv;              ///< key blocks of one head, over all sequences
    int multiprocessors;
    int part_queries;  ///< of a part in which a CTA has all heads of a group
    int part;          ///< the part of the queries that this launch of the main kernel has (cuda/host/query_parts.hpp)
    int parts;         ///< such launches
    int list_items;    ///< ragged: the capacity of the list
    Softcap softcap;   ///< capped shapes
    bool bias_by_pairs;    ///< takes_bias_pairs
    bool dbias_by_pairs;   ///< likewise for its gradient, which has its own sum for each query
    bool one_bias_a_tile;  ///< all scores that a tile of dbias is summed over have the same bias
};

/// The counter from which CTAs of the main kernel draw their numbers.
TESSERA_HOST_DEVICE inline unsigned* next_number(const Launch& launch) {
    return launch.workspace.next_numbers + launch.part;
}

/// Query blocks of the sequences before this one.
TESSERA_HOST_DEVICE constexpr std::int64_t first_block_q(const ForwardParams& p, int block_q, std::int64_t batch,
                                                         std::int64_t first_q) {
    if (p.cu_seqlens_q != nullptr) return first_q / block_q + batch;
    return batch * ((p.len_q + block_q - 1) / block_q);
}
/// Key blocks of the sequences before this one.
TESSERA_HOST_DEVICE constexpr std::int64_t first_block_kv(const ForwardParams& p, int block_kv, std::int64_t batch,
                                                          std::int64_t first_kv) {
    if (p.cu_seqlens_kv != nullptr) return first_kv / block_kv + batch;
    return batch * ((p.len_kv + block_kv - 1) / block_kv);
}

// The kernels of a call, in the order of their launches; instances/ has one instance of each.

/// Lists the work of a ragged call: Workspace::list, query_blocks, next_numbers and state.
template <int kBlockQ, int kBlockKv>
cudaError_t launch_list(const Launch& launch, cudaStream_t stream);
/// Computes delta from O and o_residual; launched only with o_residual.
template <class T, class Shape>
cudaError_t launch_delta_from_output(const Launch& launch, cudaStream_t stream);
/// Computes delta as the sum of P dP; with o_residual only for rows with a large |LSE|.
template <class T, class Shape>
cudaError_t launch_delta(const Launch& launch, cudaStream_t stream);
/// The main kernel.
template <class T, class Shape>
cudaError_t launch_backward(const Launch& launch, cudaStream_t stream);
/// Sums dK and dV over head splits and rounds them; launched only with head splits or parts of the queries.
template <class T, class Shape>
cudaError_t launch_dkdv_reduce(const Launch& launch, cudaStream_t stream);
/// Writes dQ from its accumulators, in shapes whose main kernel adds up dQ.
template <class T, class Shape>
cudaError_t launch_dq_convert(const Launch& launch, cudaStream_t stream);
/// Computes the gradient of the bias, in the shapes that take one.
template <class T, class Shape>
cudaError_t launch_bias_gradient(const Launch& launch, cudaStream_t stream);
/// Sums the gradient of the sinks.
template <int kBlockQ>
cudaError_t launch_sink_gradient(const Launch& launch, cudaStream_t stream);
/// Computes dQ, in shapes whose main kernel splits dV and dK between its warpgroups.
template <class T, class Shape>
cudaError_t launch_dq_kernel(const Launch& launch, cudaStream_t stream);

}  // namespace tessera::cuda::fa3::backward
