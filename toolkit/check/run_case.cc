// SPDX-License-Identifier: Apache-2.0
#include "check/run_case.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "check/case_cache.hpp"
#include "check/case_tensors.hpp"
#include "check/guarded.hpp"
#include "check/limits.hpp"
#include "check/packed.hpp"
#include "core/numeric.hpp"
#include "device/device_copy.hpp"
#include "tessera/error.hpp"
#include "tessera/plan.hpp"

namespace tessera::check {
namespace {

/// Sets the elements of `to` that `set` names.
void set_elements(const TensorView& to, const SetElements& set) {
    const auto shape = shape_of_rank_4(to);
    const double largest = to.dtype == DType::fp16 ? 65504 : to.dtype == DType::bf16 ? 0x1.FEp127 : 0x1.FFFFFEp127;
    const double value = std::isfinite(set.value) ? std::clamp(set.value, -largest, largest) : set.value;
    for_each_element(to, [&](std::int64_t flat, std::byte* element) {
        bool chosen = true;
        for (std::size_t d = 4; d-- > 0; flat /= shape[d]) {
            chosen = chosen && (set.index[d] == SetElements::all || set.index[d] % shape[d] == flat % shape[d]);
        }
        if (chosen) store_from_double(element, to.dtype, value);
    });
}

struct NamedTensor {
    const char* name;
    GuardedTensor* tensor;
};

TensorReport memory_damage(const std::string& what) {
    TensorReport report;
    report.name = "memory";
    report.rule = "changed outside the outputs";
    report.value = 1;
    report.pass = false;
    report.worst = what;
    return report;
}

Report appended(Report report, const Report& more) {
    report.tensors.insert(report.tensors.end(), more.tensors.begin(), more.tensors.end());
    return report;
}

/// True if the kernel may refuse the case for this reason.
bool may_refuse(const Case& c, const KernelInfo& kernel, const Error& reason) {
    if (reason.code() == ErrorCode::device_unavailable) return true;
    const auto says = [&](std::string_view text) {
        return !text.empty() && std::string_view(reason.what()).find(text) != std::string_view::npos;
    };
    return needs_another_gpu(kernel, reason.what()) || says(expected_refusal(kernel, c.problem));
}

/// Returns a Plan, or an Outcome that says why there is none.
std::variant<Plan, Outcome> plan_of(const Case& c, const KernelInfo& kernel) {
    PlanOptions options{.pass = kernel.pass, .kernel = kernel.name, .tile = c.tile, .threads = c.threads};
    for (;;) {
        try {
            return plan(c.problem, options);
        } catch (const Error& e) {
            if (e.code() != ErrorCode::unsupported && e.code() != ErrorCode::device_unavailable) throw;
            if (!options.tile || e.code() == ErrorCode::device_unavailable)
                return Outcome{.refusal = e.what(), .may_refuse = may_refuse(c, kernel, e)};
            options.tile.reset();
        }
    }
}

}  // namespace

struct CaseRunner::State {
    Case c;
    GuardedTensor q, k, v, bias, slopes, cu_q, cu_kv, o, o_residual, lse, d_o, dlse, sinks;
    GuardedTensor kv_lengths, table, left;  // of a cache
    ForwardArgs forward{};
    BackwardArgs backward{};
    std::optional<ForwardGold> forward_gold;
    std::optional<BackwardGold> backward_gold;

    std::vector<NamedTensor> inputs() {
        return {{"q", &q},
                {"k", &k},
                {"v", &v},
                {"bias", &bias},
                {"alibi_slopes", &slopes},
                {"cu_seqlens_q", &cu_q},
                {"cu_seqlens_kv", &cu_kv},
                {"o", &o},
                {"o_residual", &o_residual},
                {"lse", &lse},
                {"do", &d_o},
                {"dlse", &dlse},
                {"sinks", &sinks},
                {"kv_lengths", &kv_lengths},
                {"page_table", &table},
                {"left_padding", &left}};
    }

    template <class Args>
    void set_inputs(Args& args) {
        args.q = q.view();
        args.k = k.view();
        args.v = v.view();
        args.bias = bias.view();
        args.alibi_slopes = slopes.view();
        args.sinks = sinks.view();
        args.cu_seqlens_q = cu_q.view();
        args.cu_seqlens_kv = cu_kv.view();
        args.o = o.view();
    }

    Report run_forward(const Plan& plan, const Execution& how, const ForwardGold& gold);
    Report run_backward(const Plan& plan, const Execution& how, const BackwardGold& gold);

    /// Calls run(tensors, workspace) with the tensors where the plan expects them; on a CUDA device all the memory
    /// around them is copied too. Returns false if a guard band of the workspace changed.
    template <class Args, class Run>
    bool run_planned(const Plan& plan, std::span<const NamedTensor> outputs, const Args& args, const Run& run) {
        if (plan.device.type == DeviceType::cpu) {
            GuardedWorkspace workspace(plan.workspace_bytes);
            run(args, workspace.span());
            return workspace.bands_unchanged();
        }
        device::DeviceCopy copy(plan.device);
        for (const NamedTensor& out : outputs) copy.add_memory(out.tensor->memory());
        for (const NamedTensor& in : inputs()) copy.add_memory(in.tensor->memory());
        const Args mirrored = copy.add(args);
        run(mirrored, copy.workspace(plan.workspace_bytes));
        copy.copy_back();
        return copy.workspace_bands_unchanged();
    }

    /// Runs a planned call between a snapshot and a comparison of all memory. Inputs that are outputs of this call
    /// (o and lse of a forward) count as outputs.
    template <class Args, class Run>
    void run_guarded(const Plan& plan, std::span<const NamedTensor> outputs, const Args& args, Report& report,
                     const Run& run) {
        for (const NamedTensor& out : outputs) out.tensor->poison(), out.tensor->snapshot();
        for (const NamedTensor& in : inputs()) in.tensor->snapshot();
        const auto damaged = [&](const std::string& what) { report.tensors.push_back(memory_damage(what)); };
        if (!run_planned(plan, outputs, args, run)) damaged("written outside the workspace");
        for (const NamedTensor& out : outputs) {
            if (!out.tensor->unchanged(false)) damaged(std::string("written between the elements of ") + out.name);
        }
        for (const NamedTensor& in : inputs()) {
            const bool is_output = std::any_of(outputs.begin(), outputs.end(),
                                               [&](const NamedTensor& out) { return out.tensor == in.tensor; });
            if (!is_output && !in.tensor->unchanged(true)) damaged(std::string("written to the input ") + in.name);
        }
    }
};

CaseRunner::CaseRunner(const Case& which) : state_(std::make_unique<State>()) {
    State& s = *state_;
    s.c = which;
    const Problem& p = s.c.problem;
    s.q = rows_tensor(which, kQ, true, p.head_dim, which.expanded[0]);
    s.k = rows_tensor(which, kK, false, p.head_dim, which.expanded[1]);
    s.v = rows_tensor(which, kV, false, p.head_dim_v, which.expanded[2]);
    if (p.kv_lengths && which.cache_layout != CacheLayout::separate) {
        auto [k, v] = cache_in_one_memory(which, seed_of(which, kK));
        s.k = std::move(k);
        s.v = std::move(v);
    }
    s.o = rows_tensor(which, kO, true, p.head_dim_v);
    s.d_o = rows_tensor(which, kDo, true, p.head_dim_v, which.expanded[3]);
    s.lse = lse_tensor(which, kLse);
    if (which.o_residual) s.o_residual = residual_tensor(which);
    fill(s.q.view(), which.q, seed_of(which, kQ));
    fill(s.k.view(), which.k, seed_of(which, kK));
    fill(s.v.view(), which.v, seed_of(which, kV));
    fill(s.d_o.view(), which.d_o, seed_of(which, kDo));
    if (which.dlse) {
        s.dlse = lse_tensor(which, kDlse);
        fill(s.dlse.view(), Fill::normal, seed_of(which, kDlse));
    }
    if (p.bias) {
        s.bias = bias_tensor(which, kBias, which.bias_expanded);
        fill(s.bias.view(), Fill::normal, seed_of(which, kBias));
        punch_holes(s.bias.view(), which.bias_holes, seed_of(which, kBias));
    }
    for (const SetElements& set : which.elements) {
        const GuardedTensor* const inputs[] = {&s.q, &s.k, &s.v, &s.d_o, &s.bias, &s.dlse};
        set_elements(inputs[static_cast<std::size_t>(set.input)]->view(), set);
    }
    if (p.alibi) s.slopes = slopes_tensor(which);
    if (p.sinks) {
        s.sinks = sinks_tensor(which, kSinks);
        fill(s.sinks.view(), Fill::normal, seed_of(which, kSinks));
        if (which.sinks_of_all_sizes) set_sinks_of_all_sizes(s.sinks.view());
    }
    if (p.ragged) {
        s.cu_q = cu_seqlens(which, kCuQ, which.lengths_q);
        if (!p.kv_lengths) s.cu_kv = cu_seqlens(which, kCuKv, which.lengths_kv);
    }
    if (p.kv_lengths) {
        for (const GuardedTensor* t : {&s.k, &s.v}) poison_unused_rows(which, t->view(), seed_of(which, kTable));
        s.kv_lengths = cache_integers(which, which.lengths_kv, seed_of(which, kLengths));
        if (p.page_size > 0) s.table = cache_page_table(which, seed_of(which, kTable));
        if (p.left_padding) s.left = cache_integers(which, which.padding, seed_of(which, kCuKv));
    }
    s.forward.kv_lengths = s.kv_lengths.view();
    s.forward.page_table = s.table.view();
    s.forward.left_padding = s.left.view();
    s.set_inputs(s.forward);
    s.set_inputs(s.backward);
    if (which.lse) s.forward.lse = s.lse.view();
    s.backward.lse = s.lse.view();
    s.backward.d_o = s.d_o.view();
    s.backward.dlse = s.dlse.view();
}

CaseRunner::~CaseRunner() = default;

const Problem& CaseRunner::problem() const { return state_->c.problem; }
const ForwardArgs& CaseRunner::forward_inputs() const { return state_->forward; }
const BackwardArgs& CaseRunner::backward_inputs() const { return state_->backward; }

const ForwardGold& CaseRunner::forward_gold() {
    if (!state_->forward_gold) state_->forward_gold.emplace(state_->c.problem, state_->forward);
    return *state_->forward_gold;
}

const BackwardGold& CaseRunner::backward_gold() {
    if (!state_->backward_gold) {
        BackwardArgs inputs = state_->backward;
        inputs.o_residual = state_->o_residual.view();
        state_->backward_gold.emplace(state_->c.problem, inputs);
    }
    return *state_->backward_gold;
}

Report CaseRunner::State::run_forward(const Plan& plan, const Execution& how, const ForwardGold& gold) {
    Report damage;
    std::vector<NamedTensor> outputs{{"o", &o}, {"lse", &lse}};
    ForwardArgs wanted = forward;
    if (plan.o_residual) {
        wanted.o_residual = o_residual.view();
        outputs.push_back({"o_residual", &o_residual});
    }
    run_guarded(plan, outputs, wanted, damage, [&](const ForwardArgs& args, std::span<std::byte> workspace) {
        tessera::forward(plan, args, workspace, how);
    });
    return appended(gold.compare(forward), damage);
}

Report CaseRunner::State::run_backward(const Plan& plan, const Execution& how, const BackwardGold& gold) {
    GuardedTensor dq = rows_tensor(c, kDq, true, c.problem.head_dim);
    GuardedTensor dk = rows_tensor(c, kDk, false, c.problem.head_dim);
    GuardedTensor dv = rows_tensor(c, kDv, false, c.problem.head_dim_v);
    GuardedTensor dbias = c.problem.bias_gradient ? bias_tensor(c, kDbias) : GuardedTensor();
    GuardedTensor dsinks = c.problem.sinks ? sinks_tensor(c, kDsinks) : GuardedTensor();
    BackwardArgs args = backward;
    args.dq = dq.view();
    args.dk = dk.view();
    args.dv = dv.view();
    args.dbias = dbias.view();
    args.dsinks = dsinks.view();
    if (plan.o_residual) args.o_residual = o_residual.view();
    Report damage;
    const NamedTensor outputs[] = {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {"dbias", &dbias}, {"dsinks", &dsinks}};
    run_guarded(plan, outputs, args, damage, [&](const BackwardArgs& planned, std::span<std::byte> workspace) {
        tessera::backward(plan, planned, workspace, how);
    });
    return appended(gold.compare(args), damage);
}

Outcome CaseRunner::run(const KernelInfo& kernel, const Execution& how) {
    State& s = *state_;
    auto planned = plan_of(s.c, kernel);
    if (auto* refused = std::get_if<Outcome>(&planned)) return std::move(*refused);
    Outcome outcome;
    const Plan& plan = std::get<Plan>(planned);
    try {
        if (kernel.pass == Pass::forward) {
            outcome.report = s.run_forward(plan, how, forward_gold());
        } else {
            store_all(forward_gold().o(), s.o.view());
            store_all(forward_gold().lse(), s.lse.view());
            if (s.c.o_residual) store_residuals(forward_gold().o(), s.o_residual.view(), s.c.problem.dtype);
            outcome.report = s.run_backward(plan, how, backward_gold());
        }
    } catch (const Error& e) {  // the kernel refuses the strides of a tensor
        if (e.code() != ErrorCode::unsupported) throw;
        outcome.refusal = e.what();
        outcome.may_refuse = kernel.backend == Backend::cuda;
    }
    return outcome;
}

Outcome run_case(const Case& which, const KernelInfo& kernel) { return CaseRunner(which).run(kernel); }

}  // namespace tessera::check
