// SPDX-License-Identifier: Apache-2.0
//
// Reads kernels of single libraries: the memory-efficient kernel of xFormers and PyTorch, FlashInfer, FlashMLA,
// SageAttention, tessera.
#include "diagnose/name_readers.hpp"

namespace tessera::diagnose {
namespace {

/// Reads "KernelTraits<mask, rows of Q, 16x16 MMA tiles of Q, of K, of head_dim, of head_dim_v, warps of Q, of K, ...".
void set_flashinfer_traits(NameReading& reading, std::string_view name) {
    const auto traits = template_arguments(name, "KernelTraits");
    if (!traits || traits->size() < 8) return;
    std::vector<int> numbers;
    for (std::size_t i = 0; i < 8; ++i) {
        const auto value = number((*traits)[i]);
        if (!value || *value < 0 || *value > 4096) return;
        numbers.push_back(*value);
    }
    const char* masks[] = {"none", "causal", "custom"};
    if (numbers[0] < 3) reading.mask = masks[numbers[0]];
    reading.tile_q = numbers[1];
    reading.tile_kv = 16 * numbers[3] * numbers[7];
    reading.head_dim = 16 * numbers[4];
    reading.head_dim_v = 16 * numbers[5];
    const auto variant = template_arguments(name, "DefaultAttention");
    if (!variant || variant->size() < 4) return;
    if (boolean((*variant)[1]) == true) reading.mask = "window";
    if (boolean((*variant)[2]) == true) reading.features.emplace_back("softcap");
    if (boolean((*variant)[3]) == true) reading.features.emplace_back("ALiBi");
}

}  // namespace

MaybeReading read_mem_efficient(std::string_view name) {
    const bool backward =
        contains_any(name, {"fmha_cutlassB", "attention_kernel_backward_batched", "AttentionBackwardKernel<"});
    const bool forward = contains_any(
        name, {"fmha_cutlassF", "attention_kernel_batched", "AttentionKernel<cutlass", "AttentionKernel<float"});
    const bool named = contains(name, "PyTorchMemEffAttention");
    if (!backward && !forward && !named) return std::nullopt;
    NameReading reading = attention(Family::mem_efficient, Confidence::certain,
                                    backward  ? "fmha_cutlassB / attention_kernel_backward_batched / "
                                                "AttentionBackwardKernel"
                                    : forward ? "fmha_cutlassF / attention_kernel_batched / AttentionKernel"
                                              : "PyTorchMemEffAttention",
                                    backward ? KernelPass::backward : KernelPass::forward);
    if (!backward && !forward) reading.pass = KernelPass::unknown;
    reading.library = named ? "PyTorch's own copy" : contains(name, "(") ? "xFormers" : "PyTorch or xFormers";
    reading.arch = number_after(name, "_sm").value_or(number_after(name, "arch::Sm").value_or(0));
    if (const auto tile = pair_after(name, "aligned_")) {
        reading.tile_q = tile->first;
        reading.tile_kv = tile->second;
    }
    if (reading.arch != 0) {
        reading.evidence.push_back("_sm" + std::to_string(reading.arch) + ": its newest code is for sm80, on any GPU");
    }
    if (contains(name, "cutlassF_f32") || contains(name, "cutlassB_f32")) reading.dtype = "fp32";
    if (contains(name, "_dropout")) reading.features.emplace_back("dropout");
    if (const auto largest = number_after(name, "_k")) {
        if (*largest < 1024) reading.features.push_back("head_dim up to " + std::to_string(*largest));
    }
    return reading;
}

MaybeReading read_flashinfer(std::string_view name) {
    const bool prefill = contains(name, "PrefillWith") && contains(name, "KV");
    const bool decode = contains_any(name, {"DecodeWithPagedKV", "SingleDecodeWithKVCache", "DecodeWithKVCache"});
    const bool mla = contains_any(name, {"BatchMLAPage", "BatchDecodeWithPagedKVCacheKernelMLA", "MLADecode"});
    const bool pod = contains(name, "PODWithKVCache");
    const bool batch = contains_any(name, {"BlockBatchPagedAttention", "BatchAttentionPersistent"});
    const bool merge = contains_any(name, {"MergeStates", "MergeStateKernel", "MergeStateInPlace"});
    const std::string lower = lower_case(name);
    const bool dsl = contains(lower, "kernel_cutlass") && contains(lower, "flashinfer") &&
                     contains_any(lower, {"attention", "attn", "fmha", "prefill", "decode", "mla"});
    const bool qualified = contains(name, "flashinfer");
    const bool sparse = qualified && contains(lower, "sparse_prefill");
    if (!prefill && !decode && !mla && !pod && !batch && !merge && !dsl && !sparse) return std::nullopt;
    NameReading reading = attention(Family::flashinfer, qualified ? Confidence::certain : Confidence::likely,
                                    prefill  ? "PrefillWith...KVCacheKernel"
                                    : decode ? "DecodeWith...KVCacheKernel"
                                    : mla    ? "BatchMLAPage...Kernel"
                                    : merge  ? "MergeState"
                                             : "PODWithKVCache / BlockBatchPagedAttention / BatchAttentionPersistent / "
                                               "flashinfer");
    reading.library = "FlashInfer";
    if (merge) reading.role = Role::helper;
    if (decode) reading.algorithm = "online softmax over a paged cache, for one query";
    if (decode) reading.features.emplace_back("decode");
    if (contains(name, "PagedKV")) reading.features.emplace_back("paged keys");
    if (contains(name, "Ragged")) reading.features.emplace_back("varlen");
    if (mla) reading.features.emplace_back("latent attention");
    if (sparse) {
        reading.exactness = Exactness::unknown;
        reading.features.emplace_back("chosen keys only");
    }
    const bool hopper_name = prefill && !contains_any(name, {"SinglePrefill", "BatchPrefill"});
    if (hopper_name || contains(name, "Hopper")) {
        reading.algorithm = "FlashAttention-3";
        reading.arch = 90;
        reading.evidence.emplace_back(
            "FlashInfer's Hopper kernels have no Single or Batch in their names: schedule of FlashAttention-3");
    } else if (prefill) {
        reading.arch = 80;
        reading.evidence.emplace_back("Single/BatchPrefill: FlashInfer's schedule of FlashAttention-2, Ampere's code");
    }
    if (dsl) {
        reading.arch = number_after(lower, "forwardsm").value_or(number_after(lower, "_sm").value_or(0));
        if (contains_any(lower, {"bwd", "backward"})) reading.pass = KernelPass::backward;
        if (contains_any(lower, {"blocksparse", "sparsesm"})) {
            reading.exactness = contains(lower, "blocksparse") ? Exactness::not_exact : Exactness::unknown;
            reading.features.emplace_back("block-sparse");
        }
    }
    set_flashinfer_traits(reading, name);
    return reading;
}

MaybeReading read_flashmla(std::string_view name) {
    const bool dense = contains(name, "splitkv_mla");  // sparse ones too: "splitkv_mla_fp8_sparse"
    const bool sparse = begins_any(name, {"sparse_attn_fwd_kernel"});
    const bool helper =
        contains_any(name, {"mla_combine_kernel", "get_mla_metadata", "flash_fwd_mla_combine", "mla_metadata_kernel"});
    if (begins_any(name, {"kn_"})) return std::nullopt;  // AITER's prefix
    const bool named = contains_any(name, {"flash_mla", "FlashMLA", "flashmla", "flash_fwd_mla", "flash_bwd_mla"});
    if (!dense && !sparse && !helper && !named) return std::nullopt;
    NameReading reading =
        attention(Family::flashmla, Confidence::certain,
                  dense    ? "splitkv_mla"
                  : sparse ? "sparse_attn_fwd_kernel"
                           : "flash_mla / FlashMLA / flash_fwd_mla / flash_bwd_mla / mla_combine_kernel / "
                             "get_mla_metadata / mla_metadata_kernel");
    if (!dense && !sparse) reading.confidence = Confidence::likely;
    reading.library = "FlashMLA, or a copy of it (vLLM, SGLang)";
    if (helper) reading.role = Role::helper;
    reading.features.emplace_back("latent attention");
    if (contains(name, "sparse")) {
        reading.features.emplace_back("chosen keys only");
        reading.exactness = Exactness::unknown;
        reading.evidence.emplace_back("sparse: exact over the keys that the model chose, not over all");
    }
    if (contains(name, "fp8")) reading.features.emplace_back("8-bit cache");
    if (dense) reading.features.emplace_back("keys split");
    reading.arch = number_after(name, "sm").value_or(0);
    for (const char* traits_name : {"Flash_fwd_kernel_traits_mla", "Flash_fwd_mla_kernel_traits"}) {
        const auto traits = template_arguments(name, traits_name);
        if (!traits || traits->size() < 3) continue;
        reading.head_dim = number((*traits)[0]).value_or(0);
        reading.tile_q = number((*traits)[1]).value_or(0);
        reading.tile_kv = number((*traits)[2]).value_or(0);
    }
    return reading;
}

MaybeReading read_sage_helper(std::string_view name) {
    const bool own_names = begins_any(
        name, {"QuantInt8Kernel", "QuantInt4Kernel", "MeanScaleKernel", "TransposePadPermuteKernel", "SubMeanKernel",
               "quant_per_block_int8_kernel", "quant_query_per_thread_int", "quant_key_per_thread_int"});
    if (!own_names && !begins_any(name, {"sage_quant", "_sage_quant"})) return std::nullopt;
    NameReading reading = attention(Family::sage, Confidence::likely,
                                    "quant / MeanScaleKernel / TransposePadPermuteKernel / SubMeanKernel");
    reading.role = Role::helper;
    reading.library = "SageAttention";
    reading.dtype = "int8";
    return reading;
}

MaybeReading read_sage(std::string_view name) {
    const std::string lower = lower_case(name);
    if (!begins_any(lower, {"qk_int_sv_f", "qk_int8_sv_f", "qk_int4_sv_f", "qk_int8_pv_f", "sage_fwd", "_sage_fwd"}) &&
        !contains_any(lower, {"sageattn", "sage_attn", "sageattention"}))
        return std::nullopt;
    NameReading reading = attention(Family::sage, Confidence::certain, "qk_int / sage");
    reading.library = "SageAttention";
    reading.dtype = contains(lower, "int4") ? "int4" : "int8";
    reading.arch = number_after(lower, "_sm").value_or(0);
    if (contains(lower, "sv_f8")) reading.features.emplace_back("P and V in fp8");
    if (contains_any(lower, {"block_sparse", "sparge"})) reading.features.emplace_back("block-sparse");
    const auto arguments = template_arguments(name, "qk_int_sv_f8_attn_kernel");
    const auto older = template_arguments(name, "qk_int_sv_f16_attn_kernel");
    if (const auto& sizes = arguments ? arguments : older; sizes && sizes->size() > 4) {
        reading.tile_q = number((*sizes)[0]).value_or(0);
        reading.tile_kv = number((*sizes)[1]).value_or(0);
        reading.head_dim = number((*sizes)[4]).value_or(0);
    }
    return reading;
}

MaybeReading read_tessera(std::string_view name) {
    if (!contains(name, "tessera::")) return std::nullopt;
    NameReading reading = attention(Family::tessera, Confidence::certain, "tessera::");
    reading.library = "tessera";
    const std::pair<const char*, const char*> schedules[] = {
        {"::standard::", "standard: the N x N matrix goes through memory"},
        {"::fa1::", "FlashAttention-1"},
        {"::fa2::", "FlashAttention-2"},
        {"::fa3::", "FlashAttention-3"},
    };
    for (const auto& [part, algorithm] : schedules) {
        if (contains(name, part)) reading.algorithm = algorithm;
    }
    const bool backward_of_standard =
        contains(name, "::standard::") && !contains_any(name, {"::scores_", "::softmax_", "::values_"});
    if (backward_of_standard || contains_any(name, {"backward", "::gradient::"})) reading.pass = KernelPass::backward;
    // One kernel of a call counts as the attention. All others prepare it or finish it.
    const bool is_attention =
        contains_any(name, {"::forward_kernel", "::forward_fp32_kernel", "::backward_kernel", "::backward_fp32_kernel",
                            "::backward_parts_kernel", "::scores_kernel", "::row_gradient_kernel", "::split_kernel",
                            "::block_kernel"});
    if (!is_attention) reading.role = Role::helper;
    if (contains(name, "::append_rows::")) reading.role = Role::look_alike;
    if (contains(name, "::fa3::")) reading.arch = 90;
    else if (contains(name, "::cuda::")) reading.features.emplace_back("compiled for sm80 and sm90");
    reading.head_dim = number_after(name, "HeadDim").value_or(0);
    if (reading.head_dim != 0)
        reading.head_dim_v = number_after(name, "HeadDim" + std::to_string(reading.head_dim) + "V").value_or(0);
    return reading;
}

}  // namespace tessera::diagnose
