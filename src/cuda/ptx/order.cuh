// SPDX-License-Identifier: Apache-2.0
//
// Hints to ptxas about the order of instructions.
#pragma once

namespace tessera::cuda::ptx {

/// Places that ptxas moves no instruction across: what stands before one is issued before what stands behind
/// it. (Its own order puts long runs of ex2 together, and leaves the issue slots between them empty.) Each place is a
/// way out of the kernel that is never taken, which only the caller knows.
class IssueOrder {
 public:
    /// `count`: a number of 0 or more, of which the compiler knows nothing.
    __device__ __forceinline__ explicit IssueOrder(int count) : zero_(min(count, 0)) {}

    /// A place: exit, if 0 is kPlace + 1. Each kPlace of a loop has its own number, or the second of two would be
    /// dropped as settled by the first.
    template <int kPlace>
    __device__ __forceinline__ void fence() const {
        static_assert(kPlace >= 0);
        asm volatile("{\n.reg .pred out;\nsetp.eq.s32 out, %0, %1;\n@out exit;\n}\n" ::"r"(zero_), "n"(kPlace + 1)
                     : "memory");
    }

 private:
    int zero_;
};

}  // namespace tessera::cuda::ptx
