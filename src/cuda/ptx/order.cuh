// SPDX-License-Identifier: Apache-2.0
//
// Hints to ptxas about the order of instructions.
#pragma once

namespace tessera::cuda::ptx {

/// Fences that ptxas moves no instruction across: what stands before one is issued before what stands after it.
/// (Without fences ptxas groups ex2 into long runs and leaves the issue slots between them empty.) Each fence is a
/// conditional exit of the kernel that is never taken, which ptxas can't know.
class IssueOrder {
 public:
    /// `count`: a number of 0 or more, about which the compiler knows nothing.
    __device__ __forceinline__ explicit IssueOrder(int count) : zero_(min(count, 0)) {}

    /// Exit if 0 is kFence + 1. Each fence of a loop has its own number, or the second of two would be dropped as
    /// decided by the first.
    template <int kFence>
    __device__ __forceinline__ void fence() const {
        static_assert(kFence >= 0);
        asm volatile("{\n.reg .pred out;\nsetp.eq.s32 out, %0, %1;\n@out exit;\n}\n" ::"r"(zero_), "n"(kFence + 1)
                     : "memory");
    }

 private:
    int zero_;
};

}  // namespace tessera::cuda::ptx
