// SPDX-License-Identifier: Apache-2.0
//
// The Tensor Memory Accelerator of Hopper (PTX manual, "cp.async.bulk.tensor") and stmatrix: one function = one
// instruction.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"

namespace tessera::cuda::ptx {

/// prefetch.tensormap
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// cp.async.bulk.tensor.4d, global to shared memory: the box at coordinates (c0, c1, c2, c3), innermost first.
__device__ __forceinline__ void tma_load_4d(void* shared, const CUtensorMap& map, int c0, int c1, int c2, int c3,
                                            Mbarrier& barrier, CacheHint hint) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
        "l"(static_cast<std::uint64_t>(hint))
        : "memory");
}

/// cp.async.bulk.tensor.4d, shared to global memory. Elements past its end are dropped; a negative coordinate is an
/// illegal instruction (seen on an H200).
__device__ __forceinline__ void tma_store_4d(const void* shared, const CUtensorMap& map, int c0, int c1, int c2,
                                             int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

/// cp.async.bulk, global to shared memory: `bytes` contiguous bytes, a multiple of 16.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, std::uint32_t bytes, Mbarrier& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(&barrier))
                 : "memory");
}

/// cp.async.bulk, shared to global memory: `bytes` contiguous bytes.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, std::uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

/// cp.reduce.async.bulk.add.f32: adds numbers of shared memory to those in global memory.
__device__ __forceinline__ void bulk_reduce_add(float* global, const void* shared, std::uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(global)),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

/// cp.async.bulk.commit_group
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// cp.async.bulk.wait_group.read: waits until all stores of this thread, except the last kPending groups, have read
/// their shared memory.
template <int kPending = 0>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// cp.async.bulk.wait_group 0: waits until all stores of this thread are complete.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// stmatrix.x4.trans: as stmatrix_x4, with each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_trans(std::uint32_t shared, std::uint32_t r0, std::uint32_t r1,
                                                  std::uint32_t r2, std::uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r0),
                 "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

/// stmatrix.x4: four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(std::uint32_t shared, std::uint32_t r0, std::uint32_t r1, std::uint32_t r2,
                                            std::uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

/// ld.shared.v4: 16 bytes, by an address in the shared memory window.
__device__ __forceinline__ uint4 load_shared(std::uint32_t shared) {
    uint4 words;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(shared)
                 : "memory");
    return words;
}

}  // namespace tessera::cuda::ptx
