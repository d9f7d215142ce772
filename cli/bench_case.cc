// SPDX-License-Identifier: Apache-2.0
#include "bench_case.hpp"

#include <fmt/format.h>

#include <functional>

#include "commit.hpp"
#include "core/arguments.hpp"
#include "device/device_copy.hpp"
#include "generated.hpp"
#include "measure/work.hpp"

namespace tessera::cli {
namespace {

/// All inputs and outputs of a plan, for both passes.
struct Operands {
    GeneratedInputs in;
    OwnedTensor o, lse, o_residual, dq, dk, dv, dsinks;
    std::vector<TensorView> views;  ///< every tensor, to be evicted from the caches

    Operands(const Problem& p, const std::vector<std::pair<std::int64_t, std::int64_t>>& sequences, bool backward)
        : in(generate_inputs(p, sequences, Layout::bshd, check::Fill::normal, p.dropout.seed, backward)) {
        using Shape = std::vector<std::int64_t>;
        const auto like = [&](const char* name, const TensorView& t, std::int64_t dim, DType dtype) {
            Shape shape(t.shape.begin(), t.shape.begin() + t.rank);
            shape.back() = dim;
            return make_tensor(name, dtype, shape);
        };
        o = like("o", in.tensors.q, p.head_dim_v, p.dtype);
        lse = make_tensor("lse", DType::fp32, in.layout.lse_in_file(p));
        if (backward && is_16_bit(p.dtype)) {
            o_residual = like("o_residual", in.tensors.q, p.head_dim_v, DType::int8);
        }
        if (backward) {
            dq = like("dq", in.tensors.q, p.head_dim, p.dtype);
            dk = like("dk", in.tensors.k, p.head_dim, p.dtype);
            dv = like("dv", in.tensors.v, p.head_dim_v, p.dtype);
            if (p.sinks) dsinks = make_tensor("dsinks", DType::fp32, Shape{p.heads_q});
        }
        for (const auto& [name, view] : in.named()) views.push_back(view);
        for (const OwnedTensor* t : {&o, &lse, &o_residual, &dq, &dk, &dv, &dsinks}) {
            if (t->view.given()) views.push_back(t->view);
        }
    }

    ForwardArgs forward() const {
        ForwardArgs args = in.forward_args();
        args.o = o.view;
        args.lse = lse.view;
        args.o_residual = o_residual.view;
        return args;
    }
    BackwardArgs backward() const {
        BackwardArgs args = in.tensors;
        args.o = o.view;
        args.lse = lse.view;
        args.o_residual = o_residual.view;
        args.dq = dq.view;
        args.dk = dk.view;
        args.dv = dv.view;
        args.dsinks = dsinks.view;
        return args;
    }
};

/// Times run(tensors, workspace) on tensors that are placed on the plan's device.
template <class Args, class Run>
measure::Measurement time_plan(const Plan& plan, const Args& host, std::span<const TensorView> views, BenchRun& bench,
                               const Run& run) {
    const auto gauge = measure::gauge_of(plan.device);
    if (plan.device.type == DeviceType::cpu) {
        expect_workspace(plan);
        const Workspace workspace(plan);
        const auto call = [&] { run(host, workspace.span()); };
        return measure::time_call(call, views, bench.cache, bench.method, gauge.get());
    }
    device::DeviceCopy copy(plan.device);
    const Args mirrored = copy.add(host);
    const std::span<std::byte> workspace = copy.workspace(plan.workspace_bytes);
    const device::CacheEviction evict(plan.device);
    const auto call = [&] {
        run(mirrored, workspace);
        device::synchronize(plan.device);
    };
    return measure::time_call(call, std::cref(evict), bench.method, gauge.get());
}

/// True if the backward gets the residual of O from the forward plan `before`.
bool keeps_residual(const Plan& plan, const Plan& before) { return plan.o_residual && before.o_residual; }

Plan forward_before(const Plan& plan) { return tessera::plan(plan.problem, {.device = plan.device}); }

measure::Measurement time_pass(const Plan& plan, const Operands& operands, BenchRun& run, Progress& progress) {
    if (plan.pass == Pass::forward) {  // inference, so without the residual of O
        return time_plan(plan, operands.forward(), operands.views, run, [&](const auto& args, auto workspace) {
            forward(plan, args, workspace);
            progress.done();
        });
    }
    // The backward starts from a forward's results, and gets the residual of O if both kernels support it.
    const Plan before = forward_before(plan);
    ForwardArgs first = operands.forward();
    BackwardArgs second = operands.backward();
    if (!keeps_residual(plan, before)) first.o_residual = second.o_residual = {};
    device::run_on_host_tensors(before, first,
                                [&](const auto& args, auto workspace) { forward(before, args, workspace); });
    return time_plan(plan, second, operands.views, run, [&](const auto& args, auto workspace) {
        backward(plan, args, workspace);
        progress.done();
    });
}

}  // namespace

measure::Record described(const Plan& plan, const measure::Host& host) {
    measure::Record record = measure::record_of(plan, {}, 0);
    const bool on_host = plan.device.type == DeviceType::cpu;
    record.device = on_host ? measure::text_of(host) : plan.target;
    record.versions = {{"tessera", TESSERA_VERSION}, {"compiler", TESSERA_COMPILER}};
    if (host.faked) record.versions["host"] = "faked";
    record.commit = TESSERA_COMMIT;
    return record;
}

measure::Record measure_case(const Plan& plan, const BenchSet& set, BenchRun& run, Progress& progress) {
    const Operands operands(plan.problem, set.shape.sequences(), plan.pass == Pass::backward);
    progress.expect(run.method.repeat + 1);
    measure::Record record = described(plan, run.host);
    record.date = measure::utc_date();
    for (const auto& [q, kv] : set.shape.sequences()) record.lens_q.push_back(q), record.lens_kv.push_back(kv);
    if (plan.pass == Pass::backward && keeps_residual(plan, forward_before(plan))) {
        record.features += record.features.empty() ? "residual of O" : ", residual of O";
    }
    const measure::Measurement measured = time_pass(plan, operands, run, progress);
    const auto pairs = measure::visible_pairs(plan.problem, operands.in.forward_args());
    record.ms = measured.ms.median;
    record.ms_spread = measured.ms.spread;
    record.tflops = measure::gflops(measure::flop(plan.problem, plan.pass, pairs), measured.ms.median) / 1e3;
    record.clock_mhz = measured.clock_mhz;
    record.watts = measured.watts;
    return record;
}

}  // namespace tessera::cli
