// SPDX-License-Identifier: Apache-2.0
#include "diagnose/advice.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

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
    const bool packed = kind.shapes.front().call.packed || (q && q->size() == 3);  // [tokens, heads, head_dim]
    return packed && kind.asked_by.find("scaled_dot_product") == std::string::npos;
}

bool has_lengths(const Call& call) {  // of four dimensions
    return call.q.shape && call.k.shape && call.q.shape->size() == 4 && call.k.shape->size() == 4;
}
std::int64_t len_q_of(const Call& call) { return (*call.q.shape)[2]; }
std::int64_t len_kv_of(const Call& call) { return (*call.k.shape)[2]; }

/// True if PyTorch's SDPA chose the kernel, as its operators say.
bool asks_sdpa(const AttentionKind& kind) {
    return kind.reading.family != Family::eager && kind.asked_by.find("scaled_dot_product") != std::string::npos;
}

/// Fills in a call of attention by hand, whose trace gives only shapes and dtypes.
void complete_by_hand(Call& call, std::vector<std::string>& assumed) {
    if (!call.mask_kind) {
        call.mask_kind = MaskKind::none;
        assumed.emplace_back("no mask, bias or softcap: the trace does not say what was done to the scores");
    }
    if (!call.is_causal) call.is_causal = false;
    if (call.heads_in_batch)
        assumed.push_back(fmt::format("batch 1: the trace gives batch x heads as one number, {}", (*call.q.shape)[1]));
}

bool is_flash(Family family) { return family == Family::fa2 || family == Family::fa3 || family == Family::fa4; }

/// Fills in the properties that a kernel's name gives, for a call whose operator has no flags.
void complete_by_name(Call& call, const NameReading& reading, std::vector<std::string>& assumed) {
    const auto has = [&](const char* feature) {
        return std::find(reading.features.begin(), reading.features.end(), feature) != reading.features.end();
    };
    if (!call.dropout && is_flash(reading.family) && has("dropout")) {
        constexpr double kUsual = 0.1;
        call.dropout = kUsual;
        assumed.push_back(
            fmt::format("dropout_p {}: the kernel's name says that there is dropout, not how much", kUsual));
    }
    if (call.is_causal) return;
    if (reading.mask == "causal" || reading.mask == "none") {
        call.is_causal = reading.mask == "causal";
        if (*call.is_causal && is_flash(reading.family) && has_lengths(call) && len_q_of(call) != len_kv_of(call)) {
            call.is_causal = false;
            call.causal_lower_right = len_q_of(call) > 1;
        }
    } else {
        call.is_causal = false;
        assumed.emplace_back("not causal: neither the trace nor the kernel's name says");
    }
}

/// The change that brings a call to PyTorch's SDPA at all; `call` is the call that it makes.
Change calls_sdpa(const Call& call) {
    return {.name = "call-sdpa",
            .text = call.causal_lower_right
                        ? "call torch.nn.functional.scaled_dot_product_attention with attn_mask="
                          "causal_lower_right(len_q, len_kv) of torch.nn.attention.bias, unless it is that call"
                        : "call torch.nn.functional.scaled_dot_product_attention",
            .caveat = "",
            .effort = 4,
            .after = call};
}

const char* name_in_sdpa_kernel(SdpBackend backend) {
    switch (backend) {
        case SdpBackend::flash:
        case SdpBackend::fa3:
        case SdpBackend::fa4: return "FLASH_ATTENTION";
        case SdpBackend::efficient: return "EFFICIENT_ATTENTION";
        case SdpBackend::cudnn: return "CUDNN_ATTENTION";
        case SdpBackend::math: return "MATH";
    }
    return "?";
}

/// The call with everything but `ran` switched off, if PyTorch then takes `ran`; else nothing.
std::optional<Call> pinned_to(Call call, SdpBackend ran) {
    call.enabled = Enabled{.flash = ran == SdpBackend::flash || ran == SdpBackend::fa3 || ran == SdpBackend::fa4,
                           .efficient = ran == SdpBackend::efficient,
                           .math = ran == SdpBackend::math,
                           .cudnn = ran == SdpBackend::cudnn};
    if (ran == SdpBackend::fa3) call.flash_implementation = FlashImplementation::fa3;
    if (ran == SdpBackend::fa4) call.flash_implementation = FlashImplementation::fa4;
    return takes(call, ran) ? std::optional(call) : std::nullopt;
}

/// Explains why `ran` ran although the rules say another one, and makes `call` the call that it must have been.
/// `old_cudnn`: an older cuDNN would explain it too.
std::string explain_surprise(Call& call, SdpBackend taken, SdpBackend ran, bool& old_cudnn) {
    std::string text = fmt::format("By its rules PyTorch would have taken {}", name_of(taken));
    std::vector<std::string> reasons;
    const std::optional<Call> pinned = pinned_to(call, ran);
    if (pinned)
        reasons.push_back(
            fmt::format("sdpa_kernel([SDPBackend.{}]) or switches such as enable_cudnn_sdp(False) pinned it",
                        name_in_sdpa_kernel(ran)));
    Call older = call;
    older.cudnn = 90100;
    old_cudnn = call.cudnn && takes(older, ran);
    if (old_cudnn)
        reasons.emplace_back(
            "cuDNN on the library path is older than 9.15.1 (torch.backends.cudnn.version() says; LD_LIBRARY_PATH may "
            "put "
            "another one before the wheel's)");
    if (reasons.empty())
        return text +
               ": an assumption is wrong, or another PyTorch ran (torch.__version__ says; tessera.which.explain() asks "
               "the "
               "one that runs)";
    text += fmt::format(": {}", fmt::join(reasons, ", or "));
    if (pinned) call = *pinned;
    return text;
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

std::string beyond_sdpa(const AttentionKind& kind) {
    if (!backend_of(kind.reading.family) || kind.shapes.empty()) return "";
    const Call& call = kind.shapes.front().call;
    std::vector<std::string> found = call.beyond_sdpa;
    const auto add = [&](const std::string& what) {
        if (std::find(found.begin(), found.end(), what) == found.end()) found.push_back(what);
    };
    if (kind.reading.mask == "window") add("a window");
    constexpr const char* kFeatures[] = {"softcap",        "ALiBi",      "block-sparse",     "sparse keys",
                                         "ranges of keys", "paged keys", "latent attention", "appends to the cache",
                                         "8-bit cache",    "second Q"};
    for (const std::string& feature : kind.reading.features) {
        if (std::find(std::begin(kFeatures), std::end(kFeatures), feature) != std::end(kFeatures)) add(feature);
    }
    return fmt::format("{}", fmt::join(found, ", "));
}

std::optional<Advice> advise(const Diagnosis& diagnosis, const AttentionKind& kind, const Call& stated) {
    const auto ran = backend_of(kind.reading.family);
    if (!ran || kind.shapes.empty() || kind.reading.amd || bypasses_sdpa(kind) || !beyond_sdpa(kind).empty())
        return std::nullopt;
    Advice advice{.ran = *ran, .by_hand = kind.reading.family == Family::eager, .shape = kind.shapes.front()};
    Call call = completed(diagnosis, advice.shape.call, stated);
    std::vector<std::string> assumed;
    if (advice.by_hand) complete_by_hand(call, assumed);
    else complete_by_name(call, kind.reading, assumed);
    if (call.mask_kind && *call.mask_kind != MaskKind::none) assumed.emplace_back("attn_mask requires no gradient");
    // The kernels of FlashAttention end the diagonal at the last key, so that one query sees all keys.
    if (is_flash(kind.reading.family) && has_lengths(call) && len_q_of(call) == 1) call.is_causal = false;
    call = assume_defaults(call, assumed);
    try {
        advice.explanation = explain(call);
    } catch (const Error& error) {
        if (error.code() != ErrorCode::unsupported) throw;
        return std::nullopt;
    }
    advice.explanation.assumed = assumed;
    const double count = static_cast<double>(std::max<std::int64_t>(advice.shape.count, 1));
    constexpr std::int64_t kEnoughForAMedian = 3;
    const Spread& spread = advice.shape.spread;
    const double call_us = spread.runs >= kEnoughForAMedian && spread.outliers > 0
                               ? spread.median_us  // a stall is no property of the kernel
                               : advice.shape.us / count;
    const Measured measured{.call_ms = call_us / 1000, .calls = count, .step_ms = diagnosis.gpu_us / 1000};
    const Pass pass = kind.reading.pass == KernelPass::backward ? Pass::backward : Pass::forward;
    advice.shape.call = call;
    std::vector<Change> before;
    if (!asks_sdpa(kind)) before.push_back(calls_sdpa(call));
    else if (advice.explanation.taken && *advice.explanation.taken != *ran)
        advice.surprise = explain_surprise(call, *advice.explanation.taken, *ran, advice.cudnn_may_be_old);
    advice.ways = ways_of(call, *ran, pass, measured, before);
    return advice;
}

}  // namespace tessera::diagnose
