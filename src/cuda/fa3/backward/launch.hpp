// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/fa3/host/backward_config.h"
#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/host/divider.hpp"
#include "cuda/tile/params.hpp"

namespace tessera::cuda::fa3::backward {

/// What the delta kernel tells the main kernel about 64 queries of a head. Query q of them stands at place(q).
struct alignas(16) RowStats {
    /// A thread's accumulators are of columns 8 * j + 2 * t, and the next one: those of two j are read at once.
    TESSERA_HOST_DEVICE static constexpr int place(int q) {
        return q / 16 * 16 + q % 8 / 2 * 4 + q / 8 % 2 * 2 + q % 2;
    }
    float minus_lse[Config::kRows];    ///< in units of log2; -inf for rows without keys and rows past the end
    float delta[Config::kRows];        ///< sum of P dP - dLSE
    float inverse_sum[Config::kRows];  ///< rows with a large LSE: what their P is to be multiplied by; others: 0
    int some_large;                    ///< some row's inverse_sum is not 0
    int some_nonfinite;                ///< NaN or infinities in rows of Q or dO
    int unused[2];
};

/// What is 0 before the call's first kernel.
struct Start {
    unsigned next_block;  ///< the number of the next thread block of the main kernel to start
    int broken;           ///< cu_seqlens fall: sequences that overlap would wait for each other for ever
    int some_large;       ///< with the residual of O: rows are left to the kernel that sums delta
    int nonfinite_keys;   ///< roles: there are NaN or infinities in K, as the main kernel has seen
};

/// 0 before the first kernel too: over every |dS| of a kv head and its query heads, or a share of them, in fp16
/// (units.cuh). The root of the product of the first two, and the third.
struct Limits {
    float d_o_squares;  ///< with the residual of O: of the largest row of dO, for |dP| <= |dO| |V|
    float v_squares;    ///< and of V; of all shares, in the first one
    float sum;          ///< what else is added: |delta|; where delta is summed, the largest |dP| beside it
    int unused;
};

/// Memory of a call, in its workspace. A head's blocks of queries are counted over all sequences (Blocks).
struct Workspace {
    Start* start;     // [1]
    RowStats* stats;  // [heads_q, blocks, block_q / 64]
    int* counters;    // [sums, heads_q, blocks, 2 halves]: how many have added to this half of dQ (or, in the first one
                      // of the two, to both: Config::order_kept)
    float* dq;        // [sums, heads_q, blocks, block_q * padded head_dim], as the warpgroups' accumulators lie
    float* dk;  // [shares, heads_kv, blocks of keys, block_kv * padded head_dim], as accumulators lie (shares.cuh)
    float* dv;  // the same of head_dim_v
};

struct Launch {
    BackwardParams params;
    CUtensorMap q, k, v, d_o, dq, dk, dv;
    Workspace workspace;
    float scale_log2;                                        ///< of Q K^T to scores in units of log2
    bool store_dq_by_tma, store_dk_by_tma, store_dv_by_tma;  ///< they have tensor maps
    bool only_dq;       ///< roles: the main kernel, which would look at K first, is left out
    int sums;           ///< of dQ: 2 where some block of keys goes round (shapes.hpp)
    Rows o_residual;    ///< what rounding took off O, a byte an element; null: delta is summed
    bool o_by_vectors;  ///< O, the bytes and dO are read eight elements at a time
    bool dq_by_vectors, dk_by_vectors, dv_by_vectors;  ///< their rows can be written 16 bytes at a time
    int blocks_q;                                      ///< blocks of queries of one head, over all sequences
    int parts;                                         ///< in which the blocks of keys of a head start
    int part_kv;        ///< blocks of keys of one part of one head of one sequence, at most
    int heads_at_once;  ///< of all sequences: their parts start one after the other, then those of the next heads
    Divider round, of_part_kv, of_part,
        of_last_part;                       ///< by blocks of all their parts; of one; of one of them all, ...
                                            ///< ... and of the last heads, which may be fewer
    Divider query_heads, last_query_heads;  ///< where queries are outer: heads at a time, and those that are left, ...
    Divider of_query_round;                 ///< ... and tiles of query_heads
    Divider shared_heads;                   ///< kv heads times shares
    Divider of_shares;                      ///< shares
    int shares;                             ///< of a group's query heads, the most that a sequence has
    unsigned numbers;                       ///< of blocks of keys, of all heads: whether they exist or not
    int heads;            ///< of all sequences, times shares: those that blocks of keys are counted over
    int blocks_kv;        ///< blocks of keys of one head, over all sequences
    BlockCounts blocks;   ///< of every sequence, unless ragged
    bool finishes;        ///< block of keys 0, the last to add, makes dQ of its sum: there is no dq_kernel
    int multiprocessors;  ///< of the device
    Limits* limits;       ///< fp16: [batch, heads_kv, shares], in the workspace, after Start
};

/// Blocks of queries before a sequence's first one.
TESSERA_HOST_DEVICE constexpr std::int64_t first_block_q(const ForwardParams& p, int block_q, std::int64_t batch,
                                                         std::int64_t first_q) {
    if (p.cu_seqlens_q != nullptr) return first_q / block_q + batch;
    return batch * ((p.len_q + block_q - 1) / block_q);
}
/// The same of keys.
TESSERA_HOST_DEVICE constexpr std::int64_t first_block_kv(const ForwardParams& p, int block_kv, std::int64_t batch,
                                                          std::int64_t first_kv) {
    if (p.cu_seqlens_kv != nullptr) return first_kv / block_kv + batch;
    return batch * ((p.len_kv + block_kv - 1) / block_kv);
}

/// Start the kernels; delta_of_output where there is the residual of O, shares where groups are shared out, dq_product
/// in the place of dq where the main kernel is split by roles. One instance each in instances/.
template <class T, class Shape>
cudaError_t start_delta_of_output(const Launch& launch, cudaStream_t stream);
template <class T, class Shape>
cudaError_t start_delta(const Launch& launch, cudaStream_t stream);
template <class T, class Shape>
cudaError_t start_backward(const Launch& launch, cudaStream_t stream);
template <class T, class Shape>
cudaError_t start_dq(const Launch& launch, cudaStream_t stream);
template <class T, class Shape>
cudaError_t start_shares(const Launch& launch, cudaStream_t stream);
template <class T, class Shape>
cudaError_t start_dq_product(const Launch& launch, cudaStream_t stream);

}  // namespace tessera::cuda::fa3::backward
