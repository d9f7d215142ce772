// SPDX-License-Identifier: Apache-2.0
//
// How the warps of a split step (split_loop.cuh) wait for each other and for other thread blocks. A warp comes to a
// barrier long before it waits there: with products between, one that has been held up has come by then.
#pragma once

#include "cuda/gradient/split_plan.cuh"
#include "cuda/ptx/barrier.cuh"

namespace tessera::cuda::gradient {

/// Each ends a phase a step.
struct SplitBarriers {
    ptx::Mbarrier p;      // all warps have stored P
    ptx::Mbarrier ds;     // and dS, and have what they bring of the next step
    ptx::Mbarrier added;  // have added to dQ
    ptx::Mbarrier turn;   // it is the block's turn to add

    __device__ void init(int warps) {
        for (ptx::Mbarrier* barrier : {&p, &ds, &added}) ptx::mbarrier_init(*barrier, warps);
        ptx::mbarrier_init(turn, 1);
    }
};

template <class T, Config kConfig>
struct SplitTurns : SplitPlan<T, kConfig> {
    using Base = SplitPlan<T, kConfig>;
    using Base::lane;
    using Base::work;
    using typename Base::Plan;
    using typename Base::Planned;
    static constexpr unsigned kWarps = kConfig.threads() / 32;

    __device__ static __forceinline__ void arrive(ptx::Mbarrier& barrier) {
        __syncwarp();
        if (lane() == 0) ptx::mbarrier_arrive(barrier);
    }
    __device__ static __forceinline__ void wait(ptx::Mbarrier& barrier, int index) {
        while (!ptx::mbarrier_test_wait(barrier, index % 2)) {
        }
    }

    /// One warp waits for the block's turn in this step, another publishes that all have added to dQ in the step
    /// before. Others each step: a fence takes 600 clocks, and the same warps would always be behind the others. That
    /// all have added also ends the phase of `turn` for all: no warp may miss one.
    __device__ __forceinline__ void take_turns(Plan& plan, const Planned& planned, int index,
                                               SplitBarriers& barriers) const {
        if (is_first_of_warp(index)) {
            if (index > 0) wait(barriers.added, index - 1);
            if (planned.before >= 0) wait_for_turn(planned);
            ptx::mbarrier_arrive(barriers.turn);
        }
        if (index > 0 && is_first_of_warp(index + 3)) {
            wait(barriers.added, index - 1);
            publish(plan.at(index - 1));
        }
    }
    /// After the last step and a barrier.
    __device__ __forceinline__ void publish_last(Plan& plan) const {
        if (is_first_of_warp(1)) publish(plan.at(plan.count - 1));
    }

 private:
    __device__ static __forceinline__ bool is_first_of_warp(unsigned warp) {
        const int thread = Base::kTight ? ptx::reload_thread_index() : static_cast<int>(threadIdx.x);
        return thread == static_cast<int>(warp % kWarps * 32);
    }
    __device__ static __forceinline__ void wait_for_turn(const Planned& planned) {
        while (ptx::load_acquire(planned.done) != planned.before + 1) {
        }
    }
    /// As Turns does it, of all tiles of a step.
    __device__ __forceinline__ void publish(const Planned& planned) const {
        if (kConfig.query_tiles > 1 && planned.tile * Base::kStepQueries + kBlockQ < work.sequence.len_q) {
            planned.done[1] = work.block + 1;  // who reads it comes after the kernel
        }
        ptx::store_release(planned.done, work.block + 1);
    }
};

}  // namespace tessera::cuda::gradient
