// SPDX-License-Identifier: Apache-2.0
#include "diagnose/gain.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "model/predict.hpp"
#include "tessera/error.hpp"

namespace tessera::diagnose {
namespace {

/// The model's name for a backend's kernel.
struct ModelKernel {
    Schedule schedule;
    const char* by;
};

std::optional<ModelKernel> model_kernel(SdpBackend backend) {
    switch (backend) {
        case SdpBackend::flash: return ModelKernel{Schedule::fa2, "flash-attention"};
        case SdpBackend::fa3: return ModelKernel{Schedule::fa3, "flash-attention"};
        case SdpBackend::cudnn: return ModelKernel{Schedule::fa3, "cudnn"};
        case SdpBackend::fa4:
        case SdpBackend::efficient:
        case SdpBackend::math: return {};
    }
    return {};
}

std::optional<DType> dtype_of(const Call& call) {
    if (!call.q.element) return {};
    switch (*call.q.element) {
        case Element::fp16: return DType::fp16;
        case Element::bf16: return DType::bf16;
        case Element::fp32: return DType::fp32;
        default: return {};
    }
}

bool has_four(const Operand& operand) { return operand.shape && operand.shape->size() == 4; }

/// True if the constants were fitted on another machine, by their path: "bench/results/h200/..." means "h200".
bool fitted_elsewhere(const std::string& fitted_on, const model::Machine& machine) {
    return fitted_on.find("/" + machine.name + "/") == std::string::npos;
}

void add_caveats(Gain& gain, const Call& call, const model::Prediction& prediction, const model::Machine& machine) {
    if (prediction.fitted_on.empty())
        gain.caveats.emplace_back("the model's constants for this kernel are those of a related kernel");
    else if (fitted_elsewhere(prediction.fitted_on, machine))
        gain.caveats.push_back(fmt::format("the model was fitted on {} and not compared with measurements on {}",
                                           prediction.fitted_on, machine.name));
    if (call.mask_kind && *call.mask_kind != MaskKind::none)
        gain.caveats.emplace_back("as if the mask hid nothing (a causal one halves the work)");
}

void compare(Gain& gain, const Measured& measured) {
    if (measured.call_ms > 0) gain.call_factor = measured.call_ms / gain.predicted_ms;
    const double all = measured.call_ms * measured.calls;
    if (all > 0 && measured.step_ms >= all)
        gain.step_factor = measured.step_ms / (measured.step_ms - all + gain.predicted_ms * measured.calls);
}

}  // namespace

std::vector<SdpBackend> faster_than(SdpBackend taken, const Gpu& gpu) {
    using enum SdpBackend;
    std::vector<SdpBackend> order = {flash, efficient, math};
    if (gpu.capability == 90) order = {fa3, cudnn, flash, efficient, math};
    if (gpu.capability && *gpu.capability / 10 == 10) order = {fa4, cudnn, flash, efficient, math};
    const auto at = std::find(order.begin(), order.end(), taken);
    return at == order.end() ? std::vector<SdpBackend>{} : std::vector<SdpBackend>(order.begin(), at);
}

const model::Machine* machine_of(const Gpu& gpu) {
    if (gpu.name.empty()) return nullptr;
    for (const model::Machine& machine : model::machines()) {
        if (machine.name == gpu.name || machine.title == gpu.name) return &machine;
    }
    return model::machine_of_device(gpu.name);
}

std::optional<Problem> problem_of(const Call& call, std::string& missing) {
    if (!has_four(call.q) || !has_four(call.k) || !has_four(call.v)) {
        missing = "the shapes of q, k and v are not known";
        return {};
    }
    const std::optional<DType> dtype = dtype_of(call);
    if (!dtype) {
        missing = call.q.element ? "the model has no such dtype" : "the dtype is not known";
        return {};
    }
    const Sizes& q = *call.q.shape;
    const Sizes& k = *call.k.shape;
    Problem problem;
    problem.dtype = *dtype;
    problem.batch = q[0], problem.heads_q = q[1], problem.len_q = q[2], problem.head_dim = q[3];
    problem.heads_kv = k[1], problem.len_kv = k[2], problem.head_dim_v = (*call.v.shape)[3];
    if (call.is_causal == true) problem.mask.causal = Causal::top_left;
    problem.scale = call.scale;
    try {
        problem.validate();
    } catch (const Error& error) {
        missing = error.what();
        return {};
    }
    return problem;
}

Gain gain(const Call& call, SdpBackend better, Pass pass, const Measured& measured) {
    Gain result{.backend = better};
    const std::optional<ModelKernel> kernel = model_kernel(better);
    if (!kernel) {
        result.missing = fmt::format("the model has no constants for {} kernels", name_of(better));
        return result;
    }
    const model::Machine* machine = machine_of(call.gpu);
    if (!machine || machine->kind != model::MachineKind::gpu) {
        result.missing = call.gpu.name.empty() ? "the GPU's name is not known"
                                               : fmt::format("the model does not know the GPU \"{}\"", call.gpu.name);
        return result;
    }
    const std::optional<Problem> problem = problem_of(call, result.missing);
    if (!problem) return result;
    const model::PredictOptions options{.by = kernel->by};
    if (const auto refusal = model::refusal(*problem, kernel->schedule, pass, *machine, options)) {
        result.missing = *refusal;
        return result;
    }
    const model::Prediction prediction = model::predict(*problem, kernel->schedule, pass, *machine, options);
    result.kernel = fmt::format("{} of {}", name_of(kernel->schedule), kernel->by);
    result.predicted_ms = prediction.ms;
    compare(result, measured);
    add_caveats(result, call, prediction, *machine);
    return result;
}

}  // namespace tessera::diagnose
