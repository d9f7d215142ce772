// SPDX-License-Identifier: Apache-2.0
#include "check/compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "check/compare_tensor.hpp"
#include "check/gold.hpp"
#include "check/unfused.hpp"
#include "tessera/plan.hpp"

namespace tessera::check {
namespace {

Plan gold_plan(const Problem& problem, Pass pass) {
    return plan(problem, {.pass = pass, .backend = Backend::reference});
}

bool has_unfused(DType dtype) { return dtype == DType::bf16 || dtype == DType::fp16; }

}  // namespace

struct ForwardGold::State {
    DType dtype;
    TensorGold o;
    TensorGold lse;
};

ForwardGold::ForwardGold(const Problem& problem, const ForwardArgs& inputs) {
    PackedCall<ForwardArgs> packed = pack(problem, inputs);
    const Packed lse_like = packed_lse(problem);
    state_ = std::make_unique<State>(
        State{problem.dtype, TensorGold("o", inputs.o, problem.dtype), TensorGold("lse", lse_like.view)});
    const Plan how = gold_plan(packed.problem, Pass::forward);
    const Workspace workspace(how);
    ForwardArgs call = packed.call;
    call.o = state_->o.value.view;
    call.lse = state_->lse.value.view;
    forward(how, call, workspace);
    state_->o.has_copies = has_copies({&packed.q, &packed.k, &packed.v});
    add_magnitudes(packed, state_->o, state_->lse);
    if (has_unfused(problem.dtype)) add_unfused(packed, problem.dtype, state_->o);
}

ForwardGold::~ForwardGold() = default;
ForwardGold::ForwardGold(ForwardGold&&) noexcept = default;
const TensorView& ForwardGold::o() const { return state_->o.value.view; }
const TensorView& ForwardGold::lse() const { return state_->lse.value.view; }

Report ForwardGold::compare(const ForwardArgs& finished) const {
    Report report;
    report.tensors.push_back(compare_tensor(state_->o, finished.o, state_->dtype, Role::output));
    if (finished.lse.given())
        report.tensors.push_back(compare_tensor(state_->lse, finished.lse, state_->dtype, Role::lse));
    return report;
}

struct BackwardGold::State {
    DType dtype;
    TensorGold dq;
    TensorGold dk;
    TensorGold dv;
    TensorGold dbias;
    TensorGold dsinks;
};

BackwardGold::BackwardGold(const Problem& problem, const BackwardArgs& inputs) {
    PackedCall<BackwardArgs> packed = pack(problem, inputs);
    const TensorView like_dbias = problem.bias_gradient ? inputs.bias : TensorView{};
    const TensorView like_dsinks = problem.sinks ? inputs.sinks : TensorView{};
    state_ = std::make_unique<State>(State{
        problem.dtype, TensorGold("dq", inputs.q, problem.dtype), TensorGold("dk", inputs.k, problem.dtype),
        TensorGold("dv", inputs.v, problem.dtype),
        TensorGold("dbias", like_dbias, problem.dtype, Positions::last_but_one), TensorGold("dsinks", like_dsinks)});
    const Packed o = packed_zeros(inputs.d_o);  // a placeholder, because the reference recomputes O
    const Packed lse = packed_lse(problem);
    const Plan how = gold_plan(packed.problem, Pass::backward);
    const Workspace workspace(how);
    BackwardArgs call = packed.call;
    call.o = o.view;
    call.lse = lse.view;
    call.dq = state_->dq.value.view;
    call.dk = state_->dk.value.view;
    call.dv = state_->dv.value.view;
    call.dbias = state_->dbias.value.view;
    call.dsinks = state_->dsinks.value.view;
    backward(how, call, workspace);
    const Gradients all{&state_->dq, &state_->dk, &state_->dv, problem.bias_gradient ? &state_->dbias : nullptr,
                        problem.sinks ? &state_->dsinks : nullptr};
    for (TensorGold* gold : {all.dq, all.dk, all.dv, all.dbias, all.dsinks}) {
        if (gold != nullptr) gold->has_copies = has_copies({&packed.q, &packed.k, &packed.v, &packed.d_o});
    }
    add_magnitudes(packed, all, inputs.o_residual.given());
    if (has_unfused(problem.dtype)) add_unfused(packed, problem.dtype, all);
}

BackwardGold::~BackwardGold() = default;
BackwardGold::BackwardGold(BackwardGold&&) noexcept = default;
const TensorView& BackwardGold::dq() const { return state_->dq.value.view; }
const TensorView& BackwardGold::dk() const { return state_->dk.value.view; }
const TensorView& BackwardGold::dv() const { return state_->dv.value.view; }
const TensorView& BackwardGold::dbias() const { return state_->dbias.value.view; }
const TensorView& BackwardGold::dsinks() const { return state_->dsinks.value.view; }

Report BackwardGold::compare(const BackwardArgs& finished) const {
    Report report;
    report.tensors.push_back(compare_tensor(state_->dq, finished.dq, state_->dtype, Role::gradient));
    report.tensors.push_back(compare_tensor(state_->dk, finished.dk, state_->dtype, Role::gradient));
    report.tensors.push_back(compare_tensor(state_->dv, finished.dv, state_->dtype, Role::gradient));
    if (finished.dbias.given()) {
        report.tensors.push_back(compare_tensor(state_->dbias, finished.dbias, state_->dtype, Role::gradient));
    }
    // fp32 for any dtype, since delta is not rounded. No limit is stated with the residual of O (docs/numerics.md).
    if (finished.dsinks.given() && !finished.o_residual.given()) {
        report.tensors.push_back(compare_tensor(state_->dsinks, finished.dsinks, DType::fp32, Role::gradient));
    }
    return report;
}

Report check_forward(const Problem& problem, const ForwardArgs& finished) {
    return ForwardGold(problem, finished).compare(finished);
}

Report check_backward(const Problem& problem, const BackwardArgs& finished) {
    return BackwardGold(problem, finished).compare(finished);
}

bool Report::pass() const {
    return std::all_of(tensors.begin(), tensors.end(), [](const TensorReport& t) { return t.pass; });
}

std::string Report::describe() const {
    std::string text;
    for (const TensorReport& t : tensors) {
        text += fmt::format(
            "{:<6} {}  {}: {:.3g} of {:.3g} allowed; relative rmse {:.3g}, max error {:.3g}; worst {}\n", t.name,
            t.pass ? "ok  " : "FAIL", t.rule, t.value, t.limit, t.relative_rmse, t.max_abs_error, t.worst);
    }
    return text;
}

}  // namespace tessera::check
