// SPDX-License-Identifier: Apache-2.0
//
// Warpgroup matrix multiply-accumulate of Hopper (PTX manual, "Asynchronous Warpgroup Level Matrix Instructions"): one
// function = one instruction. D[64, kN] (+)= A[64, 16] B[16, kN], fp32 accumulators, bf16 or fp16 operands.
//
// Accumulators: thread t of the warpgroup holds rows 16 * (t / 32) + (t % 32) / 4 and 8 below it; element 4 * j + 2 * r
// + e is row half r, column 8 * j + 2 * (t % 4) + e.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace tessera::cuda::ptx {

/// wgmma.fence: the wgmma that follow see registers written before.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// wgmma.commit_group
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// wgmma.wait_group: waits until at most kPending of the latest groups are incomplete.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// No instruction: the compiler moves no access to these registers of a wgmma across this point (CUTLASS has the same
/// function).
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(std::uint32_t (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <int kRows, int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(std::uint32_t (&registers)[kRows][kCount]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) warpgroup_fence_operand(registers[i]);
}

/// No instruction: the registers' contents are dead. (Otherwise the compiler carries them around a loop.)
template <int kRows, int kCount>
__device__ __forceinline__ void discard_operand(std::uint32_t (&registers)[kRows][kCount]) {
#pragma unroll
    for (int i = 0; i < kRows * kCount; ++i) {
        asm volatile("" : "=r"(registers[i / kCount][i % kCount])::"memory");
    }
}

// Operands 0..kN/2-1 of the instruction are the accumulators, in groups of eight.
#define TESSERA_D1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TESSERA_D2 \
    TESSERA_D1     \
    ", "           \
    "%8, %9, %10, %11, %12, %13, %14, %15"
#define TESSERA_D3 \
    TESSERA_D2     \
    ", "           \
    "%16, %17, %18, %19, %20, %21, %22, %23"
#define TESSERA_D4 \
    TESSERA_D3     \
    ", "           \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define TESSERA_D5 \
    TESSERA_D4     \
    ", "           \
    "%32, %33, %34, %35, %36, %37, %38, %39"
#define TESSERA_D6 \
    TESSERA_D5     \
    ", "           \
    "%40, %41, %42, %43, %44, %45, %46, %47"
#define TESSERA_D7 \
    TESSERA_D6     \
    ", "           \
    "%48, %49, %50, %51, %52, %53, %54, %55"
#define TESSERA_D8 \
    TESSERA_D7     \
    ", "           \
    "%56, %57, %58, %59, %60, %61, %62, %63"
#define TESSERA_D9 \
    TESSERA_D8     \
    ", "           \
    "%64, %65, %66, %67, %68, %69, %70, %71"
#define TESSERA_D10 \
    TESSERA_D9      \
    ", "            \
    "%72, %73, %74, %75, %76, %77, %78, %79"
#define TESSERA_D11 \
    TESSERA_D10     \
    ", "            \
    "%80, %81, %82, %83, %84, %85, %86, %87"
#define TESSERA_D12 \
    TESSERA_D11     \
    ", "            \
    "%88, %89, %90, %91, %92, %93, %94, %95"
#define TESSERA_D13 \
    TESSERA_D12     \
    ", "            \
    "%96, %97, %98, %99, %100, %101, %102, %103"
#define TESSERA_D14 \
    TESSERA_D13     \
    ", "            \
    "%104, %105, %106, %107, %108, %109, %110, %111"
#define TESSERA_D15 \
    TESSERA_D14     \
    ", "            \
    "%112, %113, %114, %115, %116, %117, %118, %119"
#define TESSERA_D16 \
    TESSERA_D15     \
    ", "            \
    "%120, %121, %122, %123, %124, %125, %126, %127"

#define TESSERA_C1 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define TESSERA_C2 \
    TESSERA_C1, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define TESSERA_C3 \
    TESSERA_C2, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define TESSERA_C4 \
    TESSERA_C3, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define TESSERA_C5 \
    TESSERA_C4, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define TESSERA_C6 \
    TESSERA_C5, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define TESSERA_C7 \
    TESSERA_C6, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define TESSERA_C8 \
    TESSERA_C7, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define TESSERA_C9 \
    TESSERA_C8, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define TESSERA_C10 \
    TESSERA_C9, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define TESSERA_C11 \
    TESSERA_C10, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define TESSERA_C12 \
    TESSERA_C11, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define TESSERA_C13                                                                                            \
    TESSERA_C12, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), \
        "+f"(d[103])
#define TESSERA_C14                                                                                                \
    TESSERA_C13, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), \
        "+f"(d[111])
#define TESSERA_C15                                                                                                \
    TESSERA_C14, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), \
        "+f"(d[119])
#define TESSERA_C16                                                                                                \
    TESSERA_C15, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), \
        "+f"(d[127])

// The operands after the accumulators are numbered a, b, ... by the caller of these macros.
#define TESSERA_WGMMA_SS(n, type, groups, a, b, p, transposed)                                          \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #p                              \
                 ", 0;\n"                                                                               \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" TESSERA_D##groups \
                 "}, %" #a ", %" #b ", accumulate, 1, 1, 0, " transposed ";\n}\n"                       \
                 : TESSERA_C##groups                                                                    \
                 : "l"(desc_a), "l"(desc_b), "r"(static_cast<int>(accumulate)))
#define TESSERA_WGMMA_RS(n, type, groups, a0, a1, a2, a3, b, p, transposed)                                     \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #p                                      \
                 ", 0;\n"                                                                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" TESSERA_D##groups         \
                 "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", accumulate, 1, 1, " transposed ";\n}\n" \
                 : TESSERA_C##groups                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"(static_cast<int>(accumulate)))

// clang-format off
// The widths that kernels use: n, its groups of eight accumulators, and the numbers of the operands after them.
#define TESSERA_WGMMA_WIDTHS(row)          \
    row(32, 2, 16, 17, 18, 19, 20, 21)     \
    row(64, 4, 32, 33, 34, 35, 36, 37)     \
    row(80, 5, 40, 41, 42, 43, 44, 45)     \
    row(96, 6, 48, 49, 50, 51, 52, 53)     \
    row(128, 8, 64, 65, 66, 67, 68, 69)    \
    row(192, 12, 96, 97, 98, 99, 100, 101) \
    row(256, 16, 128, 129, 130, 131, 132, 133)
// clang-format on
#define TESSERA_WGMMA_IS_WIDTH(n, ...) kN == n ||
#define TESSERA_WGMMA_SS_ROW(n, groups, a, b, p, ...)                                              \
    if constexpr (kN == n) {                                                                       \
        if constexpr (std::is_same_v<T, __half>) TESSERA_WGMMA_SS(n, "f16", groups, a, b, p, "0"); \
        else TESSERA_WGMMA_SS(n, "bf16", groups, a, b, p, "0");                                    \
    }
#define TESSERA_WGMMA_SS_COLUMNS_ROW(n, groups, a, b, p, ...)                                      \
    if constexpr (kN == n) {                                                                       \
        if constexpr (std::is_same_v<T, __half>) TESSERA_WGMMA_SS(n, "f16", groups, a, b, p, "1"); \
        else TESSERA_WGMMA_SS(n, "bf16", groups, a, b, p, "1");                                    \
    }
#define TESSERA_WGMMA_RS_ROW(n, groups, a0, a1, a2, a3, b, p)                                                   \
    if constexpr (kN == n) {                                                                                    \
        if constexpr (std::is_same_v<T, __half>) TESSERA_WGMMA_RS(n, "f16", groups, a0, a1, a2, a3, b, p, "0"); \
        else TESSERA_WGMMA_RS(n, "bf16", groups, a0, a1, a2, a3, b, p, "0");                                    \
    }
#define TESSERA_WGMMA_RS_COLUMNS_ROW(n, groups, a0, a1, a2, a3, b, p)                                           \
    if constexpr (kN == n) {                                                                                    \
        if constexpr (std::is_same_v<T, __half>) TESSERA_WGMMA_RS(n, "f16", groups, a0, a1, a2, a3, b, p, "1"); \
        else TESSERA_WGMMA_RS(n, "bf16", groups, a0, a1, a2, a3, b, p, "1");                                    \
    }

/// wgmma.mma_async, A and B from shared memory, both with the 16 of the inner dimension contiguous ("K-major").
template <int kN, class T>
__device__ __forceinline__ void wgmma_ss(float (&d)[kN / 2], std::uint64_t desc_a, std::uint64_t desc_b,
                                         bool accumulate) {
    static_assert(TESSERA_WGMMA_WIDTHS(TESSERA_WGMMA_IS_WIDTH) false);
    TESSERA_WGMMA_WIDTHS(TESSERA_WGMMA_SS_ROW)
}

/// wgmma.mma_async as wgmma_ss, with the kN columns of B contiguous ("MN-major", transposed).
template <int kN, class T>
__device__ __forceinline__ void wgmma_ss_columns(float (&d)[kN / 2], std::uint64_t desc_a, std::uint64_t desc_b,
                                                 bool accumulate) {
    static_assert(TESSERA_WGMMA_WIDTHS(TESSERA_WGMMA_IS_WIDTH) false);
    TESSERA_WGMMA_WIDTHS(TESSERA_WGMMA_SS_COLUMNS_ROW)
}

/// wgmma.mma_async, A from registers, B from shared memory with its kN columns contiguous ("MN-major", transposed).
template <int kN, class T>
__device__ __forceinline__ void wgmma_rs(float (&d)[kN / 2], const std::uint32_t (&a)[4], std::uint64_t desc_b,
                                         bool accumulate) {
    static_assert(TESSERA_WGMMA_WIDTHS(TESSERA_WGMMA_IS_WIDTH) false);
    TESSERA_WGMMA_WIDTHS(TESSERA_WGMMA_RS_COLUMNS_ROW)
}

/// wgmma.mma_async as wgmma_rs, with the 16 of the inner dimension of B contiguous ("K-major").
template <int kN, class T>
__device__ __forceinline__ void wgmma_rs_rows(float (&d)[kN / 2], const std::uint32_t (&a)[4], std::uint64_t desc_b,
                                              bool accumulate) {
    static_assert(TESSERA_WGMMA_WIDTHS(TESSERA_WGMMA_IS_WIDTH) false);
    TESSERA_WGMMA_WIDTHS(TESSERA_WGMMA_RS_ROW)
}

#undef TESSERA_D1
#undef TESSERA_C1
#undef TESSERA_D2
#undef TESSERA_C2
#undef TESSERA_D3
#undef TESSERA_C3
#undef TESSERA_D4
#undef TESSERA_C4
#undef TESSERA_D5
#undef TESSERA_C5
#undef TESSERA_D6
#undef TESSERA_C6
#undef TESSERA_D7
#undef TESSERA_C7
#undef TESSERA_D8
#undef TESSERA_C8
#undef TESSERA_D9
#undef TESSERA_C9
#undef TESSERA_D10
#undef TESSERA_C10
#undef TESSERA_D11
#undef TESSERA_C11
#undef TESSERA_D12
#undef TESSERA_C12
#undef TESSERA_D13
#undef TESSERA_C13
#undef TESSERA_D14
#undef TESSERA_C14
#undef TESSERA_D15
#undef TESSERA_C15
#undef TESSERA_D16
#undef TESSERA_C16
#undef TESSERA_WGMMA_SS
#undef TESSERA_WGMMA_RS
#undef TESSERA_WGMMA_WIDTHS
#undef TESSERA_WGMMA_IS_WIDTH
#undef TESSERA_WGMMA_SS_ROW
#undef TESSERA_WGMMA_SS_COLUMNS_ROW
#undef TESSERA_WGMMA_RS_ROW
#undef TESSERA_WGMMA_RS_COLUMNS_ROW

}  // namespace tessera::cuda::ptx
