// SPDX-License-Identifier: Apache-2.0
//
// The calls of a ContextParallel. K and V of all ranks lie in the order of the sequence, so that the keys of a call are
// a view of them: a rank copies its own rows there, and receives the others' rows in place. Key heads are computed in
// groups: while the kernels of one group run, K and V of the next are exchanged.
#include <fmt/format.h>

#include <algorithm>

#include "context_parallel/running.hpp"
#include "core/arguments.hpp"
#include "core/checks.hpp"
#include "tessera/error.hpp"

namespace tessera {
namespace {

using namespace ranks;

void check_memory(std::span<std::byte> workspace, std::size_t bytes) {
    if (workspace.size() < bytes)
        throw Error(ErrorCode::workspace_too_small, "workspace",
                    fmt::format("expected {} bytes, got {}", bytes, workspace.size()));
    if (reinterpret_cast<std::uintptr_t>(workspace.data()) % Plan::kWorkspaceAlignment != 0)
        throw Error(ErrorCode::workspace_too_small, "workspace",
                    fmt::format("expected memory aligned to {} bytes, got {}", Plan::kWorkspaceAlignment,
                                static_cast<const void*>(workspace.data())));
}

/// The shapes of this rank's tensors.
class Shapes {
 public:
    explicit Shapes(const State& s) : s_(s) {}

    void rows(const char* name, const TensorView& t, std::int64_t heads, std::int64_t dim, DType dtype) const {
        std::vector<std::int64_t> shape{s_.rows, heads, dim};
        if (!s_.whole.ragged) shape.insert(shape.begin(), s_.batch);
        const DType dtypes[] = {dtype};
        expect(name, t, shape, dtypes);
    }
    void lse(const char* name, const TensorView& t) const {
        std::vector<std::int64_t> shape{s_.whole.heads_q, s_.rows};
        if (!s_.whole.ragged) shape.insert(shape.begin(), s_.batch);
        const DType dtypes[] = {s_.whole.dtype == DType::fp64 ? DType::fp64 : DType::fp32};
        expect(name, t, shape, dtypes);
    }
    /// k, v and their gradients, whose rows are copied and added as bytes.
    void packed(const char* name, const TensorView& t, std::int64_t dim) const {
        rows(name, t, s_.whole.heads_kv, dim, s_.whole.dtype);
        const std::size_t r = row_dim(t);
        const bool heads_follow = s_.whole.heads_kv == 1 || t.strides[r + 1] == dim;
        if (t.strides[r + 2] != 1 || !heads_follow || t.strides[r] < s_.whole.heads_kv * dim)
            throw Error(ErrorCode::unsupported, name,
                        fmt::format("expected rows whose heads lie side by side, got {}", t.describe()));
    }

 private:
    void expect(const char* name, const TensorView& t, std::span<const std::int64_t> shape,
                std::span<const DType> dtypes) const {
        expect_tensor(name, t, shape, dtypes);
        if (t.device != s_.device)
            throw Error(ErrorCode::invalid_argument, name, "expected memory of the device of context_parallel()");
    }

    const State& s_;
};

/// Refuses tensors that an option of the Problem switches on. cu_seqlens are among them: context_parallel() has the
/// offsets.
template <class Args>
void refuse_others(const Args& args) {
    for (const TensorArgument<Args>& tensor : kTensors<Args>) {
        if (tensor.option.exists() && (args.*tensor.view).given())
            throw Error(ErrorCode::unsupported, tensor.name, "is not taken by a call over ranks");
    }
}

}  // namespace

std::size_t ContextParallel::workspace_bytes(Pass pass) const {
    Arena arena;
    const Memory memory(*state_, pass, arena);
    return arena.used();
}

void ContextParallel::forward(const ForwardArgs& args, std::span<std::byte> workspace, const Execution& how) {
    const State& s = *state_;
    const Problem& p = s.whole;
    const Shapes shapes(s);
    refuse_others(args);
    shapes.rows("q", args.q, p.heads_q, p.head_dim, p.dtype);
    shapes.packed("k", args.k, p.head_dim);
    shapes.packed("v", args.v, p.head_dim_v);
    shapes.rows("o", args.o, p.heads_q, p.head_dim_v, p.dtype);
    if (args.lse.given()) shapes.lse("lse", args.lse);
    if (args.o_residual.given()) shapes.rows("o_residual", args.o_residual, p.heads_q, p.head_dim_v, DType::int8);
    check_memory(workspace, workspace_bytes(Pass::forward));
    Running running(s, Pass::forward, args.k, args.v, workspace, how);
    running.each_step([&](std::size_t number) {
        const Step& step = s.steps_of(Pass::forward)[number];
        const auto& calls = s.calls[static_cast<int>(Pass::forward)];
        running.each_call(calls, how, [&](const PlannedCall& planned, auto memory, const Execution& here) {
            const CallPart part(planned, step, p.group());
            tessera::forward(planned.plans.at(step.heads()),
                             {.q = part.of(args.q),
                              .k = running.keys(planned, number, false),
                              .v = running.keys(planned, number, true),
                              .cu_seqlens_q = planned.cu_seqlens_q,
                              .cu_seqlens_kv = planned.cu_seqlens_kv,
                              .o = part.of(args.o),
                              .lse = part.of_lse(args.lse),
                              .o_residual = part.of(args.o_residual)},
                             memory, here);
        });
    });
}

void ContextParallel::backward(const BackwardArgs& args, std::span<std::byte> workspace, const Execution& how) {
    const State& s = *state_;
    const Problem& p = s.whole;
    const Shapes shapes(s);
    refuse_others(args);
    shapes.rows("q", args.q, p.heads_q, p.head_dim, p.dtype);
    shapes.packed("k", args.k, p.head_dim);
    shapes.packed("v", args.v, p.head_dim_v);
    shapes.rows("o", args.o, p.heads_q, p.head_dim_v, p.dtype);
    shapes.rows("do", args.d_o, p.heads_q, p.head_dim_v, p.dtype);
    shapes.lse("lse", args.lse);
    if (args.dlse.given()) shapes.lse("dlse", args.dlse);
    if (args.o_residual.given()) shapes.rows("o_residual", args.o_residual, p.heads_q, p.head_dim_v, DType::int8);
    shapes.rows("dq", args.dq, p.heads_q, p.head_dim, p.dtype);
    shapes.packed("dk", args.dk, p.head_dim);
    shapes.packed("dv", args.dv, p.head_dim_v);
    check_memory(workspace, workspace_bytes(Pass::backward));
    Running running(s, Pass::backward, args.k, args.v, workspace, how);
    running.each_step([&](std::size_t number) {
        const Step& step = s.steps_of(Pass::backward)[number];
        const auto& calls = s.calls[static_cast<int>(Pass::backward)];
        running.each_call(calls, how, [&](const PlannedCall& planned, auto memory, const Execution& here) {
            const CallPart part(planned, step, p.group());
            tessera::backward(planned.plans.at(step.heads()),
                              {.q = part.of(args.q),
                               .k = running.keys(planned, number, false),
                               .v = running.keys(planned, number, true),
                               .cu_seqlens_q = planned.cu_seqlens_q,
                               .cu_seqlens_kv = planned.cu_seqlens_kv,
                               .o = part.of(args.o),
                               .lse = part.of_lse(args.lse),
                               .d_o = part.of(args.d_o),
                               .dlse = part.of_lse(args.dlse),
                               .dq = part.of(args.dq),
                               .dk = running.parts(planned, number, false),
                               .dv = running.parts(planned, number, true),
                               .o_residual = part.of(args.o_residual)},
                              memory, here);
        });
        running.return_parts(number);
        if (number > 0) running.add_parts(number - 1, args.dk, args.dv);
    });
    running.add_parts(s.steps_of(Pass::backward).size() - 1, args.dk, args.dv);
}

}  // namespace tessera
