// SPDX-License-Identifier: Apache-2.0
#include "diagnose/rules_tables.hpp"

namespace tessera::diagnose {
namespace {

using checks::k24, checks::k25, checks::kEnd;
constexpr SdpBackend kEfficient = SdpBackend::efficient;
constexpr SdpBackend kMath = SdpBackend::math;
constexpr Version k27{2, 7, 0};
constexpr Version k28{2, 8, 0};
constexpr Version kGrouped = kEfficientTakesGroups;
constexpr Version kAligned = kEfficientChecksOffsets;

Fact switched_off(const Call& c) {
    return enabled(c).is([](const Enabled& e) { return !e.efficient; });
}

/// The number of elements that head_dim must be a multiple of; kHalfAlignment is the largest for any dtype and GPU.
constexpr std::int64_t kHalfAlignment = 8;
constexpr std::int64_t kFloatAlignment = 4;

/// True if a size is not a multiple of the dtype's alignment on this GPU, for any sizes that `multiple` tests.
template <class Test>
Fact misaligned(const Call& c, Test&& multiple) {
    const Fact half = half_precision(c);
    const Fact tensor_cores = (capability(c) >= 80) || ((capability(c) >= 70) && half);
    const Fact aligned_half = !half || !tensor_cores || multiple(kHalfAlignment);
    const Fact aligned_float = half || !(capability(c) >= 80) || multiple(kFloatAlignment);
    return !(aligned_half && aligned_float);
}

Fact head_dim_misaligned(const Call& c) {
    const auto multiple = [&](std::int64_t of) {
        return multiple_of(head_dim(c), of) && multiple_of(head_dim_v(c), of);
    };
    const std::int64_t zero = 0;
    return !same(head_dim(c), head_dim_k(c)) || (head_dim(c) <= zero) || (head_dim_v(c) <= zero) ||
           misaligned(c, multiple);
}

Fact offset_misaligned(const Call& c) {
    const auto multiple = [&](std::int64_t of) {
        const auto aligned = [&](const Operand& t, const char* name) {
            return multiple_of({t.storage_offset, std::string(name) + "'s storage offset"}, of);
        };
        return aligned(c.q, "q") && aligned(c.k, "k") && aligned(c.v, "v");
    };
    return !is_nested(c) && (capability(c) >= 80) && misaligned(c, multiple);
}

Fact nested_training(const Call& c) { return is_nested(c) && trains(c); }

Fact dtype_unsupported(const Call& c) {
    const Fact bf16 = (capability(c) >= 80) && dtype_among(c, {Element::bf16});
    return !(dtype_among(c, {Element::fp16, Element::fp32}) || bf16);
}

Fact math_switched_off(const Call& c) {
    return enabled(c).is([](const Enabled& e) { return !e.math; });
}

constexpr const char* kGpu = "this release's memory-efficient kernels run on compute capability 5.0 to 9.0 only";
constexpr const char* kHeads = "k and v have other heads than q, and this release's kernels support no grouped heads";

constexpr Rule kRules[] = {
    {"efficient-off", kEfficient, k24, kEnd, switched_off, "Memory Efficient attention has been runtime disabled.",
     "the memory-efficient backend is switched off", kCommon},
    {"efficient-gpu", kEfficient, k24, k27, checks::gpu_outside<50, 90>,
     "Mem Efficient Attention only supports gpu architectures in the range [sm50, sm90].", kGpu, kCuda},
    {"efficient-gpu", kEfficient, k27, k28, checks::gpu_outside<50, 120>,
     "Mem Efficient Attention only supports gpu architectures in the range [sm50, sm120].",
     "the memory-efficient kernels run on compute capability 5.0 to 12.0 only", kCuda},
    {"efficient-gpu", kEfficient, k28, kEnd, checks::gpu_outside<50, 121>,
     "Mem Efficient Attention only supports gpu architectures in the range [sm50, sm121].",
     "the memory-efficient kernels run on compute capability 5.0 to 12.1 only", kCuda},
    {"efficient-rank", kEfficient, k24, k25, checks::rank,
     "Both fused kernels requires query, key and value to be 4 dimensional",
     "q, k, v are not [batch, heads, len, head_dim]", kCommon},
    {"efficient-rank", kEfficient, k25, kEnd, checks::rank,
     "All fused kernels requires query, key and value to be 4 dimensional",
     "q, k, v are not [batch, heads, len, head_dim]", kCommon},
    {"efficient-head-dim", kEfficient, k24, kEnd, head_dim_misaligned,
     "Mem efficient attention requires last dimension of inputs to be divisible by",
     "rows of q, k, v must be multiples of 16 bytes (head_dim: 8 elements of 16 bits, 4 of 32), and equal for q and k",
     kCuda},
    {"efficient-offset", kEfficient, kAligned, kEnd, offset_misaligned,
     "Mem efficient attention on sm80 or newer requires q, k, and v storage offsets",
     "a tensor is a view that does not begin at a multiple of 16 bytes", kCuda},
    {"efficient-nested-training", kEfficient, k24, kEnd, nested_training,
     "Memory efficient attention currently doesn't support training with NT inputs.",
     "nested tensors have no backward here", kCommon},
    {"efficient-nested-shapes", kEfficient, k24, kEnd, checks::nested_shapes, "Fused kernels do not support",
     "sequences of a nested tensor must not be empty, and must broadcast", kCommon},
    {"efficient-zero-length", kEfficient, k24, k25, checks::zero_length,
     "Both fused kernels do not support zero seq_len_q or seq_len_kv.", "there are no queries, or no keys", kCommon},
    {"efficient-zero-length", kEfficient, k25, kEnd, checks::zero_length,
     "All fused kernels do not support zero seq_len_q or seq_len_kv.", "there are no queries, or no keys", kCommon},
    {"efficient-stride", kEfficient, k24, k25, [](const Call& c) { return checks::stride(c, false); },
     "Both fused kernels require the last dimension of the input to have stride 1.",
     "the last dimension of a tensor, or of the mask, is not contiguous", kCommon},
    {"efficient-stride", kEfficient, k25, kEnd, [](const Call& c) { return checks::stride(c, false); },
     "All fused kernels require the last dimension of the input to have stride 1.",
     "the last dimension of a tensor, or of the mask, is not contiguous", kCommon},
    {"efficient-batch", kEfficient, k24, k25, checks::batches_differ,
     "For dense inputs, both fused kernels require query, key and value to have the same batch_size and num_heads.",
     "q, k, v differ in batch", kCommon},
    {"efficient-batch", kEfficient, k25, kEnd, checks::batches_differ,
     "For dense inputs, both fused kernels require query, key and value to have the same batch_size.",
     "q, k, v differ in batch", kCommon},
    {"efficient-heads", kEfficient, k24, k25, checks::heads_differ,
     "For dense inputs, both fused kernels require query, key and value to have the same batch_size and num_heads.",
     kHeads, kCommon},
    {"efficient-heads", kEfficient, k25, kGrouped, checks::heads_differ,
     "For dense input, both fused kernels require query, key and value to have the same num_heads.", kHeads, kCuda},
    {"efficient-heads", kEfficient, kGrouped, kEnd, checks::heads_differ_and_not_one,
     "For dense input, both fused kernels require query, key and value to have the same num_heads.",
     "k and v have other heads than q, and enable_gqa is not set", kCommon},
    {"efficient-heads-k-v", kEfficient, kGrouped, kEnd, checks::heads_k_and_v_differ,
     "Both fused kernels require key and value to have the same num_heads", "k and v differ in heads", kCommon},
    {"efficient-heads-divide", kEfficient, kGrouped, kEnd, checks::heads_do_not_divide,
     "The number of heads in key/value must divide number of heads in query.",
     "the heads of q are no multiple of those of k", kCommon},
    {"efficient-dtype", kEfficient, k24, kEnd, dtype_unsupported, "Expected query, key and value to all be of dtype:",
     "q, k, v are not all fp16, all fp32 or all bf16 (bf16 from compute capability 8.0 on)", kCuda},
};

constexpr Rule kMathRules[] = {
    {"math-off", kMath, k24, kEnd, math_switched_off, "", "the math path is switched off", kCuda},
};

}  // namespace

std::span<const Rule> efficient_rules() { return kRules; }

std::span<const Rule> math_rules() { return kMathRules; }

}  // namespace tessera::diagnose
