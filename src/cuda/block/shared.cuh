// SPDX-License-Identifier: Apache-2.0
//
// The shared memory of a CTA, and the ring of stages through which its loading warps hand weights, K and V to the
// computing warps.
#pragma once

#include <cuda_bf16.h>

#include "cuda/block/launch.hpp"
#include "cuda/decode/load.cuh"
#include "cuda/ptx/handoff.cuh"

namespace tessera::cuda::block {

using Element = __nv_bfloat16;

/// The named barriers of a CTA; 0 is that of __syncthreads().
inline constexpr int kOfComputing = 1;  ///< all computing warps
inline constexpr int kOfHalf = 2;       ///< and 3: a half of them, which has a split of the keys

/// A sequence and its new key, as the launch sees them.
struct Member {
    std::int64_t slot = 0;     ///< without pages
    int first_kv = 0;          ///< row of its first key that counts
    Span visible{0, 0};        ///< keys that the new query sees, with the new one
    decode::Splits splits;     ///< of the visible keys
    append_rows::Place place;  ///< of the new key; slot -1: it is not written
    int end = 0;               ///< work items of the sequences up to this one
};

/// What a half of the computing warps has of its split: Q, what the warps tell each other, the new key.
template <int kHeadDim>
struct Half {
    alignas(128) char queries[Config::kRowsOfTile * kHeadDim * 2];  ///< in panels of 64 dims
    decode::SliceExchange exchange[2];                              ///< tiles with even and odd numbers in their split
    decode::RowInfo rows[Config::kRowsOfTile];
    Element heads[Config::kRowsOfTile + 2][kHeadDim];  ///< the query heads, new K, new V
};

template <int kHeadDim>
struct Shared {
    Half<kHeadDim> halves[2];
    float2 sums[2][Config::kWarps][32];  ///< a unit's products of each warp's columns; units with even and odd numbers
    float squares[Config::kMostBatch][Config::kWarps];
    Member members[Config::kMostBatch];
    ptx::Mbarrier full[Config::kMostStages];
    ptx::Mbarrier empty[Config::kMostStages];
    ptx::Mbarrier members_known;
};

/// The place of a warp in the ring.
struct Position {
    int stage = 0;
    std::uint32_t parity = 0;  ///< of the round

    __device__ __forceinline__ void next(int stages) {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
    /// Past `count` stages.
    __device__ __forceinline__ void skip(int count, int stages) {
        for (; count > 0; --count) next(stages);
    }
};

/// A CTA's view of its shared memory. Every stage has 32 arrivals when it is filled, one of each lane of the warp that
/// loads it, and 8 when it is emptied: one of each computing warp, or two of each of the four that share a split.
template <class Shape>
struct Block {
    static constexpr Config kConfig = Shape::kConfig;
    static constexpr int kHeadDim = kConfig.head_dim;
    const Launch& launch;
    Shared<kHeadDim>& shared;
    char* memory;
    int warp;
    int lane;

    __device__ __forceinline__ char* rows() const { return memory + launch.layout.rows; }
    __device__ __forceinline__ char* stage(const Position& at) const {
        return memory + launch.layout.ring + at.stage * kConfig.stage_bytes();
    }
    __device__ __forceinline__ void next(Position& at) const { at.next(launch.layout.stages); }
    __device__ __forceinline__ void wait_empty(const Position& at) const {
        decode::wait(shared.empty[at.stage], at.parity ^ 1);
    }
    __device__ __forceinline__ void wait_full(const Position& at) const {
        decode::wait(shared.full[at.stage], at.parity);
    }
    /// By every warp that read the stage, with its `arrivals`.
    __device__ __forceinline__ void release(Position& at, int arrivals) const {
        __syncwarp();
        if (lane < arrivals) ptx::mbarrier_arrive(shared.empty[at.stage]);
        next(at);
    }
    __device__ __forceinline__ void sync_computing() const {
        ptx::named_barrier_sync(kOfComputing, 32 * Config::kWarps);
    }

    /// By one thread, before a __syncthreads().
    __device__ void init_barriers() const {
        for (int s = 0; s < launch.layout.stages; ++s) {
            ptx::mbarrier_init(shared.full[s], 32);
            ptx::mbarrier_init(shared.empty[s], Config::kWarps);
        }
        ptx::mbarrier_init(shared.members_known, 32);
        ptx::fence_mbarrier_init();
    }
};

/// Records the time of a mark. By one thread of the CTA.
__device__ __forceinline__ void record(const Launch& launch, Mark mark) {
    if (launch.marks == nullptr) return;
    launch.marks[blockIdx.x * static_cast<int>(Mark::count) + static_cast<int>(mark)] = ptx::global_nanoseconds();
}

}  // namespace tessera::cuda::block
