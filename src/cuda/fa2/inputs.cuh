// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/fa2/work.cuh"
#include "cuda/tile/chunks.cuh"

namespace tessera::cuda::fa2 {

/// What a thread block reads, and where it puts it: Q, then a K and a V tile for each stage.
template <class T, Config kConfig>
struct Inputs {
    Source q, k, v;
    char* shared;

    __device__ Inputs(const Launch& launch, const Work& work, char* memory) : shared(memory) {
        const ForwardParams& p = launch.params;
        const Member& member = work.member;
        const int kv_head = work.head / p.group;
        q = source_of<T>(p.q, head_offset(p.q, work.batch, member.first_q, work.head, sizeof(T)), member.len_q,
                         p.head_dim, launch.vector_q);
        k = source_of<T>(p.k, head_offset(p.k, work.batch, member.first_kv, kv_head, sizeof(T)), member.len_kv,
                         p.head_dim, launch.vector_k);
        v = source_of<T>(p.v, head_offset(p.v, work.batch, member.first_kv, kv_head, sizeof(T)), member.len_kv,
                         p.head_dim_v, launch.vector_v);
    }

    __device__ __forceinline__ char* k_tile(int stage) const {
        return shared + kConfig.q_bytes() + 2 * stage * kConfig.kv_bytes();
    }
    __device__ __forceinline__ char* v_tile(int stage) const { return k_tile(stage) + kConfig.kv_bytes(); }

    __device__ __forceinline__ void load_q(int q_begin) const {
        load<kConfig.block_q(), kConfig.head_dim, kConfig.threads()>(shared, q, q_begin);
        ptx::cp_async_commit();
    }
    __device__ __forceinline__ void load_kv(int first_key, int stage) const {
        load<kConfig.block_kv, kConfig.head_dim, kConfig.threads()>(k_tile(stage), k, first_key);
        load<kConfig.block_kv, kConfig.head_dim, kConfig.threads()>(v_tile(stage), v, first_key);
        ptx::cp_async_commit();
    }
};

}  // namespace tessera::cuda::fa2
