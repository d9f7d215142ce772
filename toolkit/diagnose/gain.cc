// SPDX-License-Identifier: Apache-2.0
#include "diagnose/gain.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "diagnose/device.hpp"
#include "model/baseline.hpp"
#include "model/error_bar.hpp"
#include "model/predict.hpp"
#include "tessera/error.hpp"

namespace tessera::diagnose {
namespace {

/// The model's name for a backend's kernel.
struct ModelKernel {
    Schedule schedule;
    const char* by;
};

std::optional<ModelKernel> model_kernel(SdpBackend backend, const model::Machine& machine) {
    const int generation = static_cast<int>(machine.capability.value);
    constexpr int kAmpere = 8, kTcgen05 = 10, kWorkstation = 12;
    switch (backend) {
        case SdpBackend::flash: return ModelKernel{Schedule::fa2, "flash-attention"};
        case SdpBackend::fa3: return ModelKernel{Schedule::fa3, "flash-attention"};
        case SdpBackend::cudnn:
            return ModelKernel{generation == kAmpere || generation == kWorkstation ? Schedule::fa2 : Schedule::fa3,
                               "cudnn"};
        case SdpBackend::efficient: return ModelKernel{Schedule::fa2, "memory-efficient"};
        case SdpBackend::fa4:
            if (generation == kTcgen05) return ModelKernel{Schedule::fa3, "flash-attention"};
            return {};
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

/// The error bars of predictions that lack the time of dropout, of deterministic sums or of a mask's gradient, and of
/// kernels that read a mask tensor, short ones apart: nine of ten calls in traces of an H200 stay within them (a test
/// of labelled_traces_test.cc).
constexpr double kErrorOfNotModelled = 1.25, kErrorWithMask = 0.5, kErrorOfShortWithMask = 1.25, kShortMs = 0.03;

bool has_four(const Operand& operand) { return operand.shape && operand.shape->size() == 4; }

/// The batch and heads of K and V, to which PyTorch broadcasts tensors that have one.
std::int64_t batch_of(const Call& call) {
    return std::max({call.q.shape->front(), call.k.shape->front(), call.v.shape->front()});
}
std::int64_t heads_kv_of(const Call& call) { return std::max((*call.k.shape)[1], (*call.v.shape)[1]); }

/// True if the constants were fitted on another machine, by their path: "bench/results/h200/..." means "h200".
bool fitted_elsewhere(const std::string& fitted_on, const model::Machine& machine) {
    return fitted_on.find("/" + machine.name + "/") == std::string::npos;
}

/// The measurements of a machine on which the model's constants were not fitted, in words.
std::string comparison_text(const Problem& problem, const model::Machine& machine) {
    if (model::rows_of(machine) == model::Rows::many || model::rows_of(machine) == model::Rows::some)
        return fmt::format("compared with some measurements on {}", machine.name);
    const std::string kind = model::kind_of(problem);
    const bool has_tables = kind == "prefill" || kind == "grouped heads" || kind == "head_dim" || kind == "few heads";
    if (model::rows_of(machine) == model::Rows::published && has_tables)
        return fmt::format("compared with published tables of {} or of its chip", machine.name);
    return fmt::format("not compared with measurements on {}", machine.name);
}

bool takes_mask(const Call& call) { return call.mask_kind && *call.mask_kind != MaskKind::none; }

/// The elements of attn_mask, which broadcasts to the scores; without a shape, a mask that all heads share.
double elements_of_mask(const Call& call, const Problem& problem) {
    if (!call.mask.shape) return static_cast<double>(problem.len_q) * static_cast<double>(problem.len_kv);
    double elements = 1;
    for (std::size_t d = 0; d < call.mask.shape->size(); ++d) {
        const bool expanded = call.mask.strides && call.mask.strides->size() > d && (*call.mask.strides)[d] == 0;
        if (!expanded) elements *= static_cast<double>((*call.mask.shape)[d]);
    }
    return elements;
}

/// Adds the time in which a kernel reads attn_mask. A copy of a bool tensor in the dtype is another kernel.
void add_mask(model::Prediction& prediction, const Call& call, const Problem& problem, const model::Machine& machine) {
    const double ms = model::reads_of_mask(problem, elements_of_mask(call, problem), machine).ms();
    prediction.parts.push_back({"mask of all pairs", ms});
    prediction.ms += ms;
    prediction.error = std::max(prediction.error, prediction.ms < kShortMs ? kErrorOfShortWithMask : kErrorWithMask);
}

/// The features of a call whose time the prediction lacks; empty: none.
std::string not_modelled(const Call& call, Pass pass, const model::Prediction& prediction) {
    std::string text = prediction.not_modelled;
    const auto add = [&](const char* what) { text += (text.empty() ? "" : ", ") + std::string(what); };
    if (pass == Pass::backward && call.deterministic == true) add("the fixed order of deterministic sums");
    if (pass == Pass::backward && takes_mask(call) && call.mask.requires_grad == true) add("the mask's gradient");
    return text;
}

void add_caveats(Gain& gain, const Call& call, const Problem& problem, const model::Prediction& prediction,
                 const model::Machine& machine) {
    if (prediction.fitted_on.empty())
        gain.caveats.emplace_back("the model's constants for this kernel are those of a related kernel");
    else if (fitted_elsewhere(prediction.fitted_on, machine))
        gain.caveats.push_back(
            fmt::format("the model was fitted on {} and {}", prediction.fitted_on, comparison_text(problem, machine)));
    if (!gain.not_modelled.empty()) gain.caveats.push_back("without the cost of " + gain.not_modelled);
    if (takes_mask(call)) gain.caveats.emplace_back("of the mask, the time of its bytes alone");
}

/// A prediction without the time between two kernels.
double without_launch(const model::Prediction& prediction) {
    double ms = prediction.ms;
    for (const model::Part& part : prediction.parts) ms -= part.name == "launch" ? part.ms : 0;
    return ms;
}

/// The model's prediction of a backend's kernel for a call.
struct Answer {
    std::string kernel{};
    std::optional<model::Prediction> prediction{};
    std::string missing{};
    std::string not_modelled{};
    Device device{};
};

Answer ask_model(const Call& given, SdpBackend backend, Pass pass) {
    const Call call = as_computed(given, backend);
    Answer answer{.device = device_of(call.gpu)};
    if (!answer.device.machine) {
        answer.missing = answer.device.missing;
        return answer;
    }
    const model::Machine& machine = *answer.device.machine;
    const std::optional<ModelKernel> kernel = model_kernel(backend, machine);
    if (!kernel) {
        answer.missing = fmt::format("the model has no constants for {} kernels on {}", name_of(backend), machine.name);
        return answer;
    }
    const std::optional<Problem> problem = problem_of(call, answer.missing);
    if (!problem) return answer;
    const model::PredictOptions options{.by = kernel->by};
    if (const auto refusal = model::refusal(*problem, kernel->schedule, pass, machine, options)) {
        answer.missing = *refusal;
        return answer;
    }
    answer.prediction = model::predict(*problem, kernel->schedule, pass, machine, options);
    if (takes_mask(call)) add_mask(*answer.prediction, call, *problem, machine);
    answer.not_modelled = not_modelled(call, pass, *answer.prediction);
    if (!answer.not_modelled.empty())
        answer.prediction->error = std::max(answer.prediction->error, kErrorOfNotModelled);
    answer.prediction->error = std::hypot(answer.prediction->error, answer.device.more_error);
    answer.kernel = backend == SdpBackend::efficient ? "PyTorch's memory-efficient kernel"
                                                     : fmt::format("{} of {}", name_of(kernel->schedule), kernel->by);
    return answer;
}

/// The model has the math path of PyTorch 2.5 and later, in fp32 inside, for long calls without a mask
/// tensor and without dropout.
bool predict_math(const Call& call, Pass pass, Baseline& baseline) {
    const bool in_fp32 = call.q.element == Element::fp32 || (call.torch && *call.torch >= Version{2, 5, 0});
    const Device device = device_of(call.gpu);
    std::string missing;
    const std::optional<Problem> problem = problem_of(call, missing);
    if (!in_fp32 || takes_mask(call) || call.dropout.value_or(0) > 0 || !device.machine || !problem) return false;
    if (model::refusal(*problem, model::Baseline::math, pass, *device.machine)) return false;
    const model::Prediction prediction = model::predict(*problem, model::Baseline::math, pass, *device.machine);
    // In the traces of tests/diagnose/traces, calls of 1 to 16 ms took 0.9 to 1.26 times their prediction, and calls of
    // 0.07 ms over twice theirs.
    constexpr double kLeastMs = 0.5, kLeastError = 0.3;
    if (without_launch(prediction) < kLeastMs) return false;
    baseline.predicted_ms = baseline.ms = without_launch(prediction);
    baseline.predicted_error = baseline.error = std::hypot(std::max(prediction.error, kLeastError), device.more_error);
    baseline.source = "predicted as PyTorch's math path";
    return true;
}

/// A bound where the model has no prediction. The math path multiplies in fp32, by multiply-adds unless TF32 is on (in
/// 16 bits before 2.5), and passes the scores through memory once to write them, twice for the softmax and once for P
/// V; backward six times.
void bound_math(const Call& call, Pass pass, Baseline& baseline) {
    const Device device = device_of(call.gpu);
    if (!device.machine || !has_four(call.q) || !has_four(call.k) || !has_four(call.v) ||
        call.q.element == Element::fp64)
        return;
    const model::Machine* machine = &*device.machine;
    const Sizes& q = *call.q.shape;
    const bool in_fp32 = call.q.element == Element::fp32 || (call.torch && *call.torch >= Version{2, 5, 0});
    const double scores = static_cast<double>(batch_of(call) * std::max(q[1], heads_kv_of(call)) * q[2]) *
                          static_cast<double>((*call.k.shape)[2]);
    const double bytes = scores * (in_fp32 ? 4 : 2);
    const bool forward = pass == Pass::forward;
    const double stays = machine->l2_mib * 1048576.0;
    const double traffic = (forward ? 4 : 6) * std::max(0.0, bytes - stays) / (machine->dram_gbs * 1e6);
    const double flop = (forward ? 2 : 4) * scores * static_cast<double>(q[3] + (*call.v.shape)[3]);
    const double rate = machine->cores * machine->clock_ghz * 1e6 *
                        (in_fp32 ? static_cast<double>(machine->fma_flop) : static_cast<double>(machine->matrix_flop));
    baseline.ms = std::max(traffic, flop / rate);
    baseline.at_least = true;
    baseline.source = in_fp32 ? "at least, by its products in fp32 (without TF32) and the traffic of its scores"
                              : "at least, by its products and the traffic of its scores";
}

/// The model has no constant time of a call for FlashAttention-3, of which no short calls were measured: it looks up to
/// 5 us better than it is (docs/model.md, section 3).
double error_of(const model::Prediction& prediction) {
    constexpr double kUnknownCall = 0.005;
    const bool unknown = prediction.by == "flash-attention" && prediction.schedule == Schedule::fa3;
    return prediction.error + (unknown ? kUnknownCall / without_launch(prediction) : 0);
}

void compare(Gain& gain, const Baseline& baseline, const Measured& measured) {
    if (baseline.ms <= 0 || gain.kernel_ms <= 0) return;
    gain.call_factor = baseline.ms / gain.kernel_ms;
    gain.at_most = !gain.not_modelled.empty() && baseline.source == "measured";
    // A slow clock or a busy neighbour lengthens the measured time alone. So the kernel must also beat the model's own
    // time of the kernel that ran.
    const bool by_model = baseline.predicted_ms <= 0 ||
                          baseline.predicted_ms / gain.kernel_ms > 1 + std::hypot(gain.error, baseline.predicted_error);
    gain.faster = by_model && gain.call_factor > 1 + std::hypot(gain.error, baseline.error);
    const double all = measured.call_ms * measured.calls;
    if (all > 0 && measured.step_ms >= all)
        gain.step_factor = measured.step_ms / (measured.step_ms - all + gain.kernel_ms * measured.calls);
}

}  // namespace

std::optional<Problem> problem_of(const Call& call, std::string& missing) {
    if (!has_four(call.q) || !has_four(call.k) || !has_four(call.v)) {
        missing = "the shapes of q, k and v are not known";
        return {};
    }
    if (call.packed || call.nested == true) {
        missing = "the lengths of the packed documents are not known";
        return {};
    }
    if (!call.beyond_sdpa.empty()) {
        missing = fmt::format("the call has what PyTorch's backends lack: {}", fmt::join(call.beyond_sdpa, ", "));
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
    problem.batch = batch_of(call), problem.len_q = q[2], problem.head_dim = q[3];
    problem.heads_kv = heads_kv_of(call), problem.heads_q = std::max(q[1], problem.heads_kv);
    problem.len_kv = k[2], problem.head_dim_v = (*call.v.shape)[3];
    problem.dropout.probability = call.dropout.value_or(0);
    if (call.is_causal == true) problem.mask.causal = Causal::top_left;
    if (call.causal_lower_right) problem.mask.causal = Causal::bottom_right;
    problem.scale = call.scale;
    try {
        problem.validate();
    } catch (const Error& error) {
        missing = error.what();
        return {};
    }
    return problem;
}

Baseline baseline_of(const Call& call, SdpBackend ran, Pass pass, const Measured& measured) {
    Baseline baseline;
    const Answer answer = ask_model(call, ran, pass);
    if (answer.prediction) {
        baseline.predicted_ms = baseline.ms = without_launch(*answer.prediction);
        baseline.predicted_error = baseline.error = error_of(*answer.prediction);
        baseline.source = "predicted as " + answer.kernel;
        baseline.not_modelled = answer.not_modelled;
    } else if (ran == SdpBackend::math) {
        const Call masked = as_computed(call, ran);
        if (!predict_math(masked, pass, baseline)) bound_math(masked, pass, baseline);
    }
    if (measured.call_ms <= 0) {
        if (baseline.ms <= 0) baseline.source = "not predicted: " + answer.missing;
        return baseline;
    }
    baseline.ms = measured.call_ms;
    baseline.error = 0;
    baseline.at_least = false;
    baseline.source = "measured";
    return baseline;
}

Gain gain(const Call& call, SdpBackend backend, Pass pass, const Baseline& baseline, const Measured& measured) {
    Gain result{.backend = backend};
    const Answer answer = ask_model(call, backend, pass);
    if (!answer.prediction) {
        result.missing = answer.missing;
        return result;
    }
    result.kernel = answer.kernel;
    result.predicted_ms = answer.prediction->ms;
    result.kernel_ms = without_launch(*answer.prediction);
    result.error = error_of(*answer.prediction);
    result.not_modelled = answer.not_modelled;
    compare(result, baseline, measured);
    if (!answer.device.caveat.empty()) result.caveats.push_back(answer.device.caveat);
    std::string missing;
    const Call computed = as_computed(call, backend);
    if (call.causal_lower_right && takes_mask(computed))
        result.caveats.emplace_back("causal_lower_right becomes a bool tensor of all pairs there");
    if (const auto problem = problem_of(computed, missing))
        add_caveats(result, computed, *problem, *answer.prediction, *answer.device.machine);
    return result;
}

}  // namespace tessera::diagnose
