// SPDX-License-Identifier: Apache-2.0
//
// Memory beyond the workspace. This file replaces operator new of the whole test program to see how much of the heap
// forward() and backward() hold at most. It has to be little, whatever the length and the batch.
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <optional>
#include <vector>

#include "core/case.hpp"

namespace {

std::atomic<std::int64_t> live_bytes{0};
std::atomic<std::int64_t> peak_bytes{0};

/// Null when there is no memory.
void* counted_or_null(std::size_t bytes, std::size_t alignment) noexcept {
    const std::size_t rounded = (bytes / alignment + 1) * alignment;
    void* memory =
        alignment > alignof(std::max_align_t) ? std::aligned_alloc(alignment, rounded) : std::malloc(rounded);
    if (memory == nullptr) return nullptr;
    const auto size = static_cast<std::int64_t>(malloc_usable_size(memory));
    const std::int64_t live = live_bytes.fetch_add(size, std::memory_order_relaxed) + size;
    std::int64_t peak = peak_bytes.load(std::memory_order_relaxed);
    while (peak < live && !peak_bytes.compare_exchange_weak(peak, live, std::memory_order_relaxed)) {
    }
    return memory;
}

void* counted(std::size_t bytes, std::size_t alignment) {
    void* const memory = counted_or_null(bytes, alignment);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

void uncounted(void* memory) noexcept {
    if (memory == nullptr) return;
    live_bytes.fetch_sub(static_cast<std::int64_t>(malloc_usable_size(memory)), std::memory_order_relaxed);
    std::free(memory);
}

/// The most heap memory that f holds at once, beyond what is held already.
template <class F>
std::int64_t peak_of(const F& f) {
    const std::int64_t before = live_bytes;
    peak_bytes = before;
    f();
    return peak_bytes - before;
}

}  // namespace

void* operator new(std::size_t bytes) { return counted(bytes, alignof(std::max_align_t)); }
void* operator new[](std::size_t bytes) { return counted(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t to) { return counted(bytes, static_cast<std::size_t>(to)); }
void* operator new[](std::size_t bytes, std::align_val_t to) { return counted(bytes, static_cast<std::size_t>(to)); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
    return counted_or_null(bytes, alignof(std::max_align_t));
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
    return counted_or_null(bytes, alignof(std::max_align_t));
}
void* operator new(std::size_t bytes, std::align_val_t to, const std::nothrow_t&) noexcept {
    return counted_or_null(bytes, static_cast<std::size_t>(to));
}
void* operator new[](std::size_t bytes, std::align_val_t to, const std::nothrow_t&) noexcept {
    return counted_or_null(bytes, static_cast<std::size_t>(to));
}
void operator delete(void* memory) noexcept { uncounted(memory); }
void operator delete[](void* memory) noexcept { uncounted(memory); }
void operator delete(void* memory, std::size_t) noexcept { uncounted(memory); }
void operator delete[](void* memory, std::size_t) noexcept { uncounted(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { uncounted(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { uncounted(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { uncounted(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { uncounted(memory); }

namespace tessera::test::allocation_test {
namespace {

/// Runs the tasks on the calling thread, since memory that oneTBB allocates is not the kernel's.
void serial_for(std::int64_t tasks, int workers, const TaskBody& body) {
    for (std::int64_t task = 0; task < tasks; ++task) body(task, static_cast<int>(task % workers));
}

/// The most heap memory that one call of a kernel holds, or nothing when it does not take the Problem.
std::optional<std::int64_t> heap_bytes(const KernelInfo& kernel, const Problem& p) {
    std::optional<Plan> chosen;
    try {
        chosen = plan(p, {.pass = kernel.pass, .kernel = kernel.name, .threads = 2});
    } catch (const Error&) {
        return std::nullopt;
    }
    const Case c(p);
    const ForwardArgs forward_args = c.forward_args();
    const BackwardArgs backward_args = c.backward_args();
    const Workspace workspace(*chosen);
    const Execution how{.parallel_for = serial_for};
    return peak_of([&] {
        if (kernel.pass == Pass::forward) forward(*chosen, forward_args, workspace, how);
        else backward(*chosen, backward_args, workspace, how);
    });
}

Problem of_length(std::int64_t len, DType dtype, bool causal) {
    Problem p = Problem::dense(1, len, 2, 8, dtype);
    p.heads_kv = 1;
    p.mask.causal = causal ? Causal::bottom_right : Causal::none;
    return p;
}

TEST(Allocation, counts) {
    const std::int64_t peak = peak_of([] {
        const std::vector<double> first(1000);
        { const std::vector<double> second(1000); }
        const std::vector<double> third(1000);
    });
    EXPECT_GE(peak, 16000);
    EXPECT_LT(peak, 20000);
    EXPECT_EQ(peak_of([] {}), 0);
}

TEST(Allocation, calls_hold_little_of_the_heap_whatever_the_length) {
    constexpr std::int64_t kLittle = 16 << 10;
    for (const KernelInfo& kernel : kernels()) {
        if (kernel.backend == Backend::cuda) continue;
        for (const DType dtype : {DType::fp32, DType::bf16}) {
            for (const bool causal : {false, true}) {
                const auto at_64 = heap_bytes(kernel, of_length(64, dtype, causal));
                const auto at_512 = heap_bytes(kernel, of_length(512, dtype, causal));
                if (!at_64 || !at_512) continue;
                EXPECT_LE(*at_512, kLittle) << kernel.name << " " << name_of(dtype);
                EXPECT_LE(*at_512, *at_64 + 1024) << kernel.name << " " << name_of(dtype) << ": grows with the length";
            }
        }
    }
}

TEST(Allocation, calls_hold_little_of_the_heap_whatever_the_batch) {
    for (const KernelInfo& kernel : kernels()) {
        if (kernel.backend == Backend::cuda) continue;
        Problem p = of_length(16, DType::fp32, true);
        p.batch = 64;  // enough tasks for every worker: fewer may be cut differently
        const auto at_64 = heap_bytes(kernel, p);
        p.batch = 512;
        const auto at_512 = heap_bytes(kernel, p);
        if (!at_64 || !at_512) continue;
        EXPECT_LE(*at_512, *at_64 + 1024) << kernel.name << ": grows with the batch";
    }
}

TEST(Allocation, a_refused_call_holds_its_message_only) {
    const Problem p = of_length(64, DType::fp32, false);
    const Plan chosen = plan(p, {.threads = 1});
    const Case c(p);
    ForwardArgs args = c.forward_args();
    args.k = {};
    const Workspace workspace(chosen);
    EXPECT_LT(peak_of([&] { EXPECT_THROW(forward(chosen, args, workspace), Error); }), 8 << 10);
}

}  // namespace
}  // namespace tessera::test::allocation_test
