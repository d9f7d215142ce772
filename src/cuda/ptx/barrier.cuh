// SPDX-License-Identifier: Apache-2.0
//
// Barriers, fences and setmaxnreg: how warps wait for each other and for TMA. One function = one instruction.
#pragma once

#include <cstdint>

#include "cuda/ptx/address.cuh"

namespace tessera::cuda::ptx {

/// A 64-bit barrier in shared memory that counts arrivals and bytes (PTX manual, "mbarrier").
struct Mbarrier {
    std::uint64_t state;
};

/// mbarrier.init
__device__ __forceinline__ void mbarrier_init(Mbarrier& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

/// mbarrier.inval
__device__ __forceinline__ void mbarrier_inval(Mbarrier& barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

/// fence.mbarrier_init: TMA sees initialised barriers.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// mbarrier.arrive
__device__ __forceinline__ void mbarrier_arrive(Mbarrier& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

/// mbarrier.arrive.expect_tx: one arrival, and `bytes` that TMA will bring.
__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier& barrier, std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
}

/// mbarrier.test_wait.parity: has the phase of this parity ended?
__device__ __forceinline__ bool mbarrier_test_wait(Mbarrier& barrier, std::uint32_t parity) {
    std::uint32_t done;
    asm volatile(
        "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.b32 %0, 1, 0, done;\n}\n"
        : "=r"(done)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

/// mbarrier.try_wait.parity: has the phase of this parity ended? The warp sleeps for up to `nanoseconds` before the
/// answer is no, and takes few issue slots.
__device__ __forceinline__ bool mbarrier_try_wait(Mbarrier& barrier, std::uint32_t parity,
                                                  std::uint32_t nanoseconds = 1'000'000) {
    std::uint32_t done;
    asm volatile(
        "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2, %3;\nselp.b32 %0, 1, 0, "
        "done;\n}\n"
        : "=r"(done)
        : "r"(shared_address(&barrier)), "r"(parity), "r"(nanoseconds)
        : "memory");
    return done != 0;
}

/// bar.sync: waits until `threads` threads have arrived at barrier `id` of the thread block.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// barrier.red.or: waits as bar.sync does, and returns whether `any` holds for one of the threads.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool any) {
    int result;
    asm volatile(
        "{\n.reg .pred own, all;\nsetp.ne.s32 own, %3, 0;\nbarrier.cta.red.or.aligned.pred all, %1, %2, own;\n"
        "selp.s32 %0, 1, 0, all;\n}\n"
        : "=r"(result)
        : "r"(id), "r"(threads), "r"(static_cast<int>(any))
        : "memory");
    return result != 0;
}

/// bar.arrive: arrives at the barrier without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// fence.proxy.async: TMA and wgmma see what ordinary stores wrote to shared memory.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// fence.proxy.async, global memory: TMA sees what was written before an acquired word.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/// %globaltimer: nanoseconds, the same for the whole device.
__device__ __forceinline__ std::uint64_t global_nanoseconds() {
    std::uint64_t time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

/// griddepcontrol.wait: waits until the previous grid, beside which this one started, has ended and its writes are
/// visible.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// griddepcontrol.launch_dependents: the next grid may start beside this one.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// setmaxnreg.inc: the warpgroup takes registers up to kRegisters a thread.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// setmaxnreg.dec: the warpgroup gives registers back, down to kRegisters a thread.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace tessera::cuda::ptx
