// SPDX-License-Identifier: Apache-2.0
//
// Named barriers, and waits on mbarriers and semaphores. With TESSERA_BOUNDED_WAITS a wait of two seconds reports its
// line and ends the kernel.
#pragma once

#include "cuda/tile/pipeline.cuh"

namespace tessera::cuda::fa3::backward {

/// Named barriers of the CTA. 0 is __syncthreads.
enum NamedBarrier : int {
    kConsumersBarrier = 1,
    kWarpgroupBarrier = 2,  ///< within the first consumer warpgroup; the second one's follows
    kEndBarrier = 4,        ///< all consumer warpgroups, at the end
};

#ifdef TESSERA_BOUNDED_WAITS
inline constexpr bool kBoundedWaits = true;
__device__ int* waited_at;  ///< host memory: line, CTA, thread and `number` of the wait that did not end
#else
inline constexpr bool kBoundedWaits = false;
#endif

/// Calls `done` until it returns true.
template <class Done>
__device__ __forceinline__ void wait_until([[maybe_unused]] int number, const Done& done,
                                           [[maybe_unused]] int line = __builtin_LINE()) {
#ifdef TESSERA_BOUNDED_WAITS
    const std::uint64_t begin = ptx::global_nanoseconds();
    while (!done()) {
        if (ptx::global_nanoseconds() - begin < 2'000'000'000) continue;
        waited_at[1] = static_cast<int>(blockIdx.x);
        waited_at[2] = static_cast<int>(threadIdx.x);
        waited_at[3] = number;
        waited_at[0] = line;
        __threadfence_system();
        __nanosleep(1'000'000);
        __trap();
    }
#else
    while (!done()) {
    }
#endif
}

/// Waits until the phase of this parity is complete. `number` is only reported.
__device__ __forceinline__ void wait_for(ptx::Mbarrier& barrier, std::uint32_t parity, int number = 0,
                                         int line = __builtin_LINE()) {
    wait_until(
        number, [&] { return ptx::mbarrier_try_wait(barrier, parity); }, line);
}

}  // namespace tessera::cuda::fa3::backward
