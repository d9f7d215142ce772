// SPDX-License-Identifier: Apache-2.0
//
// Reads NVIDIA's own kernels: cuDNN, TensorRT(-LLM), and attention among CUTLASS's examples.
#include <algorithm>

#include "diagnose/name_readers.hpp"
#include "diagnose/name_words.hpp"

namespace tessera::diagnose {
namespace {

std::vector<std::string> words(std::string_view name) {
    std::vector<std::string> result(1);
    for (const char c : name) {
        if (c == '_') result.emplace_back();
        else result.back() += c;
    }
    return result;
}

std::string trtllm_mask(std::string_view name) {
    if (contains_any(name, {"SlidingOrChunked", "_sliding"})) return "window";
    if (contains_any(name, {"Causal", "_causal"})) return "causal";
    if (contains_any(name, {"Custom", "_custom_mask"})) return "custom";
    if (contains(name, "Dense")) return "none";
    return "";
}

/// Reads "fmha_v2_flash_attention_fp16_fp32_64_32_S_q_k_v_192x128_causal_sm86_kernel": the tile stands before S, the
/// head dims are the first numbers after it.
void set_fmha_v2(NameReading& reading, std::string_view name) {
    const std::vector<std::string> parts = words(name);
    const auto s = std::find(parts.begin(), parts.end(), "S");
    if (s == parts.end() || s - parts.begin() < 3) return;
    reading.tile_q = number(*(s - 2)).value_or(0);
    reading.tile_kv = number(*(s - 1)).value_or(0);
    for (auto part = s + 1; part != parts.end(); ++part) {
        if (const auto both = pair_after(*part, "")) {
            reading.head_dim = both->first;
            reading.head_dim_v = both->second;
            return;
        }
        if (const auto one = number(*part)) {
            reading.head_dim = *one;
            return;
        }
    }
}

}  // namespace

MaybeReading read_cudnn(std::string_view name) {
    const std::string lower = lower_case(name);
    if (contains(name, "transformer_engine::fused_attn::")) {
        NameReading reading = attention(Family::cudnn, Confidence::likely, "transformer_engine::fused_attn::");
        reading.role = Role::helper;
        reading.library = "Transformer Engine, beside cuDNN";
        return reading;
    }
    // A tool that drops namespaces and beginnings leaves these pieces.
    const bool short_name = contains(lower, "sdpa_sm") && contains_any(lower, {"_flash_fprop", "_flash_bprop"});
    const bool short_helper = begins_any(lower, {"compute_dot_do_o", "convert_dq_to_16bits", "fmha_reduce_head"});
    if (!contains(lower, "cudnn") && !short_name && !short_helper) return std::nullopt;
    const bool backward_helper = contains_any(lower, {"dot_do_o", "convert_dq", "fmha_reduce_head"});
    if (backward_helper || contains(lower, "lean_reduction")) {  // lean_reduction combines the parts of split keys
        NameReading reading = attention(Family::cudnn, Confidence::likely,
                                        backward_helper ? "dot_do_o / convert_dq / fmha_reduce_head" : "lean_reduction",
                                        backward_helper ? KernelPass::backward : KernelPass::forward);
        reading.role = Role::helper;
        reading.library = "cuDNN";
        return reading;
    }
    if (!contains_any(lower, {"sdpa", "flash_fprop", "flash_bprop", "_mha_", "fmha", "attention"})) return std::nullopt;
    const bool generated = contains(lower, "cudnn_generated");
    NameReading reading = attention(Family::cudnn, generated ? Confidence::certain : Confidence::likely,
                                    generated ? "cudnn_generated" : "cudnn...sdpa / sdpa_sm / cudnn");
    reading.pass = contains_any(lower, {"bprop", "backward", "_bwd"}) ? KernelPass::backward : KernelPass::forward;
    reading.library = "cuDNN";
    reading.arch = number_after(lower, "_sm").value_or(0);
    if (contains(lower, "bf16")) reading.dtype = "bf16";
    else if (contains(lower, "_f16")) reading.dtype = "16-bit";
    else if (contains_any(lower, {"fp8", "e4m3", "e5m2"})) reading.dtype = "fp8";
    // "knob_7_64x128x256_4x1x1" gives the tile's rows of Q and of K, and the rounded head_dim.
    const std::size_t knob = lower.find("knob_");
    if (knob == std::string::npos) return reading;
    const std::string_view rest = std::string_view(lower).substr(knob);
    if (const auto tile = pair_after(rest, "_")) {
        reading.tile_q = tile->first;
        reading.tile_kv = tile->second;
        const std::string both = std::to_string(tile->first) + "x" + std::to_string(tile->second) + "x";
        const int head_dim = number_after(rest, both).value_or(0);
        if (reading.pass == KernelPass::forward && reading.arch <= 90 && head_dim > 0)
            reading.features.push_back("head_dim up to " + std::to_string(head_dim));
    }
    return reading;
}

MaybeReading read_trtllm_gen(std::string_view name) {
    if (contains(name, "fmhaReductionKernel")) {
        NameReading reading = attention(Family::trtllm, Confidence::likely, "fmhaReductionKernel");
        reading.role = Role::helper;
        return reading;
    }
    const std::size_t at = std::min(name.find("fmhaSm"), name.find("FmhaSm"));
    if (at == std::string_view::npos || !number_after(name.substr(at), "mhaSm")) return std::nullopt;
    const bool whole = contains(name, "Kernel_Q");  // else its author or a table left out the middle
    NameReading reading =
        attention(Family::trtllm, Confidence::certain, whole ? "fmhaSm...Kernel_Q" : "fmhaSm / FmhaSm");
    if (!whole) reading.exactness = Exactness::unknown;
    const std::string_view text = name.substr(at);
    reading.library = "TensorRT-LLM's generated kernels (also in FlashInfer, vLLM, SGLang)";
    reading.arch = number_after(text, "mhaSm").value_or(0);
    reading.head_dim = number_after(text, "HQk").value_or(0);
    if (reading.head_dim != 0) reading.head_dim_v = number_after(text, "HV").value_or(0);
    else reading.head_dim = number_after(text, "H").value_or(0);
    reading.tile_q = number_after(text, "SeqQ").value_or(0);
    if (reading.tile_q != 0) reading.tile_kv = number_after(text, "Kv").value_or(0);
    reading.mask = trtllm_mask(text);
    if (contains(text, "PagedKv")) reading.features.emplace_back("paged keys");
    if (contains(text, "VarSeq")) reading.features.emplace_back("varlen");
    if (contains(text, "MultiCtasKv")) reading.features.emplace_back("keys split");
    if (contains(text, "ForGen")) reading.features.emplace_back("decode");
    if (contains(text, "Context")) reading.features.emplace_back("prefill");
    if (contains(text, "KvE2m1")) reading.features.emplace_back("4-bit cache");
    if (contains(text, "QkvE4m3") || contains(text, "_QE4m3")) reading.dtype = "fp8";
    return reading;
}

MaybeReading read_tensorrt(std::string_view name) {
    const std::string lower = lower_case(name);
    const std::string_view function = function_of(lower);
    const bool named_xqa = begins_any(lower, {"kernel_mha_xqa_"});  // XQA that a server built under a name of its own
    if (contains_any(lower, {"masked_multihead_attention_kernel", "xqa_kernel", "mmha::"}) ||
        function == "kernel_mha" || function == "kernel_mha_impl" || named_xqa) {
        const bool sure = !contains(lower, "kernel_mha") || named_xqa;
        NameReading reading =
            attention(Family::trtllm, sure ? Confidence::likely : Confidence::unsure,
                      sure ? "masked_multihead_attention_kernel / xqa_kernel / kernel_mha / mmha::" : "kernel_mha");
        reading.library = "TensorRT-LLM, or FasterTransformer before it";
        reading.features.emplace_back("decode");
        // The arguments are <type, [type of the cache, ...] head_dim, ...>.
        const auto arguments = template_arguments(name, "masked_multihead_attention_kernel");
        for (const std::string& argument : arguments.value_or(std::vector<std::string>{})) {
            if (reading.head_dim == 0) reading.head_dim = number(argument).value_or(0);
        }
        if (named_xqa) reading.head_dim = number_after(lower, "_h").value_or(0);
        return reading;
    }
    if (!contains_any(lower, {"fmha_v2_", "fmha_mhca_", "_gemm_mha_v2"})) return std::nullopt;
    NameReading reading = attention(Family::trtllm, Confidence::certain, "fmha_v2_ / fmha_mhca_ / _gemm_mha_v2");
    reading.library = "TensorRT, TensorRT-LLM";
    const bool tiled = contains(lower, "flash_attention");
    if (!tiled) reading.algorithm = "fused, a whole row of keys at a time";
    reading.arch = number_after(lower, "_sm").value_or(0);
    reading.mask = trtllm_mask(name);
    set_fmha_v2(reading, name);
    if (contains(lower, "paged_kv")) reading.features.emplace_back("paged keys");
    if (contains(lower, "_tma_ws")) reading.features.emplace_back("warp-specialised");
    if (contains(lower, "e4m3")) reading.dtype = "fp8";
    if (contains(lower, "_int8_")) reading.dtype = "int8";
    return reading;
}

MaybeReading read_cutlass_fmha(std::string_view name) {
    const bool example =
        contains_any(name, {"cutlass::fmha::", "Sm100Fmha", "Sm100Mla", "BlackwellFusedMultiHeadAttention",
                            "FmhaKernelTmaWarpSpecialized", "FmhaKernelTma"});
    if (!example) return std::nullopt;
    NameReading reading = attention(Family::cutlass_fmha, Confidence::certain,
                                    "cutlass::fmha:: / Sm100Fmha / Sm100Mla / BlackwellFusedMultiHeadAttention / "
                                    "FmhaKernelTma");
    if (contains(name, "Blackwell")) reading.confidence = Confidence::likely;
    reading.library = "from an example of CUTLASS (also in vLLM, SGLang, xFormers)";
    const std::string lower = lower_case(name);
    if (contains_any(lower, {"bwd", "backward", "sum_odo", "sumodo", "convert"})) reading.pass = KernelPass::backward;
    if (contains_any(lower,
                     {"sum_odo", "sumodo", "kernelconvert", "fmhakernelbwdconvert", "reduction", "reducesplitk"}))
        reading.role = Role::helper;
    if (contains_any(name, {"Sm100", "Blackwell"})) reading.arch = 100;
    else if (contains_any(name, {"Sm90", "TmaWarpSpecialized"})) reading.arch = 90;
    if (contains_any(name, {"Mla", "MLA"})) reading.features.emplace_back("latent attention");
    if (contains(name, "Sage")) {  // Intel's kernels derive from CUTLASS's
        reading.family = Family::sage;
        reading.library = "SageAttention, made of CUTLASS's example";
        reading.algorithm = "quantised attention: Q and K are rounded to 8 or 4 bits";
        reading.exactness = Exactness::not_exact;
    }
    if (contains(name, "CausalMask")) reading.mask = "causal";
    else if (contains(name, "NoMask") || contains(name, "ResidualMask")) reading.mask = "none";
    return reading;
}

}  // namespace tessera::diagnose
