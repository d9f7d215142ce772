// SPDX-License-Identifier: Apache-2.0
//
// A second statement of the problems that each kernel supports and may refuse. A kernel that refuses any other problem
// fails the tests and `tessera check`, so that no case is skipped unnoticed.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"

namespace tessera::check {

/// True for the kernel of few queries and caches, which splits the keys among thread blocks.
inline bool splits_keys(const KernelInfo& kernel) { return kernel.name == "cuda.decode.forward"; }

/// True for the kernels that read keys in the slots or pages of a cache.
inline bool takes_cache(const KernelInfo& kernel) {
    return kernel.backend != Backend::cuda || splits_keys(kernel) || kernel.name == "cuda.fa3.forward";
}

/// True if this kernel supports the dtype. KernelInfo::dtypes is not read, because a change may shorten it by mistake.
inline bool takes(const KernelInfo& kernel, DType dtype) {
    if (kernel.backend == Backend::reference) return true;
    if (is_16_bit(dtype)) return true;
    const bool fp32 = kernel.backend == Backend::cpu || (kernel.schedule == Schedule::fa2 && !splits_keys(kernel));
    return dtype == DType::fp32 && fp32;
}

/// True if scores pass through nothing but a positive scale and the mask.
inline bool plain_scores(const Problem& p) {
    const auto scale = static_cast<float>(p.effective_scale());
    return p.softcap == 0 && !p.alibi && !p.bias && p.dropout.probability == 0 && std::isnormal(scale) && scale > 0;
}

/// Refusals of cuda.decode.forward.
inline std::string decode_refusal(const Problem& p) {
    if (p.bias || p.dropout.probability > 0) return "takes no bias or dropout";
    if (p.kv_lengths) return "";
    if (p.len_q > 8) return "takes up to 8 queries a sequence";
    if (p.len_kv < 512) return "takes 512 keys and more";
    return "";
}

/// Refusals of fa3's kernels.
inline std::string fa3_refusal(const Problem& p) {
    if (!plain_scores(p)) {
        if (p.kv_lengths) return "takes softcap, ALiBi, biases, dropout and scales of 0 and less without a cache only";
        if (std::max(p.head_dim, p.head_dim_v) > 128)
            return "takes softcap, ALiBi, biases, dropout and scales of 0 and less up to head_dim 128";
    }
    if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) return "takes a head_dim in multiples of 8";
    if (p.page_size > 0 && p.left_padding) return "takes no left_padding with pages";
    if (p.page_size % 8 != 0) return "takes pages of a multiple of 8 keys";
    return "";
}

/// True for the reason of a CUDA kernel that another GPU would not have.
inline bool needs_another_gpu(const KernelInfo& kernel, std::string_view reason) {
    const auto says = [&](std::string_view text) { return reason.find(text) != std::string_view::npos; };
    return kernel.backend == Backend::cuda && (says("needs compute capability") || says("bytes of shared memory"));
}

/// Returns the start of this kernel's reason for refusing the Problem on a supported device; "" if it must run it.
inline std::string expected_refusal(const KernelInfo& kernel, const Problem& p) {
    if (p.kv_lengths && kernel.pass == Pass::backward) return "a cache of keys has no gradient";
    if (!takes(kernel, p.dtype)) return "does not take " + std::string(name_of(p.dtype));
    if (p.kv_lengths && !takes_cache(kernel)) return "takes no cache of keys";
    if (kernel.name == "cpu.fa1.forward" && p.len_kv > 65536) return "renormalises O at every K/V block";
    const std::int64_t most_terms = p.dtype == DType::fp16 ? 32'768 : 65'536;
    if (kernel.name == "cuda.standard.backward" && std::max(p.len_q * p.group(), p.len_kv) > most_terms) {
        return "has one accumulator for each sum";
    }
    if (splits_keys(kernel)) return decode_refusal(p);
    return kernel.schedule == Schedule::fa3 ? fa3_refusal(p) : "";
}

}  // namespace tessera::check
