// SPDX-License-Identifier: Apache-2.0
//
// Clusters, whose thread blocks can access each other's shared memory: one function = one instruction.
#pragma once

#include "cuda/ptx/barrier.cuh"

namespace tessera::cuda::ptx {

/// %cluster_ctarank: this thread block's rank in its cluster.
__device__ __forceinline__ int cluster_rank() {
    std::uint32_t rank;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
}

/// barrier.cluster: waits for all threads of the cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

/// mbarrier.arrive at the same barrier of the thread block of this rank. It orders this thread's accesses within its
/// own thread block, and the GEMMs and copies that it waited for. (A release at cluster scope is a fence of the whole
/// GPU: the loop over key blocks took 1.4 times as long with it, on an H200.)
__device__ __forceinline__ void mbarrier_arrive_cluster(Mbarrier& barrier, int rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(shared_address(&barrier)),
        "r"(rank)
        : "memory");
}

/// st.async: stores a word to the same address of the thread block of this rank, whose barrier counts 4 bytes.
__device__ __forceinline__ void st_async(std::uint32_t& to, std::uint32_t value, Mbarrier& barrier, int rank) {
    asm volatile(
        "{\n.reg .b32 word, there;\nmapa.shared::cluster.u32 word, %0, %3;\nmapa.shared::cluster.u32 there, %1, %3;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [word], %2, [there];\n}\n" ::"r"(
            shared_address(&to)),
        "r"(shared_address(&barrier)), "r"(value), "r"(rank)
        : "memory");
}

}  // namespace tessera::cuda::ptx
