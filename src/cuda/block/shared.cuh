// SPDX-License-Identifier: Apache-2.0
//
// The shared memory of a CTA, and the ring of stages through which its loading warps hand weights, K and V to the
// computing warps.
#pragma once

#include <cuda_bf16.h>

#include <cstdio>

#include "cuda/append/append.cuh"
#include "cuda/block/launch.hpp"
#include "cuda/decode/load.cuh"
#include "cuda/ptx/handoff.cuh"

namespace tessera::cuda::block {

using Element = __nv_bfloat16;

/// The named barriers of a CTA; 0 is that of __syncthreads().
inline constexpr int kOfComputing = 1;  ///< all computing warps
inline constexpr int kOfGroup = 2;      ///< and the next ones: those of a group, which has a split of the keys

/// A sequence and its new key, as the launch sees them.
struct Member {
    std::int64_t slot = 0;     ///< without pages
    int first_kv = 0;          ///< row of its first key that counts
    Span visible{0, 0};        ///< keys that the new query sees, with the new one
    decode::Splits splits;     ///< of the visible keys
    append_rows::Place place;  ///< of the new key; slot -1: it is not written
    int end = 0;               ///< work items of the sequences up to this one
};

/// What a group of warps has of its split: Q, what the warps tell each other, the new key.
template <int kHeadDim>
struct Group {
    alignas(128) char queries[Config::kRowsOfTile * kHeadDim * 2];  ///< in panels of 64 dims
    decode::SliceExchange exchange[2];                              ///< tiles with even and odd numbers in their split
    decode::RowInfo rows[Config::kRowsOfTile];
    Element heads[Config::kRowsOfTile + 2][kHeadDim];  ///< the query heads, new K, new V
};

template <class Shape>
struct Shared {
    static constexpr int kHeadDim = Shape::kConfig.head_dim, kWarps = Shape::kConfig.warps;
    float2 sums[2][kWarps][32];  ///< a unit's products of each warp's columns; units with even and odd numbers
    float squares[Config::kMostBatch][kWarps];
    float factors[Config::kMostBatch];
    float2 rotary[Config::kMostBatch][kHeadDim / 2];  ///< cosine and sine of the pairs at a sequence's new position
    float norms[2][kHeadDim];                         ///< the weights of the QK norm, of Q and of K
    Member members[Config::kMostBatch];
    ptx::Mbarrier full[Config::kMostStages];
    ptx::Mbarrier empty[Config::kMostStages];
    ptx::Mbarrier known;          ///< members and number are
    ptx::Mbarrier tables_known;   ///< rotary and norms are
    ptx::Mbarrier weights_asked;  ///< the first product's loads have been started
    unsigned number;              ///< of this launch
    Group<kHeadDim> groups[1];    ///< launch.layout.groups of them
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
    /// Past the first `count` stages, from the beginning.
    __device__ __forceinline__ static Position behind(int count, int stages) {
        const int round = count / stages;
        return {count - round * stages, static_cast<std::uint32_t>(round & 1)};
    }
};

/// What a thread can wait for, for the message of a wait that takes too long.
enum class Wait : int { room, stage, known, tables, weights_asked, queries, new_key, partials, output };

/// In a debug build, stops the launch with a message when a wait takes seconds: whoever it waits for is missing.
class Watchdog {
 public:
    __device__ __forceinline__ void again([[maybe_unused]] Wait wait, [[maybe_unused]] int which = 0) {
#ifndef NDEBUG
        constexpr unsigned kMost = 1U << 21;
        if (++rounds_ < kMost) return;
        constexpr const char* kNames[] = {"room in a stage", "a stage",  "lengths and launch number",
                                          "tables",          "weights",  "queries",
                                          "the new key",     "partials", "output"};
        printf("decode block: thread block %d, warp %d, lane %d waits for %s (%d)\n", static_cast<int>(blockIdx.x),
               static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32), kNames[static_cast<int>(wait)],
               which);
        __trap();
#endif
    }

 private:
#ifndef NDEBUG
    unsigned rounds_ = 0;
#endif
};

/// Waits until the phase of this parity has ended. A phase that ended two phases ago counts as one to come: whoever
/// waits has to do it before the next phase ends.
__device__ __forceinline__ void wait_for_phase(ptx::Mbarrier& barrier, std::uint32_t parity, Wait wait, int which = 0) {
    Watchdog watchdog;
    while (!ptx::mbarrier_try_wait(barrier, parity, 1000)) watchdog.again(wait, which);
}

/// A CTA's view of its shared memory. Every stage has 32 arrivals when it is filled, one of each lane of the warp that
/// loads it, and one of each computing warp when it is emptied. A warp goes through all stages in order, also those
/// that only others read: it may not get two rounds ahead, where the parity of a barrier would mean another round.
template <class Shape>
struct Block {
    static constexpr Config kConfig = Shape::kConfig;
    static constexpr int kHeadDim = kConfig.head_dim, kWarps = kConfig.warps;
    const Launch& launch;
    Shared<Shape>& shared;
    char* memory;
    int warp;
    int lane;

    __device__ __forceinline__ char* rows() const { return memory + launch.layout.rows; }
    __device__ __forceinline__ char* stage(const Position& at) const {
        return memory + launch.layout.ring + at.stage * kConfig.stage_bytes();
    }
    __device__ __forceinline__ void next(Position& at) const { at.next(launch.layout.stages); }
    __device__ __forceinline__ void wait_empty(const Position& at) const {
        wait_for_phase(shared.empty[at.stage], at.parity ^ 1, Wait::room, at.stage);
    }
    __device__ __forceinline__ void wait_full(const Position& at) const {
        wait_for_phase(shared.full[at.stage], at.parity, Wait::stage, at.stage);
    }
    /// Goes on to the next stage, by every computing warp.
    __device__ __forceinline__ void release(Position& at) const {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(shared.empty[at.stage]);
        next(at);
    }
    /// Goes past stages that other computing warps read.
    __device__ __forceinline__ void pass(Position& at, int count) const {
        for (; count > 0; --count) {
            wait_full(at);
            release(at);
        }
    }
    __device__ __forceinline__ void sync_computing() const { ptx::named_barrier_sync(kOfComputing, 32 * kWarps); }

    /// By all threads, before a __syncthreads().
    __device__ __forceinline__ void init_barriers() const {
        const int thread = static_cast<int>(threadIdx.x);
        if (thread < launch.layout.stages) {
            ptx::mbarrier_init(shared.full[thread], 32);
            ptx::mbarrier_init(shared.empty[thread], kWarps);
        }
        if (thread == Config::kMostStages) {
            ptx::mbarrier_init(shared.known, 32);
            ptx::mbarrier_init(shared.tables_known, 32);
            ptx::mbarrier_init(shared.weights_asked, 32);
        }
    }
};

/// Records the time of a mark. By one thread of the CTA.
__device__ __forceinline__ void record(const Launch& launch, Mark mark) {
    if (launch.marks == nullptr) return;
    launch.marks[blockIdx.x * static_cast<int>(Mark::count) + static_cast<int>(mark)] = ptx::global_nanoseconds();
}

}  // namespace tessera::cuda::block
