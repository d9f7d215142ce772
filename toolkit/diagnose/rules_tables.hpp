// SPDX-License-Identifier: Apache-2.0
//
// The rules of each backend, in the order in which PyTorch checks, and the conditions that they share.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "diagnose/rules.hpp"
#include "diagnose/values.hpp"

namespace tessera::diagnose {

std::span<const Rule> flash_rules();
std::span<const Rule> efficient_rules();
std::span<const Rule> cudnn_rules();
std::span<const Rule> math_rules();
std::span<const Rule> replacement_rules();  ///< for fa3 and fa4

/// Known faults of a call that this release gives to cuDNN and a later one does not.
std::vector<std::string> cudnn_faults(const Call& call);

// Releases in which the checks changed, as the wheels' code and headers show.
inline constexpr Version kCudnnChecksHeads{2, 8, 0};
inline constexpr Version kHopperTakes256{2, 8, 0};   ///< cuDNN with head_dim up to 256 on compute capability 9.0
inline constexpr Version kDropoutIn16ths{2, 12, 0};  ///< cuDNN
inline constexpr Version kEfficientChecksOffsets{2, 13, 0};
inline constexpr Version kTooMany{2, 13, 0};  ///< cuDNN: batch and heads up to 65535
inline constexpr Version kEfficientTakesGroups{2, 14, 0};
inline constexpr Version kCudnnTakes256{2, 14, 0};      ///< forward and backward, on compute capability 10.x too
inline constexpr Version kOneHeadBroadcasts{2, 14, 0};  ///< k and v of one head need no enable_gqa
inline constexpr Version kTakesUnbatched{2, 14, 0};     ///< q, k, v of three dimensions are a batch of one
inline constexpr Version kDecodeGuard{2, 14, 0};        ///< refuses cuDNN's releases that decode wrongly
inline constexpr Version kGradientGuard{2, 15, 0};      ///< refuses cuDNN's releases whose gradient of q may be NaN
inline constexpr Version kFlashTooMany{2, 15, 0};

namespace checks {

inline constexpr Version k24 = kFirstRelease;
inline constexpr Version k25{2, 5, 0};
inline constexpr Version kEnd = kEndOfReleases;

/// q, k or v does not have four dimensions.
inline Fact rank(const Call& c) {
    const std::size_t four = 4;
    return (diagnose::rank(c.q, "q") != four) || (diagnose::rank(c.k, "k") != four) ||
           (diagnose::rank(c.v, "v") != four);
}

inline Fact zero_length(const Call& c) {
    return !is_nested(c) && ((len_q(c) == std::int64_t{0}) || (len_kv(c) == std::int64_t{0}));
}

/// The last dimension of q, k, v or the mask is not contiguous.
inline Fact stride(const Call& c, bool unless_head_dim_1) {
    const std::int64_t one = 1;
    const Fact of_mask = has_mask(c) && (last_stride(c.mask, "attn_mask") != one);
    Fact of_inputs = (last_stride(c.q, "q") != one) || (last_stride(c.k, "k") != one) || (last_stride(c.v, "v") != one);
    if (unless_head_dim_1) of_inputs = of_inputs && (head_dim(c) != one);
    return !is_nested(c) && (of_inputs || of_mask);
}

inline Fact batches_differ(const Call& c) {
    return !is_nested(c) && !(same(batch(c), size_of(c.k, "k", 0)) && same(batch(c), size_of(c.v, "v", 0)));
}

inline Fact heads_differ(const Call& c) {
    return !is_nested(c) && !(same(heads_q(c), heads_k(c)) && same(heads_q(c), heads_v(c)));
}

/// The numbers of heads differ although enable_gqa is off.
inline Fact heads_differ_without_gqa(const Call& c) { return heads_differ(c) && !(enable_gqa(c) == true); }

/// The numbers of heads differ, and k and v do not have one head that broadcasts to all of q's.
inline Fact heads_differ_and_not_one(const Call& c) {
    const std::int64_t one = 1;
    return heads_differ_without_gqa(c) && !((heads_k(c) == one) && (heads_v(c) == one));
}

inline Fact heads_k_and_v_differ(const Call& c) {
    return !is_nested(c) && (enable_gqa(c) == true) && !same(heads_k(c), heads_v(c));
}

/// heads_q is not a multiple of a tensor's heads; a tensor without heads divides nothing.
inline Fact not_a_multiple(const Call& c, const Size& heads) {
    if (!heads.value) return Fact::unknown(heads.field);
    return *heads.value <= 0 ? Fact(true) : !multiple_of(heads_q(c), *heads.value);
}
inline Fact heads_do_not_divide(const Call& c) {
    return !is_nested(c) && (enable_gqa(c) == true) && not_a_multiple(c, heads_k(c));
}

template <int low, int high>
Fact gpu_outside(const Call& c) {
    return !between(capability(c), low, high);
}

/// The dtype is neither fp16 nor, on sm80 and later, bf16.
inline Fact not_half(const Call& c) {
    const Fact new_gpu = capability(c) >= 80;
    return !(dtype_among(c, {Element::fp16}) || (new_gpu && dtype_among(c, {Element::bf16})));
}

/// The batch or the heads exceed 65535.
inline Fact too_many(const Call& c) {
    const std::int64_t most = 65535;
    return !is_nested(c) && ((batch(c) > most) || (heads_q(c) > most));
}

/// The ragged batches do not fit together; unknown unless the lengths of the sequences are.
inline Fact nested_shapes(const Call& c) {
    return is_nested(c) && Fact::unknown("the shapes of the nested tensors' sequences");
}

}  // namespace checks

// Sources of the rows. "wheel" means that the text stands in PyPI's wheels of these releases (libtorch_cuda.so, or a
// header in them); the limits were read in the compiled code of those wheels.
inline constexpr const char* kCommon = "ATen/native/transformers/sdp_utils_cpp.h; wheels";
inline constexpr const char* kCuda = "ATen/native/transformers/cuda/sdp_utils.cpp; wheels";

}  // namespace tessera::diagnose
