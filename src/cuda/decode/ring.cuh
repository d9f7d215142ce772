// SPDX-License-Identifier: Apache-2.0
//
// A ring of stages in shared memory that producer warps fill by cp.async, on any GPU from sm_80 on. The end of a copy
// arrives at the stage's mbarrier.
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

/// Position of one side in a ring: the index of its stage and the parity of its phase (CUTLASS: PipelineState).
/// cuda::PipelineState computes the same; with it ptxas allocates the registers of this mainloop differently (not
/// timed).
template <int kStages>
struct CopyPipelineState {
    int index = 0;
    std::uint32_t phase = 0;

    __device__ __forceinline__ void advance() {
        if (++index == kStages) {
            index = 0;
            phase ^= 1;
        }
    }
};

template <int kStages>
struct CopyRing {
    ptx::Mbarrier full[kStages];
    ptx::Mbarrier empty[kStages];

    /// `writers`: arrivals at `full`, by the lanes of a producer warp. `readers`: arrivals at `empty`, one of each
    /// consumer warp.
    __device__ void init(int writers, int readers) {
        for (int s = 0; s < kStages; ++s) {
            ptx::mbarrier_init(full[s], writers);
            ptx::mbarrier_init(empty[s], readers);
        }
    }
    /// Producer: waits until the stage may be overwritten.
    __device__ __forceinline__ void producer_acquire(const CopyPipelineState<kStages>& at) {
        wait(empty[at.index], at.phase ^ 1);
    }
    /// Consumer: waits until the stage holds its data.
    __device__ __forceinline__ void consumer_wait(const CopyPipelineState<kStages>& at) {
        wait(full[at.index], at.phase);
    }
    /// Consumer warp: releases the stage and advances to the next one. The reads of all lanes come before lane 0's
    /// arrive, by __syncwarp(). The arrive releases them to the producer's lanes, which acquire in producer_acquire().
    /// compute-sanitizer's racecheck does not follow this and reports a hazard.
    __device__ __forceinline__ void consumer_release(CopyPipelineState<kStages>& at, int lane) {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(empty[at.index]);
        at.advance();
    }
};

}  // namespace tessera::cuda::decode
