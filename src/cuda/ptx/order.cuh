// SPDX-License-Identifier: Apache-2.0
//
// Hints to the assembler about the order of instructions.
#pragma once

namespace tessera::cuda::ptx {

/// exit, if `never` is kPlace + 1, which the caller sees to that it never is. The assembler moves no instruction across
/// a way out of the kernel: what stands before it is issued before what stands behind it. (Its own order puts long runs
/// of ex2 together, and leaves the issue slots between them empty.) Each kPlace of a loop has its own number, or the
/// second of two would be dropped as settled by the first.
template <int kPlace>
__device__ __forceinline__ void order_fence(int never) {
    asm volatile("{\n.reg .pred out;\nsetp.eq.s32 out, %0, %1;\n@out exit;\n}\n" ::"r"(never), "n"(kPlace + 1)
                 : "memory");
}

}  // namespace tessera::cuda::ptx
