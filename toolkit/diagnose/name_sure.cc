// SPDX-License-Identifier: Apache-2.0
//
// Decides when a reading may be called likely or certain. A reader says what a name means. This file checks whether
// only one library writes that name, or whether it consists of common words. A reading by common words alone is unsure.
#include <algorithm>

#include "diagnose/name_readers.hpp"
#include "diagnose/name_words.hpp"

namespace tessera::diagnose {
namespace {

/// True if the text has a tile such as "128x64", which generated GEMMs carry.
bool has_tile(std::string_view text) {
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    for (std::size_t at = text.find('x', 1); at != std::string_view::npos; at = text.find('x', at + 1)) {
        if (is_digit(text[at - 1]) && at + 1 < text.size() && is_digit(text[at + 1])) return true;
    }
    return false;
}

/// True if the name has an Inductor operator that is a GEMM, as a whole word:
/// "triton_tem_fused__to_copy_addmm_gelu_t_view_9".
bool names_a_gemm(std::string_view name) {
    const std::vector<std::string> words = words_of(function_of(name));
    return std::any_of(words.begin(), words.end(), [](const std::string& word) {
        return word == "mm" || word == "bmm" || word == "addmm" || word == "baddbmm";
    });
}

/// True if the name is one of Inductor's, which end in a number: "triton_mm_7".
bool is_numbered(std::string_view lower, std::string_view name) {
    return lower.substr(0, name.size()) == name &&
           lower.find_first_not_of("_0123456789", name.size()) == std::string_view::npos;
}

/// True if the name is a GEMM of cuBLAS, CUTLASS, hipBLASLt, DeepGEMM, Inductor or XLA.
bool is_gemm_of_library(std::string_view name, std::string_view lower) {
    if (begins_any(lower, {"nvjet_", "cijk_", "custom_cijk_", "gemm_fusion_dot", "gemv2t_kernel", "gemv2n_kernel",
                           "gemvnsp_kernel", "gemmsn_", "gemmk1_kernel", "magma_sgemm", "rocblas_gem"}))
        return true;
    if (is_numbered(lower, "triton_mm_") || is_numbered(lower, "triton_bmm_")) return true;
    if (contains_any(lower, {"internal::gemvx::kernel", "_xmma_gemm_"})) return true;
    if (begins_any(lower, {"ampere_", "volta_", "turing_", "maxwell_", "pascal_", "hopper_"}))
        return contains(lower, "gemm");
    if (begins_any(lower, {"triton_tem_fused"})) return names_a_gemm(name);
    const bool convolves = contains_any(lower, {"fprop", "dgrad", "wgrad", "conv", "implicit"});
    const bool generated = contains_any(lower, {"_tensorop", "_simt_", "_wmma_"}) &&
                           begins_any(lower, {"cutlass_", "cutlass::", "cutlass3x_"});
    if (generated && !convolves) return contains(lower, "gemm") || has_tile(lower) || contains(lower, "tensorop");
    if (contains_any(lower, {"cutlass::gemm::ker", "cutlass::device_kernel<cutlass::gemm"})) return !convolves;
    if (begins_any(lower, {"cutlass3x_"})) return contains(lower, "gemm");
    if (contains(lower, "deep_gemm::")) return contains(lower_case(function_of(name)), "_gemm_");
    return false;
}

bool is_softmax_of_library(std::string_view name) {
    return begins_any(name, {"cunn_SoftMax", "cunn_SpatialSoftMax", "softmax_warp_forward", "softmax_warp_backward",
                             "scaled_masked_softmax_warp_", "scaled_upper_triang_masked_softmax_warp_"});
}

bool is_elementwise_of_library(std::string_view name, std::string_view lower) {
    if (begins_any(lower, {"triton_poi_fused", "loop_", "wrapped_"})) return true;
    if (!contains(name, "at::native::")) return false;
    const std::string_view function = function_of(name);
    return contains(function, "elementwise") || begins_any(function, {"CatArrayBatc", "triu_tril_kernel"});
}

/// True if the name is a kernel of PyTorch, NCCL or an algorithm library that is no part of attention.
bool is_other_of_library(std::string_view name, std::string_view lower) {
    return begins_any(name, {"ncclDevKernel", "ncclKernel", "rcclGeneric", "triton_red_fused", "triton_per_fused",
                             "multi_tensor_apply_kernel", "splitKreduce_kernel", "DeviceRadixSort", "DeviceScan",
                             "igemm_fwd_gtc", "igemm_bwd_gtc", "igemm_wrw_gtc", "__amd_rocclr_", "cunn_SoftMax",
                             "softmax_warp_forward", "softmax_warp_backward", "nll_loss_"}) ||
           contains_any(name, {"at::native::", "at::cuda::", "cub::", "rocprim::", "thrust::", "deep_ep::",
                               "cudnn::bn_", "cudnn::winograd"}) ||
           contains_any(lower, {"xmma_fprop_implicit_gemm", "xmma_dgrad_implicit_gemm", "xmma_wgrad_implicit_gemm",
                                "conv::kernel::implicitgemmconvolution", "fprop_optimized"}) ||
           begins_any(lower, {"input_"});
}

/// True if the name is a kernel of vLLM, FlashInfer, SGLang, flash-linear-attention or Mamba that runs beside
/// attention. It compares whole names, or beginnings that only they have.
bool is_look_alike_of_library(std::string_view name) {
    if (read_operator(name)) return true;
    if (begins_any(name, {"triton_poi_fused", "triton_red_fused", "triton_per_fused"})) return true;
    if (contains_any(name, {"vllm::", "flashinfer::", "sglang::"}) &&
        begins_any(name, {"reshape_and_cache", "concat_and_cache_", "rotary_embedding_kernel", "gather_cache"}))
        return true;
    if (contains(name, "deep_gemm::") && contains(function_of(name), "mqa_logits")) return true;
    if (contains_any(name, {"flashinfer::norm::", "flashinfer::sampling::", "flashinfer::activation::",
                            "flashinfer::trtllm_allreduce"}))
        return true;
    return begins_any(name, {"reshape_and_cache_kernel",
                             "reshape_and_cache_flash_kernel",
                             "concat_and_cache_mla_kernel",
                             "batched_rotary_embedding_kernel",
                             "BatchQKApplyRotary",
                             "AppendPagedKVCache",
                             "kernel_cutlass_kernel_flashinfernorm",
                             "set_mla_kv_buffer_kernel",
                             "create_flashinfer_kv_indices_triton",
                             "chunk_gated_delta_rule_fwd_kernel_h",
                             "chunk_gated_delta_rule_bwd_kernel_dhu",
                             "chunk_local_cumsum_scalar_kernel",
                             "chunk_local_cumsum_vector_kernel",
                             "chunk_scaled_dot_kkt_fwd_kernel",
                             "fused_recurrent_gated_delta_rule",
                             "recompute_w_u_fwd_kernel",
                             "causal_conv1d_fwd_kernel",
                             "_causal_conv1d_fwd_kernel",
                             "_causal_conv1d_update_kernel",
                             "causal_conv1d_update_kernel",
                             "selective_scan_fwd_kernel",
                             "selective_scan_bwd_kernel",
                             "_chunk_scan_fwd_kernel",
                             "_chunk_state_fwd_kernel",
                             "_state_passing_fwd_kernel"});
}

bool is_of_library(Role role, std::string_view name, std::string_view lower) {
    switch (role) {
        case Role::gemm: return is_gemm_of_library(name, lower);
        case Role::softmax:
        case Role::softmax_backward: return is_softmax_of_library(name);
        case Role::elementwise: return is_elementwise_of_library(name, lower);
        case Role::other: return is_other_of_library(name, lower);
        case Role::look_alike: return is_look_alike_of_library(name);
        default: return false;
    }
}

/// The head_dim in a function's name: "_dk576", "_hd128", "hdim64".
int head_dim_in(std::string_view function) {
    for (const char* prefix : {"_dk", "_hd", "hdim", "_d", "_h", "head_dim_", "headdim"}) {
        const int size = number_after(function, prefix).value_or(0);
        if (size >= 16 && size <= 1024 && size % 8 == 0) return size;
    }
    return 0;
}

/// True if a family is recognised by a single name, which other libraries may have extended.
bool is_own_name(Family family, std::string_view name) {
    if (family == Family::natten)
        return contains_any(name, {"natten", "fna::", "NeighborhoodAttention", "Fna"}) || begins_any(name, {"fna_"});
    if (family == Family::other)
        return begins_any(name, {"hstu_attn", "_hstu_attn", "HSTUAttention", "fmha_fprop_fp16_", "fmha_dgrad_fp16_"});
    return true;
}

/// The reason to doubt a family's reading; "" if there is none.
std::string doubt(const NameReading& reading, std::string_view name) {
    if (!is_own_name(reading.family, name)) return "other libraries may use this name";
    // A grammar reads these names as a whole; their other words are masks or fused operators.
    if (reading.family == Family::flex || contains_any(name, {"fmha_v2_", "mhaSm"})) return "";
    const std::string_view function = function_of(name);
    const std::vector<std::string> words = words_of(function);
    const Role role = read_words(words).role;
    const bool beside = role == Role::helper || role == Role::look_alike || mentions_helper(words);
    if (reading.role == Role::attention && beside) return "its words describe a helper of attention";
    if (reading.role == Role::attention && reading.head_dim == 0 && head_dim_in(function) != 0)
        return "the name has a head_dim that was not read";
    return "";
}

}  // namespace

void limit_confidence(NameReading& reading, std::string_view name) {
    if (reading.confidence <= Confidence::unsure) return;
    if (reading.family == Family::unknown) {
        if (is_of_library(reading.role, name, lower_case(name))) return;
        reading.confidence = Confidence::unsure;
        reading.evidence.emplace_back("the evidence is a word that several libraries use");
    } else if (const std::string why = doubt(reading, name); !why.empty()) {
        reading.confidence = Confidence::unsure;
        reading.evidence.push_back(why);
    }
}

}  // namespace tessera::diagnose
