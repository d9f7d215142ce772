// SPDX-License-Identifier: Apache-2.0
//
// decode_block(): the choice of the way, and the chain of kernels. The kernels belong to the backends
// (kernel/decode_block.hpp).
#include "tessera/decode_block.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "append_checks.hpp"
#include "check_call.hpp"
#include "core/arena.hpp"
#include "core/float_mode.hpp"
#include "decode_block_checks.hpp"
#include "parallel.hpp"
#include "registry.hpp"
#include "tessera/append.hpp"
#include "tessera/error.hpp"

namespace tessera {
namespace {

[[noreturn]] void not_supported(const char* argument, const std::string& message) {
    throw Error(ErrorCode::unsupported, argument, message);
}

const DecodeBlockKernels& kernels_on(const Device& device) {
    if (const DecodeBlockKernels* kernels = decode_block_kernels(device)) return *kernels;
    not_supported("device", "decode_block() has no CUDA kernels in this build");
}

/// The workspace of the chain.
struct ChainMemory {
    std::byte* qkv = nullptr;         ///< [batch, qkv_rows()]
    std::byte* o = nullptr;           ///< [batch, heads_q, head_dim]
    std::int32_t* lengths = nullptr;  ///< [batch], with the new key
    std::span<std::byte> scratch{};
    std::span<std::byte> attention{};

    ChainMemory(Arena& arena, const DecodeBlockProblem& p, const DecodeBlockKernels& kernels, const Plan& plan) {
        qkv = arena.take<std::byte>(p.batch, p.qkv_rows(), size_of(p.dtype));
        o = arena.take<std::byte>(p.batch, p.heads_q * p.head_dim, size_of(p.dtype));
        lengths = arena.take<std::int32_t>(p.batch);
        scratch = take_bytes(arena, kernels.scratch_bytes == nullptr ? 0 : kernels.scratch_bytes(p));
        attention = take_bytes(arena, plan.workspace_bytes);
    }

 private:
    static std::span<std::byte> take_bytes(Arena& arena, std::size_t bytes) {
        auto* const data = arena.take<std::byte>(static_cast<std::int64_t>(bytes));
        return {data, data == nullptr ? 0 : bytes};
    }
};

std::size_t workspace_bytes_of(const DecodeBlockPlan& plan, const DecodeBlockKernels& kernels) {
    if (plan.way == DecodeBlockWay::one_launch) return kernels.workspace_bytes(plan.problem, plan.device);
    Arena arena;
    ChainMemory(arena, plan.problem, kernels, plan.attention);
    return arena.used();
}

/// Why the one launch does not run the Problem; empty if it does.
std::string one_launch_refusal(const DecodeBlockKernels& kernels, const DecodeBlockProblem& problem,
                               const Device& device) {
    if (kernels.one_launch == nullptr) {
        return device.type == DeviceType::cpu ? "it is a CUDA kernel, and the tensors are in host memory"
                                              : "this build does not have it";
    }
    return kernels.refuse_one_launch(problem, device).value_or("");
}

void check_block_plan(const DecodeBlockPlan& plan, const DecodeBlockKernels& kernels, std::span<std::byte> workspace) {
    plan.problem.validate();
    const bool made_by_plan = plan.threads >= 1 && plan.attention.kernel != nullptr &&
                              plan.attention.problem == plan.problem.attention() &&
                              (plan.way == DecodeBlockWay::chain ||
                               (one_launch_refusal(kernels, plan.problem, plan.device).empty() &&
                                plan.counter_bytes == kernels.counter_bytes(plan.problem, plan.device))) &&
                              workspace_bytes_of(plan, kernels) <= plan.workspace_bytes;
    if (!made_by_plan) {
        throw Error(ErrorCode::invalid_argument, "plan", "expected a plan as decode_block_plan() made it");
    }
    if (plan.workspace_bytes == 0) return;
    const bool aligned = reinterpret_cast<std::uintptr_t>(workspace.data()) % Plan::kWorkspaceAlignment == 0;
    if (workspace.size() >= plan.workspace_bytes && aligned && workspace.data() != nullptr) return;
    throw Error(ErrorCode::workspace_too_small, "workspace",
                fmt::format("expected {} bytes aligned to {}, got {} at {}", plan.workspace_bytes,
                            Plan::kWorkspaceAlignment, workspace.size(), static_cast<const void*>(workspace.data())));
}

/// A call of the chain: its tensors in the workspace, and the calls of append() and forward().
class Chain {
 public:
    Chain(const DecodeBlockPlan& plan, const DecodeBlockArgs& args, std::span<std::byte> workspace,
          const DecodeBlockKernels& kernels)
        : plan_(plan), p_(plan.problem), args_(args) {
        Arena arena(workspace);
        const ChainMemory memory(arena, p_, kernels, plan.attention);
        scratch_ = memory.scratch;
        attention_ = memory.attention;
        qkv_ = dense_view(memory.qkv, p_.dtype, {p_.batch, p_.qkv_rows()}, plan.device);
        o_ = args.o.given() ? args.o : dense_view(memory.o, p_.dtype, {p_.batch, p_.heads_q, p_.head_dim}, plan.device);
        lengths_ = dense_view(memory.lengths, DType::int32, {p_.batch}, plan.device);
    }

    std::span<std::byte> scratch() const { return scratch_; }

    /// Throws what append() and forward() would. In host memory that includes the values of lengths, tables and
    /// positions; the lengths with the new keys are written to the workspace for it.
    void check() const {
        if (plan_.device.type == DeviceType::cuda) {
            check_append(append_args(), append_options());
        } else {
            for (std::int64_t b = 0; b < p_.batch; ++b) {
                const std::int32_t before = *args_.kv_lengths.at<const std::int32_t>(b);
                *lengths_.at<std::int32_t>(b) = before < std::numeric_limits<std::int32_t>::max() ? before + 1 : before;
            }
            checked_rows(append_args(), append_options());
        }
        check_forward(plan_.attention, forward_args());
    }

    void run(const DecodeBlockKernels& kernels, const DecodeBlockCall& call, const Execution& how) const {
        kernels.norm_and_qkv(call, qkv_, lengths_);
        append(append_args(), append_options(), how);
        forward(plan_.attention, forward_args(), attention_, how);
        kernels.output(call, o_);
    }

 private:
    /// Heads [first, first + heads) of the rows of qkv, [batch, 1, heads, head_dim].
    TensorView heads_of_qkv(std::int64_t first, std::int64_t heads) const {
        std::byte* const data =
            static_cast<std::byte*>(qkv_.data) + first * p_.head_dim * static_cast<std::int64_t>(size_of(p_.dtype));
        return strided_view(data, p_.dtype, {p_.batch, 1, heads, p_.head_dim},
                            {p_.qkv_rows(), p_.qkv_rows(), p_.head_dim, 1}, plan_.device);
    }

    AppendOptions append_options() const {
        return {.rotary_interleaved = p_.rotary_interleaved, .norm_eps = p_.norm_eps, .threads = plan_.threads};
    }

    AppendArgs append_args() const {
        const TensorView q = heads_of_qkv(0, p_.heads_q);
        return {.k = heads_of_qkv(p_.heads_q, p_.heads_kv),
                .v = heads_of_qkv(p_.heads_q + p_.heads_kv, p_.heads_kv),
                .k_cache = args_.k_cache,
                .v_cache = args_.v_cache,
                .kv_lengths = args_.kv_lengths,
                .page_table = args_.page_table,
                .cache_batch_index = args_.cache_batch_index,
                .rotary_cos = args_.rotary_cos,
                .rotary_sin = args_.rotary_sin,
                .positions = args_.positions,
                .q = q,
                .q_out = q,
                .k_norm = args_.k_norm,
                .q_norm = args_.q_norm};
    }

    ForwardArgs forward_args() const {
        TensorView o = o_, lse = args_.lse;
        o.rank = 4;
        o.shape = {p_.batch, 1, p_.heads_q, p_.head_dim};
        o.strides = {o_.strides[0], o_.strides[0], o_.strides[1], o_.strides[2]};
        if (lse.given()) lse.rank = 3, lse.shape[2] = 1, lse.strides[2] = 1;
        return {.q = heads_of_qkv(0, p_.heads_q),
                .k = args_.k_cache,
                .v = args_.v_cache,
                .o = o,
                .lse = lse,
                .sinks = args_.sinks,
                .kv_lengths = lengths_,
                .page_table = args_.page_table,
                .cache_batch_index = args_.cache_batch_index,
                .left_padding = args_.left_padding};
    }

    const DecodeBlockPlan& plan_;
    const DecodeBlockProblem& p_;
    const DecodeBlockArgs& args_;
    std::span<std::byte> scratch_, attention_;
    TensorView qkv_, o_, lengths_;
};

ParallelFor loop_on_cpu(const Execution& how) {
    ParallelFor loop = how.parallel_for ? how.parallel_for : ParallelFor(default_parallel_for);
    return [loop = std::move(loop)](std::int64_t tasks, int workers, const TaskBody& body) {
        loop(tasks, workers, [&body](std::int64_t task, int worker) {
            const DefaultFloatMode mode;
            body(task, worker);
        });
    };
}

}  // namespace

DecodeBlockPlan decode_block_plan(const DecodeBlockProblem& problem, const DecodeBlockOptions& options) {
    problem.validate();
    DecodeBlockPlan result{
        .problem = problem, .device = options.device.value_or(Device{}), .early_weights = options.early_weights};
    const PlanOptions of_attention{.threads = options.threads, .device = result.device};
    if (const auto reason = unavailable(result.device)) {
        throw Error(ErrorCode::device_unavailable, "device", *reason);
    }
    const DecodeBlockKernels& kernels = kernels_on(result.device);
    if (const auto reason = kernels.refuse(problem, result.device)) not_supported("", *reason);
    result.attention = plan(problem.attention(), of_attention);
    result.threads = result.attention.threads;
    std::string refused = one_launch_refusal(kernels, problem, result.device);
    if (options.way == DecodeBlockWay::one_launch && !refused.empty()) not_supported("way", refused);
    const bool one_launch = options.way.value_or(DecodeBlockWay::one_launch) == DecodeBlockWay::one_launch;
    result.way = one_launch && refused.empty() ? DecodeBlockWay::one_launch : DecodeBlockWay::chain;
    result.refused = one_launch ? std::move(refused) : "";
    if (result.way == DecodeBlockWay::one_launch) result.counter_bytes = kernels.counter_bytes(problem, result.device);
    result.workspace_bytes = workspace_bytes_of(result, kernels);
    if (result.workspace_bytes >= Arena::kTooMuch) {
        not_supported("", "would need more workspace than memory can address");
    }
    return result;
}

std::string DecodeBlockPlan::describe() const {
    if (attention.kernel == nullptr) return "problem    none: not made by decode_block_plan()\n";
    std::string text = fmt::format("problem    {}\nway        {}", problem.describe(), name_of(way));
    if (!refused.empty()) text += fmt::format("\n           not one launch: {}", refused);
    text += device.type == DeviceType::cuda ? fmt::format("\ndevice     CUDA device {}", device.index)
                                            : fmt::format("\nthreads    {}", threads);
    text += fmt::format("\nworkspace  {} B", workspace_bytes);
    if (counter_bytes > 0) text += fmt::format(", of which the first {} are 0 before the first call", counter_bytes);
    return text + fmt::format("\nattention  {} ({})\n", attention.kernel->name, attention.target);
}

void decode_block(const DecodeBlockPlan& plan, const DecodeBlockArgs& args, std::span<std::byte> workspace,
                  const Execution& how) {
    const DefaultFloatMode mode;
    const DecodeBlockKernels& kernels = kernels_on(plan.device);
    check_block_plan(plan, kernels, workspace);
    check_decode_block(plan.problem, args, plan.device, workspace.first(plan.workspace_bytes));
    if (const auto refusal = kernels.refuse_tensors(plan.problem, args))
        not_supported(refusal->tensor, refusal->reason);
    if (kernels.expect_memory != nullptr && !how.skip_memory_check)
        kernels.expect_memory(args, workspace.first(plan.workspace_bytes), plan.device);

    DecodeBlockArgs given = args;
    if (!given.residual.given()) given.residual = given.x;
    if (plan.problem.rotary_dim > 0 && !given.positions.given()) given.positions = given.kv_lengths;
    const bool on_cpu = plan.device.type == DeviceType::cpu;
    const auto call_with = [&](std::span<std::byte> scratch) {
        return DecodeBlockCall{plan.problem, given,      plan.device,        on_cpu ? loop_on_cpu(how) : ParallelFor{},
                               plan.threads, how.stream, plan.early_weights, scratch};
    };
    if (plan.way == DecodeBlockWay::one_launch) {
        if (plan.problem.batch > 0) kernels.one_launch(call_with({}), workspace);
        return;
    }
    const Chain chain(plan, args, workspace, kernels);
    chain.check();
    if (plan.problem.batch > 0) chain.run(kernels, call_with(chain.scratch()), how);
}

}  // namespace tessera
