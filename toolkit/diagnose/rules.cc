// SPDX-License-Identifier: Apache-2.0
#include "diagnose/rules.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "diagnose/causal_bias.hpp"
#include "diagnose/rules_tables.hpp"
#include "tessera/error.hpp"

namespace tessera::diagnose {
namespace {

using Order = std::vector<SdpBackend>;
constexpr SdpBackend kFlash = SdpBackend::flash, kEfficient = SdpBackend::efficient, kMath = SdpBackend::math,
                     kCudnn = SdpBackend::cudnn;

Fact in_release(const Call& c, const Version& from, const Version& until) {
    return (torch(c) >= from) && (torch(c) < until);
}

std::vector<Rule> all_rules() {
    std::vector<Rule> all;
    for (const auto& table : {flash_rules(), efficient_rules(), cudnn_rules(), math_rules(), replacement_rules()})
        all.insert(all.end(), table.begin(), table.end());
    return all;
}

/// Adds a batch of one to q, k and v of three dimensions, as 2.14 and later do.
Call with_batch(Call c) {
    const auto three = [](const Operand& t) { return t.shape && t.shape->size() == 3; };
    const bool knows = c.torch && *c.torch >= kTakesUnbatched;
    if (!knows || !three(c.q) || !three(c.k) || !three(c.v)) return c;
    unsqueeze(c.q), unsqueeze(c.k), unsqueeze(c.v);
    while (c.mask.shape && c.mask.shape->size() < 4) unsqueeze(c.mask);
    return c;
}

/// Applies the rules of backend `of` to the call, and adds the results to the verdict.
void apply(const Call& call, SdpBackend of, Verdict& verdict) {
    Fact refused = false;
    for (const Rule& rule : call.gpu.rocm == true ? rocm_rules() : rules()) {
        if (rule.backend != of) continue;
        const Fact fact = in_release(call, rule.from, rule.until) && rule.refuses(call);
        if (fact.is_true()) verdict.refusals.push_back(&rule);
        refused = refused || fact;
    }
    if (!refused.is_unknown()) return;
    for (const std::string& field : refused.missing_fields()) {
        const bool listed = std::find(verdict.missing_fields.begin(), verdict.missing_fields.end(), field) !=
                            verdict.missing_fields.end();
        if (!listed) verdict.missing_fields.push_back(field);
    }
}

/// Returns refused, unknown, or could_run; `taken` needs the verdicts of all backends. The release must be known.
Verdict verdict_in_release(const Call& call, SdpBackend backend) {
    Verdict verdict{.backend = backend, .standing = Standing::could_run};
    Call as_called = call;
    if (backend == SdpBackend::fa3 || backend == SdpBackend::fa4) {  // they must also pass the checks of flash
        as_called.flash_implementation =
            backend == SdpBackend::fa3 ? FlashImplementation::fa3 : FlashImplementation::fa4;
        apply(as_called, kFlash, verdict);
    }
    apply(as_called, backend, verdict);
    if (!verdict.refusals.empty()) {
        verdict.standing = Standing::refused;
        verdict.missing_fields.clear();
    } else if (!verdict.missing_fields.empty()) {
        verdict.standing = Standing::unknown;
    }
    return verdict;
}

/// The releases in which a row begins; any other release has the checks of the one before it.
std::set<Version> releases() {
    std::set<Version> found;
    for (const auto& table : {rules(), rocm_rules()}) {
        for (const Rule& rule : table) found.insert(rule.from);
    }
    return found;
}

/// The verdict that all releases share, with the texts of the newest.
Verdict verdict_in_all_releases(const Call& call, SdpBackend backend) {
    std::optional<Verdict> newest;
    for (const Version& version : releases()) {
        Call in_release = call;
        in_release.torch = version;
        const Verdict verdict = verdict_in_release(in_release, backend);
        if (newest && newest->standing != verdict.standing) {
            return {.backend = backend, .standing = Standing::unknown, .missing_fields = {torch(call).field}};
        }
        newest = verdict;
    }
    return *newest;
}

Verdict verdict_in(const Call& call, SdpBackend backend) {
    return call.torch ? verdict_in_release(call, backend) : verdict_in_all_releases(call, backend);
}

bool refuses(const Call& call, SdpBackend backend) { return verdict_in(call, backend).standing == Standing::refused; }

/// The call of which PyTorch asks a backend: causal_lower_right asks flash and the memory-efficient kernels without a
/// mask, and all others, and the memory-efficient ones once more, with a bool tensor.
Call as_asked(const Call& given, SdpBackend backend) {
    const Call call = without_square_bias(given);
    if (!call.causal_lower_right) return with_batch(call);
    if (backend == kCudnn || backend == kMath) return with_batch(with_bias_as_mask(call));
    if (backend != kEfficient || !refuses(call, kEfficient)) return call;
    const Call masked = with_batch(with_bias_as_mask(call));
    return refuses(masked, kEfficient) ? call : masked;
}

struct Ordered {
    Order order;  ///< empty: not known
    std::string because;
};

Ordered order_of(const Call& call) {
    const Order cudnn_first = {kCudnn, kFlash, kEfficient, kMath};
    const Order cudnn_last = {kFlash, kEfficient, kMath, kCudnn};
    const Order cudnn_second = {kFlash, kCudnn, kEfficient, kMath};
    if (call.gpu.rocm == true) return {cudnn_last, "on ROCm flash comes first, and there is no cuDNN"};
    const Fact first = prefers_cudnn(call);
    if (first.is_unknown()) return {{}, fmt::format("depends on {}", first.missing_fields().front())};
    const Version& v = *call.torch;
    if (v < Version{2, 5, 0}) return {cudnn_first, "2.4 tries cuDNN first if TORCH_CUDNN_SDPA_ENABLED=1 is set"};
    if (v < Version{2, 5, 1}) {
        return first.is_true() ? Ordered{cudnn_first, "2.5.0 prefers cuDNN from compute capability 9.0 on"}
                               : Ordered{cudnn_second, "2.5.0 prefers flash before compute capability 9.0"};
    }
    if (v < Version{2, 10, 0}) return {cudnn_last, "2.5.1 to 2.9 try cuDNN after math, so it is never reached"};
    if (first.is_true()) return {cudnn_first, "cuDNN after 9.15 comes first on compute capability 9.x and 10.x"};
    return {cudnn_last, "cuDNN comes first only after 9.15 and on compute capability 9.x and 10.x; else after math"};
}

/// The order of causal_lower_right, `usual` being that of its last step.
Ordered order_of_bias(const Call& call, const Ordered& usual) {
    const bool asks_on = refuses(call, kFlash) && refuses(call, kEfficient);
    if (asks_on && usual.order.empty()) return usual;
    Order order = {kFlash};
    if (!asks_on) order.push_back(kEfficient);
    const Order rest = usual.order.empty() ? Order{kMath, kCudnn} : usual.order;
    for (const SdpBackend backend : rest) {
        if (std::find(order.begin(), order.end(), backend) == order.end()) order.push_back(backend);
    }
    return {order,
            "causal_lower_right asks flash, then the memory-efficient kernels; if both refuse, it makes a bool "
            "tensor of [len_q, len_kv], and the usual order holds"};
}

/// Marks the first backend that runs, if all before it are known to refuse.
void choose_first(Explanation& explanation) {
    for (Verdict& verdict : explanation.verdicts) {
        if (verdict.backend == SdpBackend::fa3 || verdict.backend == SdpBackend::fa4) break;
        if (verdict.standing == Standing::unknown) return;
        if (verdict.standing == Standing::refused) continue;
        verdict.standing = Standing::taken;
        explanation.taken = verdict.backend;
        return;
    }
    explanation.aborts = true;
}

/// Decides without an order: a backend is surely taken only if it is the only one left.
void choose_without_order(Explanation& explanation) {
    Verdict* left = nullptr;
    int possible = 0;
    for (Verdict& verdict : explanation.verdicts) {
        if (verdict.backend == SdpBackend::fa3 || verdict.backend == SdpBackend::fa4) continue;
        if (verdict.standing == Standing::refused) continue;
        ++possible;
        left = &verdict;
    }
    // In every order flash precedes efficient and math, so one order is left if cuDNN refuses.
    const Verdict& cudnn = explanation.verdicts.back();
    if (cudnn.backend == kCudnn && cudnn.standing == Standing::refused) return choose_first(explanation);
    explanation.aborts = possible == 0;
    if (possible == 1 && left->standing == Standing::could_run) {
        left->standing = Standing::taken;
        explanation.taken = left->backend;
    }
}

void add_remarks(const Call& call, Explanation& explanation) {
    if (explanation.taken == kMath && !explanation.raises) {
        explanation.remarks.emplace_back(
            "The math path writes the whole [len_q, len_kv] scores to memory, and multiplies in fp32 unless "
            "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True) is set.");
    }
    const auto& order = explanation.order;
    const bool has_cudnn = std::any_of(explanation.verdicts.begin(), explanation.verdicts.end(), [](const Verdict& v) {
        return v.backend == kCudnn && v.standing != Standing::refused;
    });
    if (has_cudnn && !order.empty() && order.back() == kCudnn && explanation.taken && explanation.taken != kCudnn) {
        explanation.remarks.emplace_back(
            "In this order cuDNN comes after math, which takes every call: only "
            "sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) selects it.");
    }
    const bool of_bias = without_square_bias(call).causal_lower_right;
    if (of_bias && explanation.taken && as_asked(call, *explanation.taken).mask_kind == MaskKind::boolean) {
        explanation.remarks.emplace_back(
            "causal_lower_right becomes a bool tensor of [len_q, len_kv] here: hidden pairs are computed too.");
    }
    if (explanation.taken == kCudnn && !of_bias) {
        explanation.remarks.emplace_back(
            "PyTorch tries FA3 or FA4 only after cuDNN: sdpa_kernel([SDPBackend.FLASH_ATTENTION]) selects them.");
    }
    if (explanation.taken == kCudnn) {
        for (std::string& fault : cudnn_faults(as_asked(call, kCudnn))) explanation.remarks.push_back(std::move(fault));
    }
}

void require_in_table(const Call& call) {
    if (!call.torch || (*call.torch >= kFirstRelease && *call.torch < kEndOfReleases)) return;
    throw Error(ErrorCode::unsupported, "torch",
                fmt::format("expected a release from 2.4 to 2.15, got {}.{}.{}", call.torch->major, call.torch->minor,
                            call.torch->patch));
}

}  // namespace

const char* name_of(SdpBackend backend) {
    switch (backend) {
        case SdpBackend::flash: return "flash";
        case SdpBackend::efficient: return "memory-efficient";
        case SdpBackend::math: return "math";
        case SdpBackend::cudnn: return "cuDNN";
        case SdpBackend::fa3: return "FA3";
        case SdpBackend::fa4: return "FA4";
    }
    return "?";
}

const char* name_of(Standing standing) {
    switch (standing) {
        case Standing::taken: return "taken";
        case Standing::could_run: return "could run";
        case Standing::refused: return "refused";
        case Standing::unknown: return "unknown";
    }
    return "?";
}

std::span<const Rule> rules() {
    static const std::vector<Rule> all = all_rules();
    return all;
}

Fact prefers_cudnn(const Call& c) {
    const Fact in_2_5_0 = in_release(c, {2, 5, 0}, {2, 5, 1}) && (capability(c) >= 90);
    const Fact before_13 = cuda(c) < 13000;
    const Fact gpu = (capability(c) == 90) || (capability(c) == 100) || (capability(c) == 103) ||
                     (!before_13 && between(capability(c), 90, 109));
    const Fact since_2_10 = in_release(c, {2, 10, 0}, kEndOfReleases) && (cudnn(c) > 91500) && gpu;
    return in_2_5_0 || since_2_10;
}

Verdict verdict_of(const Call& given, SdpBackend backend) {
    if (given.causal_lower_right && (!knows_lengths(given) || given.nested != false)) {
        const char* field =
            knows_lengths(given) ? "what causal_lower_right does with nested tensors" : "q's and k's lengths";
        return {.backend = backend, .standing = Standing::unknown, .missing_fields = {field}};
    }
    return verdict_in(as_asked(given, backend), backend);
}

Call as_computed(const Call& call, SdpBackend backend) { return as_asked(call, backend); }

bool takes(const Call& call, SdpBackend backend) {
    const Explanation explanation = explain(call);
    if (explanation.raises) return false;
    const auto active = call.flash_implementation.value_or(FlashImplementation::own);
    if (backend == SdpBackend::fa3 || backend == SdpBackend::fa4) {
        const auto wanted = backend == SdpBackend::fa3 ? FlashImplementation::fa3 : FlashImplementation::fa4;
        return active == wanted && explanation.taken == kFlash &&
               verdict_of(call, backend).standing == Standing::could_run;
    }
    return explanation.taken == backend && (backend != kFlash || active == FlashImplementation::own);
}

Explanation explain(const Call& given) {
    require_in_table(given);
    const Call call = without_square_bias(given);
    const bool of_bias = call.causal_lower_right;
    const Ordered ordered = of_bias ? order_of_bias(call, order_of(call)) : order_of(call);
    Explanation explanation{.order = ordered.order, .order_because = ordered.because};
    Order sequence = ordered.order;
    if (sequence.empty()) sequence = {kFlash, kEfficient, kMath, kCudnn};
    for (const SdpBackend backend : sequence) explanation.verdicts.push_back(verdict_of(call, backend));
    ordered.order.empty() ? choose_without_order(explanation) : choose_first(explanation);
    for (const SdpBackend backend : {SdpBackend::fa3, SdpBackend::fa4})
        explanation.verdicts.push_back(verdict_of(call, backend));
    if (of_bias) explanation.raises = raise_of_bias(call);
    if (!explanation.raises) explanation.raises = raise_of(as_asked(call, kMath), explanation.taken == kMath);
    add_remarks(call, explanation);
    return explanation;
}

}  // namespace tessera::diagnose
