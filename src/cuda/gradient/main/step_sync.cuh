// SPDX-License-Identifier: Apache-2.0
//
// How the warps of a CTA wait for each other inside a step, and for other CTAs at the dQ semaphore. Barriers are split:
// a warp arrives one GEMM before it waits, so that slower warps have arrived by then.
#pragma once

#include "cuda/gradient/main/step_plan.cuh"
#include "cuda/ptx/barrier.cuh"

namespace tessera::cuda::gradient {

/// mbarriers, each of which completes one phase in each step.
struct StepBarriers {
    ptx::Mbarrier p;         // all warps have stored P
    ptx::Mbarrier ds;        // all warps have stored dS, and their copies for the next step have arrived
    ptx::Mbarrier added;     // all warps have added to dQ
    ptx::Mbarrier acquired;  // the CTA has the dQ semaphore of the step

    __device__ void init(int warps) {
        for (ptx::Mbarrier* barrier : {&p, &ds, &added}) ptx::mbarrier_init(*barrier, warps);
        ptx::mbarrier_init(acquired, 1);
    }
};

template <class T, Config kConfig>
struct StepSync {
    static constexpr unsigned kWarps = kConfig.threads() / 32;
    using Planner = StepPlanner<T, kConfig>;

    const CtaWork& work;

    __device__ static __forceinline__ void arrive(ptx::Mbarrier& barrier) {
        __syncwarp();
        if (lane_number() == 0) ptx::mbarrier_arrive(barrier);
    }
    __device__ static __forceinline__ void wait(ptx::Mbarrier& barrier, int index) {
        while (!ptx::mbarrier_test_wait(barrier, index % 2)) {
        }
    }

    /// One warp acquires the dQ semaphore of step `index`; another one releases that of the previous step. The two
    /// warps change with each step: a fence takes 600 clocks, so fixed ones would always be behind the others. The
    /// acquiring warp first waits until all warps have added in the previous step. They have then passed `acquired` of
    /// that step, so its phase can't end twice before a slow warp has tested it.
    __device__ __forceinline__ void acquire_and_release(StepPlan& plan, const PlannedStep& planned, int index,
                                                        StepBarriers& barriers) const {
        if (is_first_of_warp(index)) {
            if (index > 0) wait(barriers.added, index - 1);
            if (planned.predecessor >= 0) acquire(planned);
            ptx::mbarrier_arrive(barriers.acquired);
        }
        if (index > 0 && is_first_of_warp(index + 3)) {
            wait(barriers.added, index - 1);
            release(plan.at(index - 1));
        }
    }
    /// Releases the semaphore of the last step, after a barrier of all threads.
    __device__ __forceinline__ void release_last(StepPlan& plan) const {
        if (is_first_of_warp(1)) release(plan.at(plan.count - 1));
    }

 private:
    __device__ static __forceinline__ bool is_first_of_warp(unsigned warp) {
        const int thread = Planner::kFewRegisters ? ptx::reload_thread_index() : static_cast<int>(threadIdx.x);
        return thread == static_cast<int>(warp % kWarps * 32);
    }
    __device__ static __forceinline__ void acquire(const PlannedStep& planned) {
        while (ptx::load_acquire(planned.semaphore) != planned.predecessor + 1) {
        }
    }
    /// A step may have two tiles of kBlockQ queries. CTAs look at the first semaphore only; the second tells dq_kernel,
    /// which runs later, that the accumulator was written.
    __device__ __forceinline__ void release(const PlannedStep& planned) const {
        if (kConfig.query_tiles > 1 && planned.tile * Planner::kStepQueries + kBlockQ < work.sequence.len_q) {
            planned.semaphore[1] = work.order.block + 1;
        }
        ptx::store_release(planned.semaphore, work.order.block + 1);
    }
};

}  // namespace tessera::cuda::gradient
