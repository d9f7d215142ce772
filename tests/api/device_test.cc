// SPDX-License-Identifier: Apache-2.0
//
// The device of the tensors: plan() chooses kernels by it, and calls refuse tensors on another one.
#include <gtest/gtest.h>

#include <string>

#include "core/case.hpp"
#include "core/checks.hpp"
#include "device/device_copy.hpp"

namespace tessera::test::device_test {
namespace {

constexpr Device kCuda{DeviceType::cuda, 0};

Problem some_problem() { return Problem::dense(1, 8, 2, 16, DType::bf16); }

Error error_of(const PlanOptions& options) {
    try {
        plan(some_problem(), options);
    } catch (const Error& e) {
        return e;
    }
    return {ErrorCode::ok, "", "no error"};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

bool cuda_is_built() {
    for (const KernelInfo& kernel : kernels()) {
        if (kernel.backend == Backend::cuda) return true;
    }
    return false;
}

TEST(PlanDevice, is_host_memory_unless_cuda_is_asked_for) {
    const Plan how = plan(some_problem());
    EXPECT_EQ(how.device, Device{});
    for (const Refusal& r : how.refused) {
        if (r.kernel->backend != Backend::cuda || r.kernel->pass != how.pass) continue;
        EXPECT_FALSE(r.capable);
        EXPECT_EQ(r.reason, "takes tensors in CUDA memory; they are in host memory");
    }
}

TEST(PlanDevice, without_a_device_is_unavailable) {
    if (device::cuda_available()) GTEST_SKIP() << "there is a CUDA device";
    const Error backend = error_of({.backend = Backend::cuda});
    EXPECT_EQ(backend.code(), ErrorCode::device_unavailable);
    EXPECT_EQ(backend.argument(), "backend");
    EXPECT_TRUE(contains(backend.what(), cuda_is_built() ? "no CUDA device: " : "no CUDA kernels")) << backend.what();
    EXPECT_EQ(error_of({.device = kCuda}).argument(), "device");
    EXPECT_EQ(error_of({.device = kCuda}).code(), ErrorCode::device_unavailable);
    for (const KernelInfo& kernel : kernels()) {
        if (kernel.backend != Backend::cuda) continue;
        const Error error = error_of({.pass = kernel.pass, .kernel = kernel.name});
        EXPECT_EQ(error.code(), ErrorCode::device_unavailable) << error.what();
        EXPECT_EQ(error.argument(), "kernel");
    }
}

TEST(PlanDevice, kernels_of_the_host_refuse_cuda_memory) {
    if (!device::cuda_available()) GTEST_SKIP() << "no CUDA device";
    for (const KernelInfo& kernel : kernels()) {
        if (kernel.backend == Backend::cuda || kernel.pass != Pass::forward) continue;
        const Error error = error_of({.kernel = kernel.name, .device = kCuda});
        EXPECT_EQ(error.code(), ErrorCode::unsupported);
        EXPECT_TRUE(contains(error.what(), kernel.name + ": takes tensors in host memory; they are in CUDA memory"))
            << error.what();
    }
}

TEST(PlanDevice, wrong_indices) {
    const Error negative = error_of({.device = Device{DeviceType::cuda, -1}});
    EXPECT_EQ(negative.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(negative.argument(), "device");
    const Error beyond = error_of({.device = Device{DeviceType::cuda, 1 << 20}});
    EXPECT_EQ(beyond.code(), ErrorCode::device_unavailable);
    EXPECT_EQ(beyond.argument(), "device");
}

TEST(CallDevice, tensors_elsewhere_are_named) {
    const Case c(some_problem());
    const Plan how = plan(c.problem, {.threads = 1});
    const Workspace workspace(how);
    using A = ForwardArgs;
    const std::pair<const char*, TensorView A::*> tensors[] = {
        {"q", &A::q}, {"k", &A::k}, {"v", &A::v}, {"o", &A::o}, {"lse", &A::lse}};
    for (const auto& [name, tensor] : tensors) {
        ForwardArgs args = c.forward_args();
        (args.*tensor).device = {DeviceType::cuda, 3};
        try {
            forward(how, args, workspace);
            ADD_FAILURE() << name;
        } catch (const Error& e) {
            EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
            EXPECT_EQ(e.what(), std::string(name) + ": expected a tensor in host memory, got one on CUDA device 3");
        }
        (args.*tensor).device = {DeviceType::cpu, 3};  // there is one host memory
        EXPECT_NO_THROW(forward(how, args, workspace));
    }
}

TEST(CallDevice, another_cuda_device_is_elsewhere) {
    const Case c(some_problem());
    ForwardArgs args = c.forward_args();
    for (TensorView* tensor : {&args.q, &args.k, &args.v, &args.o, &args.lse}) tensor->device = kCuda;
    EXPECT_NO_THROW(check_tensors(c.problem, args, kCuda));
    args.v.device.index = 1;
    try {
        check_tensors(c.problem, args, kCuda);
        ADD_FAILURE();
    } catch (const Error& e) {
        EXPECT_EQ(e.what(), std::string("v: expected a tensor on CUDA device 0, got one on CUDA device 1"));
    }
}

TEST(CallDevice, a_plan_changed_by_hand) {
    const Case c(some_problem());
    Plan how = plan(c.problem, {.threads = 1});
    const Workspace workspace(how);
    how.device = kCuda;
    try {
        forward(how, c.forward_args(), workspace);
        ADD_FAILURE();
    } catch (const Error& e) {
        EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
        EXPECT_EQ(e.argument(), "plan");
    }
}

TEST(CallDevice, host_addresses_are_not_taken_for_cuda_memory) {
    if (!device::cuda_available()) GTEST_SKIP() << "no CUDA device";
    const Case c(some_problem());
    Plan how;
    try {
        how = plan(c.problem, {.backend = Backend::cuda});
    } catch (const Error& e) {
        GTEST_SKIP() << e.what();
    }
    ForwardArgs args = c.forward_args();
    for (TensorView* tensor : {&args.q, &args.k, &args.v, &args.o, &args.lse}) tensor->device = kCuda;
    device::DeviceCopy copy(kCuda);
    try {
        forward(how, args, copy.workspace(how.workspace_bytes));
        ADD_FAILURE();
    } catch (const Error& e) {
        EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
        EXPECT_EQ(e.argument(), "q") << e.what();
    }
}

}  // namespace
}  // namespace tessera::test::device_test
