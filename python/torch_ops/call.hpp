// SPDX-License-Identifier: Apache-2.0
//
// From the arguments of an operator's schema to a plan, and the run of that plan; both passes use it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tensors.hpp"

namespace tessera::torch_ops {

/// The schema's arguments that are no tensors, under the names of operators.cc.
struct Settings {
    std::int64_t max_len_q = -1;  ///< ragged batches only: an upper bound of the lengths; -1: unknown
    std::int64_t max_len_kv = -1;
    std::int64_t causal = 0;        ///< 0 none, 1 bottom-right, 2 top-left
    std::int64_t window_left = -1;  ///< number of keys; -1: no limit
    std::int64_t window_right = -1;
    std::optional<double> scale{};
    double softcap = 0;
    double dropout_p = 0;
    std::optional<std::string> kernel{};
    bool heads_first = false;  ///< dense q, k, v, o and gradients are [batch, heads, len, dim]
};

/// Input tensors of both passes.
struct Inputs {
    TensorRef q;  // [batch, len_q, heads_q, head_dim] | [total_q, heads_q, head_dim]
    TensorRef k;
    TensorRef v;
    TensorRef bias{};
    TensorRef alibi_slopes{};
    TensorRef cu_seqlens_q{};
    TensorRef cu_seqlens_kv{};
    TensorRef seed{};   // int64 [1], in host memory
    TensorRef sinks{};  // fp32 [heads_q]
};

/// The Problem that shapes and settings describe. Throws Error(invalid_argument).
Problem problem_of(const Inputs& in, const Settings& settings, bool bias_gradient);

/// The plan of a problem for tensors on the device of q. Each thread caches its last plans by pass, since a model
/// repeats few problems. The reference is valid until the thread's next call of this function.
const Plan& plan_of(const Problem& problem, Pass pass, const Settings& settings, TensorRef q);

/// The plan for the kernel after that of `plan` in the order of preference, cached in the same way. Null when there is
/// none or the caller named the kernel.
const Plan* next_plan(const Plan& plan, const Settings& settings);

/// Whether copies of q, k, v (and of dO) into aligned rows take less time than the next kernel would add.
///
/// The kernel that refuses unaligned rows is fa3, and the next one, fa2, takes about twice its time. So the copies pay
/// if they take less time than fa3: if a pass has 295 FLOP or more for each byte that they read and write, the ratio of
/// an H100 (989 TFLOP/s and 3.35 TB/s in its data sheet). One head is counted, with its lengths and its mask, since the
/// choice of a kernel changes bits and must not depend on batch and heads. The lengths of a ragged batch are on the
/// device and its members are neighbours: there the copies always pay.
bool copies_pay(const Problem& problem, Pass pass);

/// Sets the device and the number of threads. cpu.cc and cuda.cc define it, one in each library. Throws
/// Error(invalid_argument) when q is on another device.
void set_device_and_threads(PlanOptions& options, TensorRef q);

/// PyTorch's threads on the CPU, its current stream on CUDA.
Execution execution_of(TensorRef q);

/// Sets the options of the Problem that say which inputs are given.
inline void set_options(Problem& p, const Inputs& in) {
    p.bias = in.bias.has_value();
    p.alibi = in.alibi_slopes.has_value();
    p.sinks = in.sinks.has_value();
}

/// ForwardArgs or BackwardArgs with the fields that both have.
template <class Args>
Args args_of(const Inputs& in, bool heads_first) {
    Args args;
    args.q = rows_of("q", in.q, heads_first);
    args.k = rows_of("k", in.k, heads_first);
    args.v = rows_of("v", in.v, heads_first);
    args.bias = view_of("bias", in.bias);
    args.alibi_slopes = view_of("alibi_slopes", in.alibi_slopes);
    args.sinks = view_of("sinks", in.sinks);
    args.cu_seqlens_q = view_of("cu_seqlens_q", in.cu_seqlens_q);
    args.cu_seqlens_kv = view_of("cu_seqlens_kv", in.cu_seqlens_kv);
    return args;
}

/// The tensors of a call that a copy may replace, by the names of their arguments.
struct Copyable {
    std::string_view argument;
    TensorRef tensor;
    TensorView* view;  ///< of ForwardArgs or BackwardArgs
};

/// Runs forward() or backward() by the plan of the problem, with a workspace from PyTorch's allocator. When the planned
/// kernel refuses the strides or the alignment of a tensor, the tensor is copied if copies_pay(), otherwise the next
/// kernel runs. Clears args.o_residual when the kernel does not support it.
template <class Args>
void run(const Problem& problem, Pass pass, const Settings& settings, std::span<const Copyable> inputs, Args& args) {
    const TensorRef q = inputs.front().tensor;
    const auto run_by = [&](const Plan& plan) {
        if (!plan.o_residual) args.o_residual = {};
        const TorchWorkspace workspace(q, plan);
        if constexpr (std::is_same_v<Args, ForwardArgs>) forward(plan, args, workspace.span(), execution_of(q));
        else backward(plan, args, workspace.span(), execution_of(q));
    };
    const Plan& plan = plan_of(problem, pass, settings, q);
    const Plan* next = nullptr;
    std::vector<std::pair<std::string, Tensor>> copies;
    while (next == nullptr) {
        try {
            return run_by(plan);
        } catch (const Error& error) {
            if (error.code() == ErrorCode::unsupported) next = next_plan(plan, settings);
            if (next == nullptr) throw;
            const auto named = [&](const auto& entry) { return std::get<0>(entry) == error.argument(); };
            const auto refused = std::find_if(inputs.begin(), inputs.end(),
                                              [&](const Copyable& c) { return c.argument == error.argument(); });
            if (refused == inputs.end() || std::any_of(copies.begin(), copies.end(), named)) continue;
            if (!copies_pay(problem, pass)) continue;
            copies.emplace_back(error.argument(), aligned_copy(refused->tensor, settings.heads_first));
            *refused->view = rows_of(error.argument().c_str(), copies.back().second, settings.heads_first);
            next = nullptr;
        }
    }
    run_by(*next);
}

/// Runs `body` and turns an Error into a std::runtime_error whose text begins with "tessera <code>: ". Python derives
/// the class of its exception from that code (_errors.py).
template <class Body>
auto with_torch_errors(const Body& body) {
    try {
        return body();
    } catch (const Error& error) {
        throw std::runtime_error("tessera " + std::to_string(static_cast<int>(error.code())) + ": " + error.what());
    }
}

}  // namespace tessera::torch_ops
