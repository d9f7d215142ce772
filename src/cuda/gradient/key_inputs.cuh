// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/gradient/key_work.cuh"
#include "cuda/tile/chunks.cuh"

namespace tessera::cuda::gradient {

/// What a block of keys reads, and where it puts it in shared memory: K, V, then for each stage a tile of Q, of dO and
/// their row data, then the weights that one warp hands to another, then dS.
template <class T, Config kConfig>
struct KeyInputs {
    static constexpr int kThreads = kConfig.threads();
    const Launch& launch;
    const KeyWork& work;
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
    __device__ __forceinline__ char* weights() const { return shared + kConfig.weights_offset(); }
    __device__ __forceinline__ char* ds(int tile = 0) const {
        return shared + kConfig.ds_offset() + tile * kConfig.score_bytes();
    }

    /// Hidden from the compiler, which would keep what follows from it in registers over all steps; but that it is
    /// positive is known.
    __device__ static __forceinline__ int thread() {
        return ptx::opaque(static_cast<int>(threadIdx.x)) & (kThreads - 1);
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

    /// Q, dO and the row data of a step.
    __device__ __forceinline__ void load_queries(int index, int stage) const {
        load_queries(Step(launch, work, index), stage);
    }
    __device__ __forceinline__ void load_queries(const Step& step, int stage) const {
        load_q(step.head, step.tile, stage, 0);
        load_do(step.head, step.tile, stage, 0);
        ptx::cp_async_commit();
    }
    /// Tile `number` of a head's queries, as tile `place` of the stage: Q and the row data. One that does not exist is
    /// zeros.
    __device__ __forceinline__ void load_q(int head, int number, int stage, int place) const {
        const ForwardParams& p = launch.params.forward;
        const Sequence& m = work.sequence;
        const int thread = this->thread();
        const int first = number * kBlockQ;
        const std::int64_t from = head_offset(p.q, work.batch, m.first_q, head, sizeof(T));
        load<kBlockQ, kConfig.head_dim, kThreads>(q_tile(stage) + place * kConfig.q_bytes(),
                                                  source_of<T>(p.q, from, m.len_q, p.head_dim, launch.vector_q), first,
                                                  thread);
        constexpr int kCopies = sizeof(RowTile) / 16;
        if (thread < kCopies && first < m.len_q) {
            const RowTile* from_rows = launch.rows + first_tile(launch, m, work.batch, head) + number;
            ptx::cp_async_16(ptx::shared_address(&rows(stage, place)) + thread * 16,
                             reinterpret_cast<const char*>(from_rows) + thread * 16, true);
        }
    }
    /// Likewise dO.
    __device__ __forceinline__ void load_do(int head, int number, int stage, int place) const {
        const Rows& d_o = launch.params.d_o;
        const Sequence& m = work.sequence;
        const std::int64_t from = head_offset(d_o, work.batch, m.first_q, head, sizeof(T));
        load<kBlockQ, kConfig.head_dim, kThreads>(
            do_tile(stage) + place * kConfig.q_bytes(),
            source_of<T>(d_o, from, m.len_q, launch.params.forward.head_dim_v, launch.vector_do), number * kBlockQ,
            thread());
    }
};

}  // namespace tessera::cuda::gradient
