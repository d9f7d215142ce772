// SPDX-License-Identifier: Apache-2.0
#include "diagnose/advice.hpp"

#include <algorithm>

#include "tessera/error.hpp"

namespace tessera::diagnose {
namespace {

bool trains(const Diagnosis& diagnosis) {
    return std::any_of(diagnosis.kinds.begin(), diagnosis.kinds.end(),
                       [](const AttentionKind& kind) { return kind.reading.pass == KernelPass::backward; });
}

/// The call of the trace, completed with the fields that the user gave.
Call completed(const Diagnosis& diagnosis, Call call, const Call& stated) {
    call.torch = stated.torch ? stated.torch : diagnosis.torch;
    if (!diagnosis.gpus.empty()) call.gpu = diagnosis.gpus.front();
    if (!stated.gpu.name.empty() || stated.gpu.capability || stated.gpu.rocm == true) call.gpu = stated.gpu;
    recognise_amd(call.gpu);
    if (!call.gpu.rocm) call.gpu.rocm = false;
    call.cudnn = stated.cudnn;
    call.cuda = stated.cuda;
    call.enabled = stated.enabled;
    if (stated.deterministic == true) call.deterministic = true;
    const bool grad = trains(diagnosis) || stated.q.requires_grad.value_or(false);
    for (Operand* operand : {&call.q, &call.k, &call.v}) operand->requires_grad = grad;
    call.mask.requires_grad = false;
    return call;
}

/// True if the call did not go through PyTorch's SDPA, whose rules choose among its own backends only.
bool bypasses_sdpa(const AttentionKind& kind) {
    if (kind.reading.library == kFlexUncompiled) return true;
    const std::optional<Sizes>& q = kind.shapes.front().call.q.shape;
    const bool packed = q && q->size() == 3;  // [tokens, heads, head_dim] of a ragged batch
    return packed && kind.asked_by.find("scaled_dot_product") == std::string::npos;
}

/// Fills in a call of attention by hand, whose trace gives only shapes and dtypes.
void complete_by_hand(Call& call) {
    if (!call.mask_kind) call.mask_kind = MaskKind::none;
    if (!call.is_causal) call.is_causal = false;
}

const Verdict* verdict_of(const Explanation& explanation, SdpBackend backend) {
    const auto found = std::find_if(explanation.verdicts.begin(), explanation.verdicts.end(),
                                    [&](const Verdict& verdict) { return verdict.backend == backend; });
    return found == explanation.verdicts.end() ? nullptr : &*found;
}

}  // namespace

std::optional<SdpBackend> backend_of(Family family) {
    switch (family) {
        case Family::fa2: return SdpBackend::flash;
        case Family::fa3: return SdpBackend::fa3;
        case Family::fa4: return SdpBackend::fa4;
        case Family::cudnn: return SdpBackend::cudnn;
        case Family::mem_efficient: return SdpBackend::efficient;
        case Family::math:
        case Family::eager: return SdpBackend::math;
        default: return std::nullopt;
    }
}

std::optional<Advice> advise(const Diagnosis& diagnosis, const AttentionKind& kind, const Call& stated) {
    const auto ran = backend_of(kind.reading.family);
    if (!ran || kind.shapes.empty() || kind.reading.amd || bypasses_sdpa(kind)) return std::nullopt;
    Advice advice{.ran = *ran, .by_hand = kind.reading.family == Family::eager, .shape = kind.shapes.front()};
    Call call = completed(diagnosis, advice.shape.call, stated);
    if (advice.by_hand) complete_by_hand(call);
    std::vector<std::string> assumed;
    if (call.mask_kind && *call.mask_kind != MaskKind::none) assumed.emplace_back("attn_mask requires no gradient");
    call = assume_defaults(call, assumed);
    try {
        advice.explanation = explain(call);
    } catch (const Error& error) {
        if (error.code() != ErrorCode::unsupported) throw;
        return std::nullopt;
    }
    advice.explanation.assumed = assumed;
    const double count = static_cast<double>(std::max<std::int64_t>(advice.shape.count, 1));
    const Measured measured{
        .call_ms = advice.shape.us / 1000 / count, .calls = count, .step_ms = diagnosis.gpu_us / 1000};
    const Pass pass = kind.reading.pass == KernelPass::backward ? Pass::backward : Pass::forward;
    for (const SdpBackend backend : faster_than(*ran, call.gpu)) {
        Faster faster{.gain = gain(call, backend, pass, measured)};
        faster.verdict.backend = backend;
        faster.verdict.standing = Standing::unknown;
        if (const Verdict* verdict = verdict_of(advice.explanation, backend)) faster.verdict = *verdict;
        advice.faster.push_back(faster);
    }
    advice.shape.call = call;
    return advice;
}

}  // namespace tessera::diagnose
