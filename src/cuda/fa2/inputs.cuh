// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/fa2/work.cuh"
#include "cuda/tile/chunks.cuh"

namespace tessera::cuda::fa2 {

/// Shared memory of a CTA, Q, then a K and a V tile for each stage, and the copies into it. No register is needed
/// between two tiles: strides and sizes are read from the launch, the rest from shared memory.
template <class T, Config kConfig>
struct Inputs {
    using KeyLoader = Loader<kConfig.block_kv, kConfig.head_dim, kConfig.threads()>;

    const Launch& launch;
    const Work& work;
    char* shared;

    __device__ __forceinline__ Source k() const {
        return {work.k,
                launch.params.k.row * std::int64_t{sizeof(T)},
                launch.params.k.column * std::int64_t{sizeof(T)},
                work.sequence.len_kv,
                launch.params.head_dim,
                launch.vector_k};
    }
    __device__ __forceinline__ Source v() const {
        return {work.v,
                launch.params.v.row * std::int64_t{sizeof(T)},
                launch.params.v.column * std::int64_t{sizeof(T)},
                work.sequence.len_kv,
                launch.params.head_dim_v,
                launch.vector_v};
    }
    __device__ __forceinline__ char* k_tile(int stage) const {
        return shared + kConfig.q_bytes() + stage * kConfig.stage_bytes();
    }
    __device__ __forceinline__ char* v_tile(int stage) const { return k_tile(stage) + kConfig.kv_bytes(); }

    __device__ __forceinline__ void load_q() const {
        const ForwardParams& p = launch.params;
        const std::int64_t from = head_offset(p.q, work.batch, work.sequence.first_q, work.head, sizeof(T));
        load<kConfig.block_q(), kConfig.head_dim, kConfig.threads()>(
            shared, source_of<T>(p.q, from, work.sequence.len_q, p.head_dim, launch.vector_q), work.q_begin);
        ptx::cp_async_commit();
    }
    __device__ __forceinline__ void load_k(int first_key, int stage) const {
        KeyLoader::load(k_tile(stage), k(), first_key, ptx::opaque(static_cast<int>(threadIdx.x)));
        ptx::cp_async_commit();
    }
    __device__ __forceinline__ void load_v(int first_key, int stage) const {
        KeyLoader::load(v_tile(stage), v(), first_key, ptx::opaque(static_cast<int>(threadIdx.x)));
        ptx::cp_async_commit();
    }
};

}  // namespace tessera::cuda::fa2
