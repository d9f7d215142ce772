// SPDX-License-Identifier: Apache-2.0
#include "diagnose/rules_tables.hpp"

namespace tessera::diagnose {
namespace {

using checks::k24, checks::k25, checks::kEnd;
constexpr SdpBackend kFlash = SdpBackend::flash;
constexpr Version k27{2, 7, 0};
constexpr Version k28{2, 8, 0};
constexpr Version k211{2, 11, 0};

Fact switched_off(const Call& c) {
    return enabled(c).is([](const Enabled& e) { return !e.flash; });
}

Fact head_dim_too_wide(const Call& c) {
    const std::int64_t widest = 256;
    return !(same(head_dim(c), head_dim_k(c)) && same(head_dim(c), head_dim_v(c)) && (head_dim(c) <= widest));
}

/// Training with 192 < head_dim <= 224, or with a wider head and dropout.
Fact wide_training(const Call& c) {
    const std::int64_t most = 192;
    const std::int64_t padded = 224;
    return trains(c) && (head_dim(c) > most) && ((head_dim(c) <= padded) || (dropout(c) > 0.0));
}
Fact wide_training_sm86(const Call& c) { return between(capability(c), 86, 89) && wide_training(c); }
Fact wide_training_sm120(const Call& c) {
    return (between(capability(c), 86, 89) || between(capability(c), 120, 121)) && wide_training(c);
}

Fact causal_not_square(const Call& c) { return (is_causal(c) == true) && !is_nested(c) && !same(len_q(c), len_kv(c)); }

/// The dtype is neither half nor fp8, which passes once FA3 is active.
Fact not_half_nor_fp8(const Call& c) {
    const Fact fp8 = (capability(c) >= 90) && (flash_implementation(c) == FlashImplementation::fa3) &&
                     dtype_among(c, {Element::fp8_e4m3});
    return checks::not_half(c) && !fp8;
}

Fact nested_head_dim(const Call& c) { return is_nested(c) && !multiple_of(head_dim(c), 8); }

constexpr const char* kSameHeads =
    "For dense input, both fused kernels require query, key and value to have the same num_heads.";
constexpr const char* kUngrouped = "k and v have other heads than q, and enable_gqa is not set";

constexpr Rule kRules[] = {
    {"flash-off", kFlash, k24, kEnd, switched_off, "Flash attention has been runtime disabled.",
     "the flash backend is switched off", kCommon},
    {"flash-rank", kFlash, k24, k25, checks::rank,
     "Both fused kernels requires query, key and value to be 4 dimensional",
     "q, k, v are not [batch, heads, len, head_dim]", kCommon},
    {"flash-rank", kFlash, k25, kEnd, checks::rank,
     "All fused kernels requires query, key and value to be 4 dimensional",
     "q, k, v are not [batch, heads, len, head_dim]", kCommon},
    {"flash-mask", kFlash, k24, kEnd, has_mask, "Flash Attention does not support non-null attn_mask.",
     "flash takes no mask tensor, not even one that is causal or hides nothing", kCommon},
    {"flash-head-dim", kFlash, k24, kEnd, head_dim_too_wide,
     "Flash attention requires q,k,v to have the same last dimension and to be less than or equal to 256.",
     "q, k and v differ in head_dim, or it is over 256", kCuda},
    {"flash-gpu", kFlash, k24, k27, checks::gpu_outside<80, 90>,
     "Flash attention only supports gpu architectures in the range [sm80, sm90].",
     "this release's flash runs on compute capability 8.0 to 9.0 only", kCuda},
    {"flash-gpu", kFlash, k27, k28, checks::gpu_outside<80, 120>,
     "Flash attention only supports gpu architectures in the range [sm80, sm120].",
     "flash runs on compute capability 8.0 to 12.0 only", kCuda},
    {"flash-gpu", kFlash, k28, kEnd, checks::gpu_outside<80, 121>,
     "Flash attention only supports gpu architectures in the range [sm80, sm121].",
     "flash runs on compute capability 8.0 to 12.1 only", kCuda},
    {"flash-wide-training", kFlash, k24, k27, wide_training_sm86,
     "Flash attention currently doesn't support training with head_dim",
     "the backward of such wide heads does not fit the shared memory of compute capability 8.6 to 8.9", kCuda},
    {"flash-wide-training", kFlash, k27, kEnd, wide_training_sm120,
     "Flash attention currently doesn't support training with head_dim",
     "the backward of such wide heads does not fit the shared memory of compute capability 8.6 to 8.9 and 12.x", kCuda},
    {"flash-causal-not-square", kFlash, k24, kEnd, causal_not_square,
     "Flash attention does not support the is_causal flag when seqlen_q != seqlen_k.",
     "PyTorch aligns the causal mask at the top left, flash at the bottom right: they differ when lengths do", kCuda},
    {"flash-dtype", kFlash, k24, k211, checks::not_half, "Expected query, key and value to all be of dtype:",
     "q, k, v are not all fp16 or all bf16 (bf16 from compute capability 8.0 on)", kCommon},
    {"flash-dtype", kFlash, k211, kEnd, not_half_nor_fp8, "Expected query, key and value to all be of dtype:",
     "q, k, v are not all fp16 or all bf16 (float8_e4m3fn passes when FA3 is active)", kCommon},
    {"flash-nested-head-dim", kFlash, k24, kEnd, nested_head_dim,
     "For NestedTensor inputs, Flash attention requires q,k,v",
     "nested tensors are not padded, so head_dim has to be a multiple of 8", kCuda},
    {"flash-batch", kFlash, k24, k25, checks::batches_differ,
     "For dense inputs, both fused kernels require query, key and value to have the same batch_size and num_heads.",
     "q, k, v differ in batch", kCommon},
    {"flash-batch", kFlash, k25, kEnd, checks::batches_differ,
     "For dense inputs, both fused kernels require query, key and value to have the same batch_size.",
     "q, k, v differ in batch", kCommon},
    {"flash-heads", kFlash, k24, k25, checks::heads_differ,
     "For dense inputs, both fused kernels require query, key and value to have the same batch_size and num_heads.",
     "k and v have other heads than q, and 2.4 has no grouped heads", kCommon},
    {"flash-heads", kFlash, k25, kOneHeadBroadcasts, checks::heads_differ_without_gqa, kSameHeads, kUngrouped, kCommon},
    {"flash-heads", kFlash, kOneHeadBroadcasts, kEnd, checks::heads_differ_and_not_one, kSameHeads, kUngrouped,
     kCommon},
    {"flash-heads-k-v", kFlash, k25, kEnd, checks::heads_k_and_v_differ,
     "Both fused kernels require key and value to have the same num_heads", "k and v differ in heads", kCommon},
    {"flash-heads-divide", kFlash, k25, kEnd, checks::heads_do_not_divide,
     "The number of heads in key/value must divide number of heads in query.",
     "the heads of q are no multiple of those of k", kCommon},
    {"flash-zero-length", kFlash, k24, k25, checks::zero_length,
     "Both fused kernels do not support zero seq_len_q or seq_len_kv.", "there are no queries, or no keys", kCommon},
    {"flash-zero-length", kFlash, k25, kEnd, checks::zero_length,
     "All fused kernels do not support zero seq_len_q or seq_len_kv.", "there are no queries, or no keys", kCommon},
    {"flash-stride", kFlash, k24, k25, [](const Call& c) { return checks::stride(c, true); },
     "Both fused kernels require the last dimension of the input to have stride 1.",
     "the last dimension of a tensor is not contiguous", kCommon},
    {"flash-stride", kFlash, k25, kEnd, [](const Call& c) { return checks::stride(c, true); },
     "All fused kernels require the last dimension of the input to have stride 1.",
     "the last dimension of a tensor is not contiguous", kCommon},
    {"flash-too-many", kFlash, kFlashTooMany, kEnd, checks::too_many,
     "Flash attention does not support batch size or num_heads greater than", "batch or heads over 65535", kCuda},
    {"flash-nested-shapes", kFlash, k24, kEnd, checks::nested_shapes, "Fused kernels do not support",
     "sequences of a nested tensor must not be empty, and must broadcast", kCommon},
};

}  // namespace

std::span<const Rule> flash_rules() { return kRules; }

}  // namespace tessera::diagnose
