// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/gradient/main/cta_work.cuh"
#include "cuda/gradient/main/fragments.cuh"
#include "cuda/tile/chunks.cuh"

namespace tessera::cuda::gradient {

/// Shared memory of a CTA of the main kernel, and the copies into it: K, V, then for each stage the tiles of Q and dO
/// with their row data, then P (in fp32 where one warp hands it to another), then dS.
template <class T, Config kConfig>
struct CtaTiles {
    static constexpr int kThreads = kConfig.threads();
    const Launch& launch;
    const CtaWork& work;
    char* shared;

    __device__ __forceinline__ char* k_tile() const { return shared; }
    __device__ __forceinline__ char* v_tile() const { return shared + kConfig.kv_bytes(); }
    __device__ __forceinline__ char* q_tile(int stage) const {
        return shared + kConfig.stage_offset() + stage * kConfig.stage_bytes();
    }
    __device__ __forceinline__ char* do_tile(int stage) const {
        return q_tile(stage) + kConfig.query_tiles * kConfig.q_bytes();
    }
    __device__ __forceinline__ const RowTile& rows(int stage, int tile = 0) const {
        return reinterpret_cast<const RowTile*>(do_tile(stage) + kConfig.query_tiles * kConfig.q_bytes())[tile];
    }
    __device__ __forceinline__ char* p_tile() const { return shared + kConfig.p_offset(); }
    __device__ __forceinline__ char* ds_tile(int tile = 0) const {
        return shared + kConfig.ds_offset() + tile * kConfig.score_bytes();
    }

    /// The thread's number, hidden from the compiler but known to be positive.
    __device__ static __forceinline__ int thread() {
        return ptx::opaque(static_cast<int>(threadIdx.x)) & (kThreads - 1);
    }

    __device__ __forceinline__ DqSemaphore dq_semaphore() const { return {launch, work}; }
    __device__ __forceinline__ bool sees(int query, int key) const {
        return query < work.sequence.len_q && work.band32.sees(query, key);
    }
    /// The fp16 scale of dS of a query head.
    __device__ __forceinline__ float ds_scale(int head) const {
        return gradient::ds_scale<T>(launch, work.batch, head);
    }
    /// Partial dV or dK of the CTA's split, in the row of a key of the block.
    __device__ __forceinline__ float* partial_row(bool dv, int row) const {
        const ForwardParams& p = launch.params.forward;
        const bool ragged = p.cu_seqlens_kv != nullptr;
        const std::int64_t first = ragged ? work.sequence.first_kv : work.batch * p.len_kv;
        return launch.partial.row(dv, work.split, work.kv_head, first + work.first_key + row);
    }

    __device__ __forceinline__ void load_k() const {
        const ForwardParams& p = launch.params.forward;
        const std::int64_t k = head_offset(p.k, work.batch, work.sequence.first_kv, work.kv_head, sizeof(T));
        load<kConfig.block_kv(), kConfig.head_dim, kThreads>(
            k_tile(), source_of<T>(p.k, k, work.sequence.len_kv, p.head_dim, launch.vector_k), work.first_key,
            thread());
    }
    __device__ __forceinline__ void load_v() const {
        const ForwardParams& p = launch.params.forward;
        const std::int64_t v = head_offset(p.v, work.batch, work.sequence.first_kv, work.kv_head, sizeof(T));
        load<kConfig.block_kv(), kConfig.head_dim, kThreads>(
            v_tile(), source_of<T>(p.v, v, work.sequence.len_kv, p.head_dim_v, launch.vector_v), work.first_key,
            thread());
    }

    /// Starts the copies of Q, dO and the row data of step `index`.
    __device__ __forceinline__ void load_queries(int index, int stage) const {
        const Step step(launch, work, index);
        load_q(step.head, step.tile, stage, 0);
        load_do(step.head, step.tile, stage, 0);
        ptx::cp_async_commit();
    }
    /// Copies Q and the row data of tile `number` of a head into tile `slot` of the stage; rows past the end are 0.
    __device__ __forceinline__ void load_q(int head, int number, int stage, int slot) const {
        const ForwardParams& p = launch.params.forward;
        const Sequence& m = work.sequence;
        const int thread = this->thread();
        const int first = number * kBlockQ;
        const std::int64_t from = head_offset(p.q, work.batch, m.first_q, head, sizeof(T));
        load<kBlockQ, kConfig.head_dim, kThreads>(q_tile(stage) + slot * kConfig.q_bytes(),
                                                  source_of<T>(p.q, from, m.len_q, p.head_dim, launch.vector_q), first,
                                                  thread);
        constexpr int kCopies = sizeof(RowTile) / 16;
        if (thread < kCopies && first < m.len_q) {
            const RowTile* from_rows = launch.rows + first_tile(launch, m, work.batch, head) + number;
            ptx::cp_async_16(ptx::shared_address(&rows(stage, slot)) + thread * 16,
                             reinterpret_cast<const char*>(from_rows) + thread * 16, true);
        }
    }
    /// Copies dO of tile `number` of a head into tile `slot` of the stage; rows past the end are 0.
    __device__ __forceinline__ void load_do(int head, int number, int stage, int slot) const {
        const Rows& d_o = launch.params.d_o;
        const Sequence& m = work.sequence;
        const std::int64_t from = head_offset(d_o, work.batch, m.first_q, head, sizeof(T));
        load<kBlockQ, kConfig.head_dim, kThreads>(
            do_tile(stage) + slot * kConfig.q_bytes(),
            source_of<T>(d_o, from, m.len_q, launch.params.forward.head_dim_v, launch.vector_do), number * kBlockQ,
            thread());
    }
};

}  // namespace tessera::cuda::gradient
