// SPDX-License-Identifier: Apache-2.0
//
// A ring of shared-memory stages that one side fills and the other empties. Phases are counted here and nowhere else.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"

namespace tessera::cuda {

/// Waits for the end of the phase of this parity.
__device__ __forceinline__ void wait(ptx::Mbarrier& barrier, std::uint32_t parity) {
    while (!ptx::mbarrier_try_wait(barrier, parity)) {
    }
}

/// The barriers of a ring. `full` counts one arrival and the bytes of the copy; `empty` one arrival of every reader.
template <int kStages>
struct Ring {
    ptx::Mbarrier full[kStages];
    ptx::Mbarrier empty[kStages];

    __device__ void init(int readers, int writers = 1) {
        for (int s = 0; s < kStages; ++s) {
            ptx::mbarrier_init(full[s], writers);
            ptx::mbarrier_init(empty[s], readers);
        }
    }
    __device__ void end() {
        for (int s = 0; s < kStages; ++s) {
            ptx::mbarrier_inval(full[s]);
            ptx::mbarrier_inval(empty[s]);
        }
    }
};

/// The phases of barriers that are not all used in turn, as those of stages that only some copies go to.
struct StagePhases {
    std::uint32_t phases = 0;  ///< a bit for each stage

    __device__ __forceinline__ void wait(ptx::Mbarrier& barrier, int stage) {
        cuda::wait(barrier, phases >> stage & 1);
        phases ^= 1U << stage;
    }
};

/// Where one side stands in a ring: how many stages it has taken. Both sides take the stages in the same order.
template <int kStages>
struct RingPosition {
    static_assert((kStages & (kStages - 1)) == 0, "the count wraps at a power of two");
    std::uint32_t taken = 0;

    __device__ __forceinline__ int stage() const { return static_cast<int>(taken % kStages); }
    __device__ __forceinline__ std::uint32_t phase() const { return taken / kStages & 1; }
    __device__ __forceinline__ void advance() { ++taken; }
    /// Filling side: the stage may be overwritten. The first round passes at once.
    __device__ __forceinline__ void wait_empty(Ring<kStages>& ring) const { wait(ring.empty[stage()], phase() ^ 1); }
    /// Reading side: does the stage hold its data? Doesn't wait.
    __device__ __forceinline__ bool is_full(Ring<kStages>& ring) const {
        return ptx::mbarrier_test_wait(ring.full[stage()], phase());
    }
    /// Reading side: the stage holds its data.
    __device__ __forceinline__ void wait_full(Ring<kStages>& ring) const { wait(ring.full[stage()], phase()); }
    __device__ __forceinline__ void release(Ring<kStages>& ring) const { ptx::mbarrier_arrive(ring.empty[stage()]); }
    /// The same, of the ring of the thread block of this rank in the cluster.
    __device__ __forceinline__ void release_at(Ring<kStages>& ring, int rank) const {
        ptx::mbarrier_arrive_cluster(ring.empty[stage()], rank);
    }
};

}  // namespace tessera::cuda
