// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of a thread block: the block of K and V that all work on, then for each group of warps its tile of
// queries and the place where the warps meet.
#pragma once

#include "cuda/fa1/host/config.h"
#include "cuda/ptx/barrier.cuh"

namespace tessera::cuda::fa1 {

template <Config kConfig>
struct Shared {
    char* memory;
    int group;  // of the calling thread
    int warp;   // in its group
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

    /// Four numbers of a thread's share of O on their way from warp to warp: those of unit `unit` (of the units that
    /// are exchanged at once), tile `tile` of the two that warp `to` owns, from its `turn`-th partner. A thread gets
    /// what the thread of the same lane held.
    __device__ __forceinline__ float4& part(int unit, int to, int turn, int tile) const {
        const int slot = ((unit * kWarps + to) * (kWarps - 1) + turn - 1) * 2 + tile;
        return reinterpret_cast<float4*>(parts())[slot * 32 + lane];
    }

    /// Did a block of V hold Inf or NaN?
    __device__ __forceinline__ bool& cleaned() const {
        return *reinterpret_cast<bool*>(memory + 2 * kConfig.kv_bytes() + kConfig.groups * kConfig.group_bytes());
    }

    /// All warps of the group have come here.
    __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(1 + group, kGroupThreads); }

 private:
    __device__ __forceinline__ char* parts() const { return q() + kConfig.q_bytes(); }
};

/// The partner of a warp in turn 1, 2 or 3; the same in both directions. Turn 0 is the warp itself.
__device__ __forceinline__ int partner(int warp, int turn) { return warp ^ turn; }

}  // namespace tessera::cuda::fa1
