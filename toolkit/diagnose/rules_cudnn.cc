// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "diagnose/rules_tables.hpp"

namespace tessera::diagnose {
namespace {

using checks::k24, checks::k25, checks::kEnd;
constexpr SdpBackend kCudnn = SdpBackend::cudnn;
constexpr Version k26{2, 6, 0}, k27{2, 7, 0}, k28{2, 8, 0}, k29{2, 9, 0}, k211{2, 11, 0};
constexpr Version kWide = kCudnnTakes256;

Fact switched_off(const Call& c) {
    return enabled(c).is([](const Enabled& e) { return !e.cudnn; });
}

Fact opt_in(const Call&) { return true; }

Fact not_deterministic(const Call& c) { return deterministic(c) == true; }

/// Dropout is wrong in cuDNN 9.11 to 9.13.
Fact dropout_broken(const Call& c) { return (dropout(c) > 0.0) && (cudnn(c) > 91100) && (cudnn(c) < 91400); }

Fact dropout_not_in_16ths(const Call& c) {
    return dropout(c).is([](double p) { return p * 16 != std::floor(p * 16); });
}

/// Decoding with one query is wrong in cuDNN 9.19 to 9.25.0, except 9.24.1, on compute capability 10.x and 11.x.
Fact decodes_wrongly(const Call& c) {
    const Fact release = (cudnn(c) >= 91900) && (cudnn(c) <= 92500) && !((cudnn(c) > 92400) && (cudnn(c) < 92500));
    return !is_nested(c) && release && between(capability(c), 100, 119) && (len_q(c) == std::int64_t{1});
}

/// In cuDNN before 9.26 on compute capability 9.x, a half-empty last tile of keys makes the gradient not finite.
Fact gradient_not_finite(const Call& c) {
    const Fact half_empty = len_kv(c).is([](std::int64_t keys) { return keys % 128 == 64; });
    return !is_nested(c) && (cudnn(c) < 92600) && between(capability(c), 90, 99) && !(is_causal(c) == true) &&
           (grad(c.q, "q") == true) && half_empty;
}

Fact mask_gradient(const Call& c) { return has_mask(c) && (grad(c.mask, "attn_mask") == true); }

/// True if the mask is {1, len_q} x {1, len_kv}, optionally preceded by {1, batch} x {1, heads}.
bool mask_fits(const Sizes& mask, const Sizes& q, const Sizes& k) {
    if (mask.size() != 2 && mask.size() != 4) return false;
    const auto fits = [](std::int64_t size, std::int64_t whole) { return size == 1 || size == whole; };
    const std::size_t last = mask.size() - 1;
    if (!fits(mask[last - 1], q[2]) || !fits(mask[last], k[2])) return false;
    return mask.size() == 2 || (fits(mask[0], q[0]) && fits(mask[1], q[1]));
}

Fact mask_shape(const Call& c) {
    if (!c.mask.shape) return has_mask(c) && Fact::unknown("attn_mask's shape");
    const Fact shapes = (rank(c.q, "q") == std::size_t{4}) && (rank(c.k, "k") == std::size_t{4});
    if (!shapes.is_true()) return has_mask(c) && shapes;
    return has_mask(c) && !mask_fits(*c.mask.shape, *c.q.shape, *c.k.shape);
}

Fact wider_than(const Call& c, std::int64_t limit) { return (head_dim(c) > limit) || (head_dim_v(c) > limit); }

Fact hopper(const Call& c) { return capability(c) == 90; }
Fact blackwell(const Call& c) { return between(capability(c), 100, 109); }

Fact is_192_128(const Call& c) { return (head_dim(c) == std::int64_t{192}) && (head_dim_v(c) == std::int64_t{128}); }

Fact over_128(const Call& c) { return wider_than(c, 128); }

/// The head_dim exceeds 256 on compute capability 9.0 with cuDNN `least` or later, or 128 elsewhere.
template <int least>
Fact over_256_on_hopper(const Call& c) {
    return wider_than(c, 256) || (wider_than(c, 128) && !(hopper(c) && (cudnn(c) >= least)));
}

/// The head_dim exceeds that limit, except q and k of 192 with v of 128 on compute capability 10.x.
Fact over_192_on_blackwell(const Call& c) {
    return over_256_on_hopper<91000>(c) && !(blackwell(c) && (cudnn(c) >= 91100) && is_192_128(c));
}

/// True if cuDNN takes head_dim up to 256 forward and backward; capability 10.7 needs a later release.
Fact takes_256(const Call& c) {
    return (hopper(c) || blackwell(c)) && (cudnn(c) > 92200) && !((capability(c) == 107) && (cudnn(c) <= 92500));
}
Fact over_256(const Call& c) {
    const Fact as_192 = (hopper(c) || blackwell(c)) && (cudnn(c) >= 91100) && is_192_128(c);
    return wider_than(c, 256) || (wider_than(c, 128) && !takes_256(c) && !as_192);
}

Fact backward_head_dim(const Call& c) {
    const std::int64_t wide = 256;
    const Fact has_one = !over_128(c) || is_192_128(c) || ((head_dim(c) == wide) && (head_dim_v(c) == wide));
    return trains(c) && takes_256(c) && !has_one;
}

Fact head_dim_misaligned(const Call& c) { return !multiple_of(head_dim(c), 8) || !multiple_of(head_dim_v(c), 8); }

constexpr std::int64_t kOne = 1;
Fact length_1(const Call& c) { return !is_nested(c) && ((len_q(c) == kOne) || (len_kv(c) == kOne)); }
Fact one_key(const Call& c) { return !is_nested(c) && (len_kv(c) == kOne); }
Fact one_query_with_dropout(const Call& c) { return !is_nested(c) && (len_q(c) == kOne) && !(dropout(c) == 0.0); }

Fact heads_do_not_divide(const Call& c) {
    const Fact of_v = checks::not_a_multiple(c, heads_v(c));
    return checks::heads_do_not_divide(c) || (!is_nested(c) && (enable_gqa(c) == true) && of_v);
}

constexpr const char* kHeadDim = "head_dim should be no more than";
constexpr const char* kSameHeads =
    "For dense input, both fused kernels require query, key and value to have the same num_heads.";
constexpr const char* kUngrouped = "k and v have other heads than q, and enable_gqa is not set";

constexpr Rule kRules[] = {
    {"cudnn-opt-in", kCudnn, k24, k25, opt_in,
     "The CUDNN backend needs to be enabled by setting the enviornment variable",
     "in 2.4 cuDNN runs only if TORCH_CUDNN_SDPA_ENABLED=1 is set", kCuda},
    {"cudnn-off", kCudnn, k24, k29, switched_off, "CuDNN attention has been runtime disabled.",
     "the cuDNN backend is switched off", kCuda},
    {"cudnn-off", kCudnn, k29, kEnd, switched_off, "cuDNN attention has been runtime disabled.",
     "the cuDNN backend is switched off", kCuda},
    {"cudnn-dropout-version", kCudnn, k29, kEnd, dropout_broken,
     "cuDNN version does not support droppout in SDPA (9.11 - 9.13).", "these releases of cuDNN have no dropout",
     kCuda},
    {"cudnn-nested", kCudnn, k25, k27, is_nested, "CuDNN currently does not support nested inputs.",
     "this release's cuDNN backend takes no nested tensors", kCuda},
    {"cudnn-nested", kCudnn, k27, kEnd, is_nested, "Experimental cuDNN SDPA nested tensor support is not enabled.",
     "nested tensors are experimental here, and off unless TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED=1 is set", kCuda},
    {"cudnn-rank", kCudnn, k25, kEnd, checks::rank,
     "All fused kernels requires query, key and value to be 4 dimensional",
     "q, k, v are not [batch, heads, len, head_dim]", kCommon},
    {"cudnn-deterministic", kCudnn, k25, kEnd, not_deterministic, "cuDNN SDPA is not deterministic.",
     "torch.use_deterministic_algorithms(True) is on", kCuda},
    {"cudnn-dtype", kCudnn, k25, kEnd, checks::not_half,
     "Expected query, key and value to all be of dtype:", "q, k, v are not all fp16 or all bf16", kCommon},
    {"cudnn-mask-gradient", kCudnn, k25, kEnd, mask_gradient, "", "the mask requires a gradient", kCommon},
    {"cudnn-mask-shape", kCudnn, k25, kEnd, mask_shape, "Please use the following attn mask shapes:",
     "the mask is not [len_q, len_kv] or [batch, heads, len_q, len_kv], in which any size may be 1", kCommon},
    {"cudnn-gpu", kCudnn, k25, k27, checks::gpu_outside<80, 90>,
     "cuDNN MHA only supports gpu architectures in the range [sm80, sm90].",
     "this release's cuDNN backend runs on compute capability 8.0 to 9.0 only", kCuda},
    {"cudnn-gpu", kCudnn, k27, k28, checks::gpu_outside<80, 120>,
     "cuDNN MHA only supports gpu architectures in the range [sm80, sm120].",
     "cuDNN runs on compute capability 8.0 to 12.0 only", kCuda},
    {"cudnn-gpu", kCudnn, k28, kEnd, checks::gpu_outside<80, 121>,
     "cuDNN MHA only supports gpu architectures in the range [sm80, sm121].",
     "cuDNN runs on compute capability 8.0 to 12.1 only", kCuda},
    {"cudnn-dropout-16ths", kCudnn, kDropoutIn16ths, kEnd, dropout_not_in_16ths,
     "cuDNN dropout probability resolution is limited to 1/16.", "cuDNN drops in steps of 1/16", kCuda},
    {"cudnn-zero-length", kCudnn, k25, kEnd, checks::zero_length,
     "All fused kernels do not support zero seq_len_q or seq_len_kv.", "there are no queries, or no keys", kCommon},
    {"cudnn-stride", kCudnn, k25, kEnd, [](const Call& c) { return checks::stride(c, true); },
     "All fused kernels require the last dimension of the input to have stride 1.",
     "the last dimension of a tensor, or of the mask, is not contiguous", kCommon},
    {"cudnn-batch", kCudnn, kCudnnChecksHeads, kEnd, checks::batches_differ,
     "For dense inputs, both fused kernels require query, key and value to have the same batch_size.",
     "q, k, v differ in batch", kCommon},
    {"cudnn-heads", kCudnn, kCudnnChecksHeads, kOneHeadBroadcasts, checks::heads_differ_without_gqa, kSameHeads,
     kUngrouped, kCommon},
    {"cudnn-heads", kCudnn, kOneHeadBroadcasts, kEnd, checks::heads_differ_and_not_one, kSameHeads, kUngrouped,
     kCommon},
    {"cudnn-heads-divide", kCudnn, kCudnnChecksHeads, kEnd, heads_do_not_divide,
     "The number of heads in key/value must divide number of heads in query.",
     "the heads of q are no multiple of those of k and v", kCommon},
    {"cudnn-too-many", kCudnn, kTooMany, kEnd, checks::too_many,
     "cuDNN SDPA does not support batch size or num_heads greater than", "batch or heads over 65535", kCuda},
    {"cudnn-decode", kCudnn, kDecodeGuard, kEnd, decodes_wrongly, "cuDNN SDPA decode is disabled on SM",
     "cuDNN 9.19 to 9.25.0 may decode wrongly on compute capability 10.x and 11.x (pytorch#193893)", kCuda},
    {"cudnn-query-gradient", kCudnn, kGradientGuard, kEnd, gradient_not_finite,
     "cuDNN SDPA before version 9.26 can produce non-finite query gradients on SM90",
     "the gradient of q may be NaN before cuDNN 9.26 if the keys are 64 more than a multiple of 128 "
     "(pytorch#196678)",
     kCuda},
    {"cudnn-head-dim", kCudnn, k25, kHopperTakes256, over_128, kHeadDim, "head_dim is over 128", kCuda},
    {"cudnn-head-dim", kCudnn, kHopperTakes256, k29, over_256_on_hopper<90501>, kHeadDim,
     "head_dim is over 128 (256 on compute capability 9.0 with cuDNN 9.5.1)", kCuda},
    {"cudnn-head-dim", kCudnn, k29, k211, over_256_on_hopper<91000>, kHeadDim,
     "head_dim is over 128 (256 on compute capability 9.0 with cuDNN 9.10)", kCuda},
    {"cudnn-head-dim", kCudnn, k211, kWide, over_192_on_blackwell, kHeadDim,
     "head_dim is over 128 (256 on compute capability 9.0 with cuDNN 9.10, 192 with v of 128 on 10.x with 9.11)",
     kCuda},
    {"cudnn-head-dim", kCudnn, kWide, kEnd, over_256, kHeadDim,
     "head_dim is over 128 (on compute capability 9.0 and 10.x: 256 with cuDNN after 9.22, 192 with v of 128 from 9.11 "
     "on)",
     kCuda},
    {"cudnn-head-dim-8", kCudnn, k25, kEnd, head_dim_misaligned, "head_dim should be a multiple of 8",
     "head_dim is no multiple of 8", kCuda},
    {"cudnn-length-1", kCudnn, k26, k29, length_1, "cudnn SDPA does not support sequence length 1.",
     "decoding (one query) and single keys are not taken by this release", kCuda},
    {"cudnn-one-key", kCudnn, k29, kEnd, one_key, "cudnn SDPA does not support key/value sequence length 1.",
     "there is one key only", kCuda},
    {"cudnn-one-query-dropout", kCudnn, k29, kEnd, one_query_with_dropout,
     "cudnn SDPA does not support query sequence length 1 with dropout.",
     "this backend takes no dropout with one query", kCuda},
    {"cudnn-backward-head-dim", kCudnn, kWide, kEnd, backward_head_dim,
     "cuDNN SDPA on SM 9.0/10.x does not support backward with these head dimensions.",
     "the backward has head_dim up to 128, 192 with v of 128, and 256 with v of 256", kCuda},
};

}  // namespace

std::span<const Rule> cudnn_rules() { return kRules; }

std::vector<std::string> cudnn_faults(const Call& call) {
    std::vector<std::string> found;
    if (call.torch && *call.torch < kDecodeGuard && decodes_wrongly(call).is_true())
        found.emplace_back(
            "Note that cuDNN 9.19 to 9.25.0 may decode wrongly on compute capability 10.x and 11.x (pytorch#193893): "
            "PyTorch 2.14 refuses it, this release does not.");
    if (call.torch && *call.torch < kGradientGuard && gradient_not_finite(call).is_true())
        found.emplace_back(
            "Note that the gradient of q may be NaN here before cuDNN 9.26 (pytorch#196678): PyTorch 2.15 refuses it, "
            "this release does not.");
    return found;
}

}  // namespace tessera::diagnose
