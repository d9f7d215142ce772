// SPDX-License-Identifier: Apache-2.0
//
// The shared memory of a CTA, and its ring of stages: producer warps fill them with weights, K and V, and consumer
// warps empty them.
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
inline constexpr int kConsumerBarrier = 1;  ///< of all consumer warps
inline constexpr int kGroupBarrier = 2;     ///< of the first group, which computes a split of the keys; one for each

/// A sequence with its new key: which keys the query sees, and where they are.
struct SequenceWork {
    std::int64_t slot = 0;          ///< without pages
    int first_kv = 0;               ///< row of its first key after the left padding
    Span visible{0, 0};             ///< keys that the new query sees, with the new one
    decode::Splits splits;          ///< of the visible keys
    append_rows::CacheRow new_row;  ///< that the new key is written to; slot -1: none
    int end = 0;                    ///< work items of the sequences up to this one
};

/// The shared memory of a group of warps: Q of its split, the exchange between the warps, the new key.
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
    float2 sums[2][kWarps][32];  ///< a unit's sums over each warp's columns; units with even and odd numbers
    float squares[Config::kMostBatch][kWarps];
    float factors[Config::kMostBatch];
    float2 rotary[Config::kMostBatch][kHeadDim / 2];  ///< cosine and sine of the pairs at a sequence's new position
    float norms[2][kHeadDim];                         ///< the weights of the QK norm, of Q and of K
    SequenceWork sequences[Config::kMostBatch];
    ptx::Mbarrier full[Config::kMostStages];
    ptx::Mbarrier empty[Config::kMostStages];
    ptx::Mbarrier known;          ///< completes when `sequences` and `number` are written
    ptx::Mbarrier tables_known;   ///< completes when `rotary` and `norms` are written
    ptx::Mbarrier weights_asked;  ///< completes when the first GEMM's loads have been started
    unsigned number;              ///< of this launch
    Group<kHeadDim> groups[1];    ///< launch.layout.groups of them
};

/// Position of a warp in the ring (CUTLASS: PipelineState): the index of its stage and the parity of its phase. The
/// launch chooses the number of stages, which cuda::PipelineState and decode::CopyPipelineState have as a template
/// argument.
struct BlockPipelineState {
    int index = 0;
    std::uint32_t phase = 0;

    __device__ __forceinline__ void advance(int stages) {
        if (++index == stages) {
            index = 0;
            phase ^= 1;
        }
    }
    /// The state after the first `count` stages.
    __device__ __forceinline__ static BlockPipelineState after(int count, int stages) {
        const int round = count / stages;
        return {count - round * stages, static_cast<std::uint32_t>(round & 1)};
    }
};

/// The things that a thread waits for, for the message of the watchdog.
enum class Wait : int { empty_stage, full_stage, known, tables, weights_asked, queries, new_key, partials, output };

/// In a debug build, stops the launch with a message when a wait takes seconds, because the awaited phase or word never
/// comes.
class Watchdog {
 public:
    __device__ __forceinline__ void again([[maybe_unused]] Wait wait, [[maybe_unused]] int which = 0) {
#ifndef NDEBUG
        constexpr unsigned kMost = 1U << 21;
        if (++rounds_ < kMost) return;
        constexpr const char* kNames[] = {"an empty stage", "a full stage", "lengths and launch number",
                                          "tables",         "weights",      "queries",
                                          "the new key",    "partials",     "output"};
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

/// Waits until the phase of this parity has ended. The wait has to begin before the phase after that one ends: a
/// barrier knows the parity alone, so two phases later the same parity means a phase to come.
__device__ __forceinline__ void wait_for_phase(ptx::Mbarrier& barrier, std::uint32_t parity, Wait wait, int which = 0) {
    Watchdog watchdog;
    while (!ptx::mbarrier_try_wait(barrier, parity, 1000)) watchdog.again(wait, which);
}

/// A CTA's view of its shared memory. A stage is full after 32 arrivals, one of each lane of the warp that loads it,
/// and empty after one arrival of each consumer warp. A warp goes through all stages in order, also those that only
/// others read: two rounds ahead, the parity of a barrier would mean another round.
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
    __device__ __forceinline__ char* stage(const BlockPipelineState& at) const {
        return memory + launch.layout.ring + at.index * kConfig.stage_bytes();
    }
    __device__ __forceinline__ void next(BlockPipelineState& at) const { at.advance(launch.layout.stages); }
    __device__ __forceinline__ void producer_acquire(const BlockPipelineState& at) const {
        wait_for_phase(shared.empty[at.index], at.phase ^ 1, Wait::empty_stage, at.index);
    }
    __device__ __forceinline__ void consumer_wait(const BlockPipelineState& at) const {
        wait_for_phase(shared.full[at.index], at.phase, Wait::full_stage, at.index);
    }
    /// Releases the stage and advances to the next one, by every consumer warp.
    __device__ __forceinline__ void release(BlockPipelineState& at) const {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(shared.empty[at.index]);
        next(at);
    }
    /// Skips stages that other consumer warps read.
    __device__ __forceinline__ void pass(BlockPipelineState& at, int count) const {
        for (; count > 0; --count) {
            consumer_wait(at);
            release(at);
        }
    }
    __device__ __forceinline__ void sync_consumers() const { ptx::named_barrier_sync(kConsumerBarrier, 32 * kWarps); }

    /// All threads call it, before a __syncthreads().
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
