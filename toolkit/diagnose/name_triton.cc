// SPDX-License-Identifier: Apache-2.0
//
// Reads attention in Triton, and on AMD's GPUs.
#include <array>

#include "diagnose/name_readers.hpp"
#include "diagnose/name_words.hpp"

namespace tessera::diagnose {
namespace {

struct TritonRow {
    const char* name;
    Role role;
    KernelPass pass;
    Confidence confidence;
    const char* library;
};

constexpr auto kF = KernelPass::forward;
constexpr auto kB = KernelPass::backward;

/// Whole function names; a Triton kernel has the name of its Python function.
constexpr std::array kTriton{
    TritonRow{"_attn_fwd", Role::attention, kF, Confidence::likely, "Triton's tutorial, or code made of it"},
    TritonRow{"_attn_fwd_inner", Role::attention, kF, Confidence::likely, "Triton's tutorial, or code made of it"},
    TritonRow{"_attn_bwd", Role::attention, kB, Confidence::likely, "Triton's tutorial, or code made of it"},
    TritonRow{"_attn_bwd_dkdv", Role::attention, kB, Confidence::likely, "Triton's tutorial, or code made of it"},
    TritonRow{"_attn_bwd_dq", Role::attention, kB, Confidence::likely, "Triton's tutorial, or code made of it"},
    TritonRow{"_attn_bwd_preprocess", Role::helper, kB, Confidence::likely, "Triton's tutorial, or code made of it"},
    TritonRow{"_bwd_preprocess_do_o_dot", Role::helper, kB, Confidence::likely, "flash-attn's Triton version"},
    TritonRow{"_bwd_preprocess", Role::helper, kB, Confidence::unsure, "Triton's tutorial, or code made of it"},
    TritonRow{"_fwd_kernel", Role::attention, kF, Confidence::unsure, "a common name: Triton's tutorial, SGLang, vLLM"},
    TritonRow{"_bwd_kernel", Role::attention, kB, Confidence::unsure, "a common name: Triton's tutorial"},
    TritonRow{"_flash_attn_fwd", Role::attention, kF, Confidence::likely, ""},
    TritonRow{"_flash_attn_bwd", Role::attention, kB, Confidence::likely, ""},
    TritonRow{"_fwd_kernel_splitK", Role::attention, kF, Confidence::likely, "xFormers' split-K"},
    TritonRow{"_splitK_reduce", Role::helper, kF, Confidence::likely, "xFormers' split-K"},
    TritonRow{"kernel_unified_attention", Role::attention, kF, Confidence::certain, "vLLM's Triton backend"},
    TritonRow{"kernel_unified_attention_2d", Role::attention, kF, Confidence::certain, "vLLM's Triton backend"},
    TritonRow{"kernel_unified_attention_3d", Role::attention, kF, Confidence::certain, "vLLM's Triton backend"},
    TritonRow{"kernel_paged_attention_2d", Role::attention, kF, Confidence::certain, "vLLM's Triton backend"},
    TritonRow{"reduce_segments", Role::helper, kF, Confidence::likely, "vLLM's Triton backend"},
    TritonRow{"_fwd_grouped_kernel_stage1", Role::attention, kF, Confidence::likely,
              "SGLang's or vLLM's decode in Triton"},
    TritonRow{"_fwd_kernel_stage1", Role::attention, kF, Confidence::likely, "SGLang's or vLLM's decode in Triton"},
    TritonRow{"_fwd_kernel_stage2", Role::helper, kF, Confidence::likely, "SGLang's or vLLM's decode in Triton"},
    TritonRow{"_decode_att_m_fwd", Role::attention, kF, Confidence::likely, "SGLang's decode in Triton"},
    TritonRow{"_decode_grouped_att_m_fwd", Role::attention, kF, Confidence::likely, "SGLang's decode in Triton"},
    TritonRow{"parallel_attn_fwd_kernel", Role::attention, kF, Confidence::likely, "flash-linear-attention"},
    TritonRow{"parallel_attn_bwd_kernel_dkv", Role::attention, kB, Confidence::likely, "flash-linear-attention"},
    TritonRow{"parallel_attn_bwd_kernel_dq", Role::attention, kB, Confidence::likely, "flash-linear-attention"},
    TritonRow{"parallel_path_fwd_kernel", Role::attention, kF, Confidence::likely, "flash-linear-attention (PaTH)"},
    TritonRow{"parallel_path_bwd_dkv_kernel", Role::attention, kB, Confidence::likely, "flash-linear-attention (PaTH)"},
    TritonRow{"parallel_path_bwd_dq_kernel", Role::attention, kB, Confidence::likely, "flash-linear-attention (PaTH)"},
    TritonRow{"la_persistent", Role::attention, kF, Confidence::likely, "AITER's lean attention"},
    TritonRow{"la_persistent_paged", Role::attention, kF, Confidence::likely, "AITER's lean attention"},
    TritonRow{"pod_persistent", Role::attention, kF, Confidence::likely, "AITER's attention of prefill and decode"},
    TritonRow{"mha_forward_kernel", Role::attention, kF, Confidence::unsure, "JAX's Pallas, or a user's kernel"},
    TritonRow{"mha_backward_kernel", Role::attention, kB, Confidence::unsure, "JAX's Pallas, or a user's kernel"},
    TritonRow{"mha_forward", Role::attention, kF, Confidence::likely, "JAX's Pallas"},
    TritonRow{"mha_backward", Role::attention, kB, Confidence::likely, "JAX's Pallas"},
    TritonRow{"mha_preprocess_backward", Role::helper, kB, Confidence::likely, "JAX's Pallas"},
    TritonRow{"merge_attn_states_kernel", Role::helper, kF, Confidence::likely, "vLLM, SGLang"},
};

constexpr std::array kAotriton{
    TritonRow{"attn_fwd", Role::attention, kF, Confidence::likely, ""},
    TritonRow{"bwd_kernel_dk_dv", Role::attention, kB, Confidence::likely, ""},
    TritonRow{"bwd_kernel_dq", Role::attention, kB, Confidence::likely, ""},
    TritonRow{"bwd_kernel_fuse", Role::attention, kB, Confidence::likely, ""},
    TritonRow{"bwd_preprocess", Role::helper, kB, Confidence::likely, ""},
    TritonRow{"bwd_preprocess_varlen", Role::helper, kB, Confidence::likely, ""},
};

template <std::size_t N>
MaybeReading read_row(Family family, const std::array<TritonRow, N>& rows, std::string_view name) {
    const std::string_view function = function_of(name);
    for (const TritonRow& row : rows) {
        if (function != row.name) continue;
        NameReading reading = attention(family, row.confidence, row.name, row.pass);
        reading.role = row.role;
        reading.library = row.library;
        if (row.confidence == Confidence::unsure)
            reading.evidence.emplace_back("other libraries use that name for other kernels");
        return reading;
    }
    return std::nullopt;
}

/// A row whose name begins the function's, as in "_fwd_kernel_stage2_asm" or "_fwd_grouped_kernel_stage1_part2".
const TritonRow* row_that_begins(std::string_view function, bool common) {
    for (const TritonRow& row : kTriton) {
        const std::string_view known = row.name;
        const bool begins_so = function.size() > known.size() && function.substr(0, known.size()) == known;
        if (begins_so && function[known.size()] == '_' && common == (row.confidence == Confidence::unsure)) return &row;
    }
    return nullptr;
}

MaybeReading read_variant(std::string_view name) {
    const std::string_view function = function_of(name);
    const TritonRow* row = row_that_begins(function, false);
    if (row == nullptr) {  // "_fwd_kernel_int8" is attention, "_fwd_kernel_scatter" may be anything
        row = row_that_begins(function, true);
        if (row == nullptr || contains(function, "softmax") || read_plain_kernel(function) || read_elsewhere(function))
            return std::nullopt;
    }
    NameReading reading = attention(Family::triton, Confidence::unsure, row->name, row->pass);
    const WordReading words = read_words(words_of(function));
    reading.role = words.role == Role::helper || contains(function, "stage2") ? Role::helper : row->role;
    if (words.pass != KernelPass::unknown) reading.pass = words.pass;
    reading.evidence.emplace_back("the name is longer: a variant of that kernel, or another kernel");
    return reading;
}

/// Reads AITER's assembly kernels, and the reductions beside them, which have no namespace.
MaybeReading read_aiter(std::string_view name) {
    const bool qualified =
        contains(name, "aiter::") && contains_any(name, {"fmha", "mla_", "pa_", "attn", "attention"});
    const bool reduces = contains_any(name, {"kn_mla_reduce", "mla_reduce_v1"});
    const bool assembly =  // a tool dropped the namespace
        begins_any(name, {"fmha_fwd_hd", "fmha_bwd_hd", "fmha_bwd_dq_shuffle"});
    const bool named = begins_any(name, {"kn_"}) && contains_any(name, {"mla_", "pa_", "fmha_"});  // "kn_get_mla_..."
    const bool by_widths =  // "mla_a8w8_qh32_qseqlen1_gqaratio32_ps"
        begins_any(name, {"mla_a8w8_qh", "mla_a16w8_qh", "mla_a16w16_qh"});
    const bool by_hipkittens = begins_any(name, {"mi35x_v", "mi3xx_v"}) && contains(name, "_fwd_decode_");
    const bool decodes = contains(name, "mla_dec_stage1") || contains(name, "mla_pfl_") || by_widths || by_hipkittens;
    if (!qualified && !reduces && !decodes && !named && !assembly) return std::nullopt;
    NameReading reading = attention(
        Family::aiter, qualified ? Confidence::certain : Confidence::likely,
        qualified  ? "aiter::"
        : reduces  ? "mla_reduce"
        : named    ? "kn_...mla_ / kn_...pa_ / kn_...fmha_"
        : assembly ? "fmha_fwd_hd / fmha_bwd_hd / fmha_bwd_dq_shuffle"
                   : "mla_dec_stage1 / mla_pfl / mla_a8w8_qh / mla_a16w8_qh / mla_a16w16_qh / mi35x_v / mi3xx_v");
    reading.library = "AITER";
    if (by_widths || by_hipkittens) {
        reading.pass = KernelPass::forward;
        if (by_hipkittens) reading.features.emplace_back("latent attention");
        if (by_hipkittens && contains(name, "fp8")) reading.exactness = Exactness::unknown;
    }
    if (named && !reduces && !qualified && !begins_any(name, {"kn_mi", "kn_mla_", "kn_get_mla_"}))
        reading.confidence = Confidence::unsure;  // the evidence is words, in any order
    if (reduces || contains_any(name, {"_odo_", "dq_convert", "dq_shuffle", "metadata"})) reading.role = Role::helper;
    if (contains(name, "bwd")) reading.pass = KernelPass::backward;
    if (contains(name, "causal")) reading.mask = "causal";
    if (contains(name, "mla")) reading.features.emplace_back("latent attention");
    if (contains(name, "a8w8")) reading.dtype = "8-bit";
    reading.head_dim = number_after(name, "_hd").value_or(0);
    if (const std::size_t at = name.find("_hd"); at != std::string_view::npos)
        reading.head_dim_v = number_after(name.substr(at + 3), "_hd").value_or(0);
    reading.amd = true;
    return reading;
}

}  // namespace

MaybeReading read_flex(std::string_view name) {
    if (!contains_any(name, {"flex_attention", "flex_decoding"})) return std::nullopt;
    const bool backward = contains(name, "flex_attention_backward");
    NameReading reading = attention(Family::flex, Confidence::certain, "flex_attention",
                                    backward ? KernelPass::backward : KernelPass::forward);
    reading.library = "PyTorch's FlexAttention, compiled by Inductor and Triton";
    reading.mask = "block mask";
    // Templates compute attention; the pointwise kernels that carry its name only prepare or sum.
    if (contains_any(name, {"triton_poi_", "triton_red_", "triton_per_", "triton_for_"})) {
        reading.role = Role::helper;
        reading.evidence.emplace_back("a pointwise kernel beside the template triton_tem_...");
    } else if (!contains(name, "triton_")) {
        reading.confidence = Confidence::likely;
    }
    if (contains(name, "flex_decoding")) reading.features.emplace_back("decode");
    return reading;
}

MaybeReading read_triton(std::string_view name) {
    MaybeReading reading = read_row(Family::triton, kTriton, name);
    if (reading && contains_any(name, {"2d", "3d"}) && contains(name, "kernel_"))
        reading->features.emplace_back("paged keys");
    if (reading || (reading = read_variant(name))) return reading;
    const std::string_view function = function_of(name);
    const bool written_in_triton = begins_any(
        function, {"triton_flash_att", "_triton_flash_att", "kernel_unified_attention", "_kernel_unified_attention",
                   "gluon_", "unified_attention_2d", "unified_attention_3d", "parallel_nsa_", "parallel_attn_"});
    // An underscore begins private Python functions, and hardly ever a C++ kernel.
    if (contains(function, "hstu")) return std::nullopt;  // not a softmax: read_other_attention() reads it
    const bool of_python = function.size() == name.size() && !name.empty() && name[0] == '_';
    // used by flash-linear-attention and its descendants
    const bool of_linear_attention = begins_any(function, {"parallel_"});
    if (!written_in_triton && !of_python && !of_linear_attention) return std::nullopt;
    const WordReading words = read_words(words_of(function));
    if (words.role != Role::attention && words.role != Role::helper) return std::nullopt;
    reading =
        attention(Family::triton, written_in_triton ? Confidence::likely : Confidence::unsure, words.found, words.pass);
    // stage 2 combines the parts of split keys
    reading->role = contains(function, "stage2") ? Role::helper : words.role;
    if (written_in_triton && words.pass == KernelPass::unknown) reading->pass = KernelPass::forward;
    if (of_python && !written_in_triton)
        reading->evidence.emplace_back("it is named like a Python function, as Triton kernels are");
    if (contains_any(function, {"sparse", "gather", "dequant"})) reading->exactness = Exactness::unknown;
    return reading;
}

MaybeReading read_amd(std::string_view name) {
    const bool ck = contains(name, "ck_tile") && contains_any(name, {"Fmha", "AttentionKernel"});
    const bool of_transformer_engine = contains(name, "ck_fused_attn::");
    const bool older_ck = contains_any(name, {"DeviceGroupedMultiheadAttention", "kernel_grouped_multihead_attention",
                                              "efficient_attention_forward_decoder"});
    if (of_transformer_engine) {
        NameReading reading = attention(Family::ck, Confidence::likely, "ck_fused_attn::");
        reading.library = "Transformer Engine on AMD, beside Composable Kernel";
        reading.role = Role::helper;
        if (contains_any(name, {"dk", "dq", "bwd"})) reading.pass = KernelPass::backward;
        reading.amd = true;
        return reading;
    }
    if (ck || older_ck) {
        NameReading reading =
            attention(Family::ck, Confidence::certain,
                      "ck_tile...Fmha / ck_tile...AttentionKernel / DeviceGroupedMultiheadAttention / "
                      "kernel_grouped_multihead_attention / efficient_attention_forward_decoder");
        reading.library = "Composable Kernel (flash-attn and xFormers on AMD)";
        if (contains(name, "FmhaBwd")) reading.pass = KernelPass::backward;
        if (contains(name, "PagedKV")) reading.features.emplace_back("paged keys");
        if (contains_any(name, {"OGradDot", "BwdConvert", "ConvertQGrad", "SplitKVCombine", "AppendKV"}))
            reading.role = Role::helper;
        if (contains(name, "SageAttn")) {
            reading.family = Family::sage;
            reading.exactness = Exactness::not_exact;
            reading.algorithm = "quantised attention: Q and K are rounded to 8 or 4 bits";
        }
        reading.amd = true;
        return reading;
    }
    // CK's generator names its instances like this: "fmha_fwd_d128_bf16_batch_b128x128x32x128x32x128_..._nbias".
    const bool helper =
        begins_any(name, {"fmha_bwd_dot_do_o_d", "fmha_bwd_convert_dq_d", "fmha_fwd_splitkv_combine_d"});
    const bool instance = helper || (begins_any(name, {"fmha_fwd_d", "fmha_bwd_d", "fmha_fwd_splitkv_d"}) &&
                                     contains_any(name, {"_batch_b", "_group_b"}));
    if (instance) {
        NameReading reading = attention(Family::ck, Confidence::certain, "fmha_fwd_ / fmha_bwd_");
        if (helper) reading.role = Role::helper;
        reading.library = "Composable Kernel (flash-attn and xFormers on AMD)";
        if (begins_any(name, {"fmha_bwd_d", "fmha_bwd_c"})) reading.pass = KernelPass::backward;
        reading.head_dim = number_after(name, "_d").value_or(0);
        reading.amd = true;
        return reading;
    }
    if (MaybeReading reading = read_aiter(name)) return reading;
    MaybeReading reading = read_row(Family::aotriton, kAotriton, name);
    if (reading) {
        reading->library = "AOTriton, PyTorch's attention on AMD";
        reading->amd = true;
    }
    return reading;
}

}  // namespace tessera::diagnose
