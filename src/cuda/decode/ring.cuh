// SPDX-License-Identifier: Apache-2.0
//
// A ring of buffers in shared memory between a warp that loads and those that compute, on any GPU from sm_80 on. The
// loads are cp.async, whose completion arrives at an mbarrier.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"

namespace tessera::cuda::decode {

/// Waits until the phase of this parity has ended.
__device__ __forceinline__ void wait(ptx::Mbarrier& barrier, std::uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    while (!ptx::mbarrier_try_wait(barrier, parity)) {
    }
#else
    while (!ptx::mbarrier_test_wait(barrier, parity)) {
    }
#endif
}

/// The place of one side in a ring.
template <int kStages>
struct Position {
    int stage = 0;
    std::uint32_t parity = 0;  ///< of the round

    __device__ __forceinline__ void next() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

template <int kStages>
struct CopyRing {
    ptx::Mbarrier full[kStages];
    ptx::Mbarrier empty[kStages];

    /// `writers`: arrivals at `full`, by the lanes of the loading warp. `readers`: arrivals at `empty`, one of each
    /// computing warp.
    __device__ void init(int writers, int readers) {
        for (int s = 0; s < kStages; ++s) {
            ptx::mbarrier_init(full[s], writers);
            ptx::mbarrier_init(empty[s], readers);
        }
    }
    __device__ __forceinline__ void wait_empty(const Position<kStages>& at) { wait(empty[at.stage], at.parity ^ 1); }
    __device__ __forceinline__ void wait_full(const Position<kStages>& at) { wait(full[at.stage], at.parity); }
    /// By each computing warp, which goes on to the next stage. The reads of all lanes come before lane 0's arrive, by
    /// __syncwarp(). The arrive releases them to the loading lanes, which acquire in wait_empty(). compute-sanitizer's
    /// racecheck does not follow this and reports a hazard.
    __device__ __forceinline__ void release(Position<kStages>& at, int lane) {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(empty[at.stage]);
        at.next();
    }
};

}  // namespace tessera::cuda::decode
