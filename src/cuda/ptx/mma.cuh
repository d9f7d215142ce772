// SPDX-License-Identifier: Apache-2.0
//
// MMA and copies of one warp, sm_80 and later: one function = one instruction, named after its section of the PTX
// manual. `lane` is the thread's number in its warp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/address.cuh"

namespace tessera::cuda::ptx {

/// "Warp-level Matrix Instructions: mma", m16n8k16: D[16, 8] += A[16, 16] B[16, 8], fp32 accumulators.
/// Rows are lane / 4 and 8 below, in pairs of columns 2 * (lane % 4):
/// a: (row, k), (row + 8, k), (row, k + 8), (row + 8, k + 8); b: (k, n = lane / 4), (k + 8, n); d: row twice, row + 8.
template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    if constexpr (std::is_same_v<T, __half>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

/// "Warp-level Matrix Instructions: ldmatrix", .x4: four 8 x 8 matrices of 16-bit numbers; lane l gives the address of
/// row l % 8 of matrix l / 8, and gets row lane / 4, columns 2 * (lane % 4) and the next, of each.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&matrices)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

/// "Warp-level Matrix Instructions: ldmatrix", .x4.trans: as ldmatrix_x4, with each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&matrices)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

/// "Warp-level Matrix Instructions: movmatrix", .trans: an 8 x 8 matrix of 16-bit numbers, of which a lane has row
/// lane / 4, columns 2 * (lane % 4) and the next, transposed.
__device__ __forceinline__ std::uint32_t movmatrix_trans(std::uint32_t matrix) {
    std::uint32_t transposed;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
    return transposed;
}

/// "Data Movement and Conversion Instructions: cp.async", .cg, 16 bytes past the L1; zeros, and no read, unless
/// `valid`.
__device__ __forceinline__ void cp_async_16(std::uint32_t to, const void* from, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/// "Data Movement and Conversion Instructions: prefetch": loads a line of global memory into L2.
__device__ __forceinline__ void prefetch_l2(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
}

/// "Data Movement and Conversion Instructions: cp.async.commit_group"
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// "Data Movement and Conversion Instructions: cp.async.wait_group": waits until at most kPending of the latest groups
/// are incomplete.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace tessera::cuda::ptx
