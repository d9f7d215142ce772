// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/fa2/work.cuh"
#include "cuda/tile/chunks.cuh"

namespace tessera::cuda::fa2 {

/// What a thread block reads, and where it puts it: Q, then a K and a V tile for each stage. No register is held
/// between two tiles: strides and sizes are read from the launch, the rest from shared memory.
template <class T, Config kConfig>
struct Inputs {
    using KeyLoader = Loader<kConfig.block_kv, kConfig.head_dim, kConfig.threads()>;

    const Launch& launch;
    const Work& work;
    char* shared;

    __device__ __forceinline__ static Layout layout(const Rows& rows, int dim, bool vector) {
        constexpr std::int64_t kSize = sizeof(T);
        return {rows.row * kSize, rows.column * kSize, dim, vector};
    }
    __device__ __forceinline__ Layout k_layout() const {
        return layout(launch.params.k, launch.params.head_dim, launch.vector_k);
    }
    __device__ __forceinline__ Layout v_layout() const {
        return layout(launch.params.v, launch.params.head_dim_v, launch.vector_v);
    }
    __device__ __forceinline__ typename KeyLoader::Stream k_stream(int first_key) const {
        return {work.k, k_layout(), first_key};
    }
    __device__ __forceinline__ typename KeyLoader::Stream v_stream(int first_key) const {
        return {work.v, v_layout(), first_key};
    }
    __device__ __forceinline__ char* k_tile(int stage) const {
        return shared + kConfig.q_bytes() + stage * kConfig.stage_bytes();
    }
    __device__ __forceinline__ char* v_tile(int stage) const { return k_tile(stage) + kConfig.kv_bytes(); }

    __device__ __forceinline__ void load_q() const {
        using QueryLoader = Loader<kConfig.block_q(), kConfig.head_dim, kConfig.threads()>;
        const ForwardParams& p = launch.params;
        const char* data = p.q.data + head_offset(p.q, work.batch, work.member.first_q, work.head, sizeof(T));
        QueryLoader::load(shared, data, layout(p.q, p.head_dim, launch.vector_q), work.q_begin, work.member.len_q);
        ptx::cp_async_commit();
    }
    __device__ __forceinline__ void load_k(int first_key, int stage) const {
        KeyLoader::load(k_tile(stage), work.k, k_layout(), first_key, work.member.len_kv);
        ptx::cp_async_commit();
    }
    __device__ __forceinline__ void load_v(int first_key, int stage) const {
        KeyLoader::load(v_tile(stage), work.v, v_layout(), first_key, work.member.len_kv);
        ptx::cp_async_commit();
    }
};

}  // namespace tessera::cuda::fa2
