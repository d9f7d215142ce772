// SPDX-License-Identifier: Apache-2.0
//
// forward() and backward(): validate everything, then hand over to the plan's kernel.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "check_call.hpp"
#include "core/arena.hpp"
#include "core/arguments.hpp"
#include "core/batch.hpp"
#include "core/checks.hpp"
#include "core/float_mode.hpp"
#include "parallel.hpp"
#include "registry.hpp"
#include "tessera/attention.hpp"
#include "tessera/error.hpp"

namespace tessera {
namespace {

void check_plan(const Plan& plan, Pass pass) {
    // Callers can fill in a Plan themselves, so it is checked to come from plan() before anything in it is used.
    const auto all = kernels();
    const bool known = std::any_of(all.begin(), all.end(), [&](const KernelInfo& k) { return &k == plan.kernel; });
    const bool on_cuda = plan.device.type == DeviceType::cuda;
    if (!known || plan.kernel->pass != plan.pass || plan.threads < 1 ||
        (plan.kernel->backend == Backend::cuda) != on_cuda) {
        throw Error(ErrorCode::invalid_argument, "plan", "expected a Plan made by plan()");
    }
    if (plan.pass != pass) {
        throw Error(ErrorCode::invalid_argument, "plan",
                    fmt::format("expected a plan for the {}, got one for the {}", name_of(pass), name_of(plan.pass)));
    }
}

void check_workspace(const Plan& plan, std::span<std::byte> workspace) {
    if (kernel_of(*plan.kernel).workspace_bytes(plan) > plan.workspace_bytes) {
        throw Error(ErrorCode::invalid_argument, "plan", "expected a Plan as plan() made it, got one that was changed");
    }
    if (workspace.size() < plan.workspace_bytes) {
        throw Error(ErrorCode::workspace_too_small, "workspace",
                    fmt::format("expected {} bytes, got {}", plan.workspace_bytes, workspace.size()));
    }
    if (plan.workspace_bytes > 0 && workspace.data() == nullptr) {
        throw Error(ErrorCode::workspace_too_small, "workspace",
                    fmt::format("expected {} bytes, got null", plan.workspace_bytes));
    }
    if (plan.workspace_bytes > 0 &&
        reinterpret_cast<std::uintptr_t>(workspace.data()) % Plan::kWorkspaceAlignment != 0) {
        throw Error(ErrorCode::workspace_too_small, "workspace",
                    fmt::format("expected memory aligned to {} bytes, got {}", Plan::kWorkspaceAlignment,
                                static_cast<const void*>(workspace.data())));
    }
}

/// The parallel loop of a call on the CPU. Each task sets the default floating-point mode, since a worker thread
/// inherits the rounding and flush-to-zero mode of the thread that created it.
ParallelFor loop_of(const Plan& plan, const Execution& how) {
    if (plan.device.type == DeviceType::cuda) return {};
    ParallelFor loop = how.parallel_for ? how.parallel_for : ParallelFor(default_parallel_for);
    return [loop = std::move(loop)](std::int64_t tasks, int workers, const TaskBody& body) {
        loop(tasks, workers, [&body](std::int64_t task, int worker) {
            const DefaultFloatMode mode;
            body(task, worker);
        });
    };
}

template <class Args>
Call<Args> checked_call(const Plan& plan, const Args& args, std::span<std::byte> workspace, const Execution& how,
                        Pass pass) {
    check_plan(plan, pass);
    plan.problem.validate();
    check_tensors(plan.problem, args, plan.device, workspace.first(std::min(workspace.size(), plan.workspace_bytes)));
    check_workspace(plan, workspace);
    return {plan,         only_given(args), workspace,    loop_of(plan, how),
            how.counters, how.stream,       how.observer, how.skip_memory_check};
}

template <class Args>
void check_refusal(const Kernel& kernel, const Plan& plan, const Args& args,
                   std::optional<TensorRefusal> (*refuse)(const Problem&, const Args&)) {
    if (refuse == nullptr) return;
    if (const auto refusal = refuse(plan.problem, args)) {
        throw Error(ErrorCode::unsupported, refusal->tensor,
                    fmt::format("{} can't work on it: {}", kernel.info.name, refusal->reason));
    }
}

/// Sets the rows of a ragged [total, heads, dim] tensor from `first` on to 0.
void clear_rows(const TensorView& t, std::int64_t first) {
    if (!t.given()) return;
    const auto bytes = static_cast<std::size_t>(size_of(t.dtype));
    for (std::int64_t row = first; row < t.shape[0]; ++row) {
        for (std::int64_t head = 0; head < t.shape[1]; ++head) {
            auto* at = static_cast<std::byte*>(t.data) + (row * t.strides[0] + head * t.strides[1]) * size_of(t.dtype);
            for (std::int64_t c = 0; c < t.shape[2]; ++c)
                std::memset(at + c * t.strides[2] * size_of(t.dtype), 0, bytes);
        }
    }
}

/// Rows past the last cu_seqlens belong to no sequence, so no kernel writes their gradients, which are 0.
void clear_rows_of_no_sequence(const Problem& p, const BackwardArgs& args) {
    clear_rows(args.dq, cu_seqlen(args.cu_seqlens_q, p.batch));
    clear_rows(args.dk, cu_seqlen(args.cu_seqlens_kv, p.batch));
    clear_rows(args.dv, cu_seqlen(args.cu_seqlens_kv, p.batch));
}

/// The checks that the kernel of a plan makes of the tensors.
void check_kernel(const Plan& plan, const ForwardArgs& args) {
    const Kernel& kernel = kernel_of(*plan.kernel);
    if (args.o_residual.given() && !knows_o_residual(kernel, plan.problem)) {
        throw Error(ErrorCode::unsupported, "o_residual",
                    fmt::format("expected none, since {} does not write it, got a tensor", kernel.info.name));
    }
    check_refusal(kernel, plan, args, kernel.refuse_tensors);
}

}  // namespace

void check_forward(const Plan& plan, const ForwardArgs& args) {
    const DefaultFloatMode mode;
    check_plan(plan, Pass::forward);
    plan.problem.validate();
    check_tensors(plan.problem, args, plan.device);
    check_kernel(plan, args);
}

void forward(const Plan& plan, const ForwardArgs& args, std::span<std::byte> workspace, const Execution& how) {
    const DefaultFloatMode mode;
    const ForwardCall call = checked_call(plan, args, workspace, how, Pass::forward);
    check_kernel(plan, args);
    kernel_of(*plan.kernel).forward(call);
}

void backward(const Plan& plan, const BackwardArgs& args, std::span<std::byte> workspace, const Execution& how) {
    const DefaultFloatMode mode;
    const BackwardCall call = checked_call(plan, args, workspace, how, Pass::backward);
    const Kernel& kernel = kernel_of(*plan.kernel);
    check_refusal(kernel, plan, args, kernel.refuse_backward_tensors);
    if (plan.problem.ragged && plan.device.type == DeviceType::cpu) clear_rows_of_no_sequence(plan.problem, call.args);
    kernel.backward(call);
}

Workspace::Workspace(std::size_t bytes) : bytes_(bytes) {
    if (bytes < Arena::kTooMuch) {  // larger sizes would wrap when rounded up
        const std::size_t rounded = (bytes / Plan::kWorkspaceAlignment + 1) * Plan::kWorkspaceAlignment;
        data_.reset(static_cast<std::byte*>(std::aligned_alloc(Plan::kWorkspaceAlignment, rounded)));
    }
    if (data_ == nullptr) {
        throw Error(ErrorCode::out_of_memory, "workspace", fmt::format("could not allocate {} bytes", bytes));
    }
}

void Workspace::Free::operator()(std::byte* p) const { std::free(p); }

}  // namespace tessera
