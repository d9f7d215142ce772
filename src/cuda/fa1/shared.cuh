// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of a CTA: the K/V block for all warps, then for each group of warps its query tile and the buffers of
// the exchange.
#pragma once

#include "cuda/fa1/host/config.h"
#include "cuda/ptx/barrier.cuh"

namespace tessera::cuda::fa1 {

template <Config kConfig>
struct Shared {
    char* memory;
    int group;  // the calling thread's group of warps
    int warp;   // the thread's warp, numbered in its group
    int lane;

    __device__ explicit Shared(char* memory)
        : memory(memory),
          group(static_cast<int>(threadIdx.x) / kGroupThreads),
          warp(static_cast<int>(threadIdx.x) % kGroupThreads / 32),
          lane(static_cast<int>(threadIdx.x) % 32) {}

    __device__ __forceinline__ char* k() const { return memory; }
    __device__ __forceinline__ char* v() const { return memory + kConfig.kv_bytes(); }
    __device__ __forceinline__ char* q() const { return v() + kConfig.kv_bytes() + group * kConfig.group_bytes(); }
    /// m and l of a row over the keys of warp `of`.
    __device__ __forceinline__ float2& ml(int of, int row) const {
        return reinterpret_cast<float2*>(parts() +
                                         kConfig.units_at_once() * kConfig.unit_bytes())[of * kConfig.block_q() + row];
    }

    /// A float4 of O that a warp sends to warp `to`, the partner at `distance`, for the thread of the same lane. It
    /// belongs to unit `unit` of those exchanged at once, and to tile `tile` of the two that `to` owns in it.
    __device__ __forceinline__ float4& part(int unit, int to, int distance, int tile) const {
        const int slot = ((unit * kWarps + to) * (kWarps - 1) + distance - 1) * 2 + tile;
        return reinterpret_cast<float4*>(parts())[slot * 32 + lane];
    }

    /// True if Inf or NaN in V were replaced by 0.
    __device__ __forceinline__ bool& replaced() const {
        return *reinterpret_cast<bool*>(memory + 2 * kConfig.kv_bytes() + kConfig.groups * kConfig.group_bytes());
    }

    /// The barrier of the group's warps.
    __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(1 + group, kGroupThreads); }

 private:
    __device__ __forceinline__ char* parts() const { return q() + kConfig.q_bytes(); }
};

/// The partner of a warp at distance 1, 2 or 3, which is the same in both directions; 0 is the warp itself.
__device__ __forceinline__ int partner(int warp, int distance) { return warp ^ distance; }

}  // namespace tessera::cuda::fa1
