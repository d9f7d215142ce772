// SPDX-License-Identifier: Apache-2.0
//
// Reads kernels that compute no attention: those with misleading names, and the plain kernels that make up an attention
// by hand.
#include <fmt/format.h>

#include "diagnose/name_readers.hpp"
#include "diagnose/name_words.hpp"

namespace tessera::diagnose {
namespace {

struct LookAlike {
    std::initializer_list<std::string_view> words;
    const char* what;
};

const LookAlike kLookAlikes[] = {
    {{"reshape_and_cache",
      "concat_and_cache",
      "and_cache",
      "set_mla_kv_buffer",
      "set_kv_buffer",
      "appendpagedkvcache",
      "append_paged_kv",
      "store_kvcache",
      "store_kv_cache",
      "copy_blocks",
      "write_kv",
      "gather_cache",
      "gather_and_maybe_dequant_cache",
      "cp_gather_cache",
      "kvcacheappend",
      "update_kv_cache",
      "fused_kv_cache",
      "qkv_kv_cache",
      "gather_upconvert",
      "destindex"},
     "writes or reads the cache of keys and values, and computes no attention"},
    {{"rotary", "rope_", "_rope", "ropequantize", "mlarope", "rotaryposid", "kn_entry_1c_", "kn_entry_2c_"},
     "rotates positions into Q and K, and computes no attention"},
    {{"qknorm", "qk_norm", "qk_rmsnorm", "qkv_norm", "qkv_rmsnorm", "flashinfernorm", "flashinfer::norm",
      "flash_attn::layer_norm", "attn_norm", "attention_norm"},
     "normalises, and computes no attention"},
    {{"trtllm_allreduce", "allreduce_fusion", "helixalltoall"}, "sends data between GPUs, and computes no attention"},
    {{"delta_rule",
      "delta_net",
      "deltanet",
      "gdn_",
      "_gdn",
      "kda_",
      "chunk_local_cumsum",
      "chunk_delta",
      "linear_attn",
      "linear_attention",
      "linearattention",
      "linearattn",
      "lightning_attn",
      "lightning_attention",
      "gated_linear",
      "chunk_gla",
      "_fwd_kv_parallel",
      "_fwd_kv_reduce",
      "_fwd_diag_kernel",
      "_fwd_none_diag_kernel",
      "chunk_fwd_",
      "chunk_bwd_",
      "recompute_w_u",
      "wy_repr",
      "chunk_scan",
      "chunk_state",
      "state_passing",
      "fused_recurrent",
      "retention_",
      "rwkv",
      "mamba",
      "causal_conv1d",
      "selective_scan"},
     "linear attention or a state-space model, which has no softmax"},
    {{"kv_indices", "vertical_slash_index"}, "lists the pages of the cache for a later attention kernel"},
    {{"mqa_logits", "indexer"}, "computes scores that choose keys for a later sparse attention kernel"},
    {{"flashinfer::sampling", "topksampling", "toppsampling", "flashinfer::activation"},
     "one of FlashInfer's other kernels, no attention"},
    {{"attn_res_", "attnres"}, "a sum over the outputs of earlier layers (attention residuals), not over tokens"},
    {{"flash_sampling", "flash_ffn", "flashdecode_moe"}, "no attention"},
};

MaybeReading none(Role role, Confidence confidence, std::string why) {
    NameReading reading;
    reading.role = role;
    reading.confidence = confidence;
    reading.evidence.push_back(std::move(why));
    return reading;
}

/// Reads XLA's fusions, which are named after their operators: "loop_convert_fusion_5", "input_multiply_reduce_fusion".
MaybeReading read_xla_fusion(std::string_view lower) {
    const bool prefixed = begins_any(lower, {"loop_", "input_", "wrapped_", "gemm_fusion"});
    if (!prefixed || !contains_any(lower, {"fusion", "wrapped_"})) return std::nullopt;
    const Role role = contains_any(lower, {"gemm_fusion", "_dot"}) ? Role::gemm
                      : contains(lower, "reduce")                  ? Role::other
                                                                   : Role::elementwise;
    return none(role, Confidence::likely, "a fusion of XLA");
}

bool begins_with_letter(std::string_view text) { return !text.empty() && text[0] >= 'a' && text[0] <= 'z'; }

/// True if "gemm" appears apart from the model Gemma: "_gemma_rmsnorm" is not a GEMM.
bool mentions_gemm(std::string_view lower) {
    for (std::size_t at = lower.find("gemm"); at != std::string_view::npos; at = lower.find("gemm", at + 1)) {
        const std::string_view behind = lower.substr(at + 4);
        const bool model = begins_with_letter(behind) && behind[0] == 'a' && !begins_with_letter(behind.substr(1));
        if (!model) return true;
    }
    return false;
}

/// Removes parameter types, which do not show the operation: "f<g(int)>(fbgemm::Tensor)" -> "f<g(int)>".
std::string_view without_parameters(std::string_view name) {
    int depth = 0;
    for (std::size_t at = 0; at < name.size(); ++at) {
        if (name[at] == '<') ++depth;
        if (name[at] == '>') --depth;
        if (name[at] == '(' && depth <= 0 && at > 0) return name.substr(0, at);
    }
    return name;
}

}  // namespace

MaybeReading read_look_alike(std::string_view name) {
    const std::string lower = lower_case(name);
    const bool fused_pointwise = contains_any(lower, {"triton_poi_", "triton_red_", "triton_per_", "triton_for_"});
    // Inductor's names include operators around the ones it fused.
    const bool mentions_attention =
        contains_any(lower, {"scaled_dot_product", "attention", "attn", "fmha", "sdpa", "mha_"});
    if (fused_pointwise && mentions_attention && !contains_any(lower, {"softmax", "flex_attention"})) {
        return none(Role::look_alike, Confidence::likely,
                    "a pointwise kernel that Inductor fused beside an attention, and computes no attention");
    }
    const std::vector<std::string> words = words_of(function_of(name));
    const bool rotates_too = begins_any(name, {"_fwd_grouped_kernel_stage1", "_fwd_kernel_stage1"});
    // "rope_attn_fwd" may do both.
    const bool computes_too = read_words(words).role == Role::attention && contains_any(lower, {"attn", "attention"});
    for (const LookAlike& row : kLookAlikes) {
        if (rotates_too) break;
        for (const std::string_view word : row.words) {
            if (contains(lower, word))
                return none(Role::look_alike, computes_too ? Confidence::unsure : Confidence::likely,
                            fmt::format("\"{}\" in the name: {}", word, row.what));
        }
    }
    const std::string moves = cache_word(words);
    const bool sure = mentions_cache(words) && !mentions_serving(words);
    if (!moves.empty())
        return none(Role::look_alike, sure ? Confidence::likely : Confidence::unsure,
                    fmt::format("\"{}\" and a word for keys, values or their cache: it moves or lists them, and "
                                "computes no attention",
                                moves));
    return std::nullopt;
}

namespace {

constexpr Confidence kUniqueName = Confidence::likely;  // names and namespaces that only one library has
constexpr Confidence kCommonWord = Confidence::unsure;  // words that anybody may use in a kernel's name

/// A reading based on the first of these pieces that is in the name.
MaybeReading row(std::string_view lower, Role role, Confidence sure, std::initializer_list<std::string_view> pieces) {
    for (const std::string_view piece : pieces) {
        if (contains(lower, piece)) return none(role, sure, fmt::format("\"{}\" in the name", piece));
    }
    return std::nullopt;
}

MaybeReading read_softmax(std::string_view name, const std::string& lower) {
    for (const char* kernel : {"softmax_warp_forward", "softmax_warp_backward"}) {
        // the types, log2 of the length, whether it is a log-softmax
        const auto arguments = template_arguments(name, kernel);
        if (arguments && arguments->size() > 4 && boolean((*arguments)[4]) == true)
            return none(Role::other, Confidence::likely,
                        fmt::format("\"{}\" of a logarithm: a loss, no attention", kernel));
    }
    if (contains(lower, "softmax") && contains_any(lower, {"moe", "expert"}))
        return none(Role::other, kCommonWord, "\"softmax\" and a word for experts: it chooses among them");
    if (contains_any(lower, {"softmax_ce_", "softmax_xent", "softmax_loss"}))
        return none(Role::other, kCommonWord, "\"softmax\" and a word for a loss");
    if (contains_any(lower, {"softmax", "soft_max"})) {
        const bool backward =
            contains_any(lower, {"softmaxbackward", "softmax_backward", "softmax_warp_backward",
                                 "masked_softmax_warp_backward", "softmax_grad", "softmax_bwd", "softmaxgrad"});
        return none(backward ? Role::softmax_backward : Role::softmax, Confidence::likely, "\"softmax\" in the name");
    }
    return std::nullopt;
}

MaybeReading read_convolution(const std::string& lower) {
    // A convolution contains GEMMs, but none of attention's.
    if (MaybeReading found =
            row(lower, Role::other, kUniqueName, {"implicit_gemm", "implicitgemm", "xmma_fprop", "fprop_optimized"}))
        return found;
    if (begins_any(lower, {"igemm_fwd_gtc", "igemm_bwd_gtc", "igemm_wrw_gtc"}))
        return none(Role::other, kUniqueName, "\"igemm_..._gtc\" in the name: a convolution of MIOpen");
    if (MaybeReading found = row(lower, Role::other, kCommonWord, {"grouped_conv", "conv_fwd", "conv_bwd"}))
        return found;
    return std::nullopt;
}

MaybeReading read_gemm(std::string_view name, const std::string& lower) {
    // A GEMM's namespace may hold other kernels too: "group_gemm::update_descriptors".
    if (mentions_gemm(lower)) {
        const std::string function = lower_case(function_of(name));
        const bool own = mentions_gemm(function) || contains(function, "mma") || contains(lower, "cutlass");
        for (const std::string& word : words_of(function)) {  // "grouped_gemm_args" prepares a GEMM
            for (const char* beside : {"args", "preprocess", "postprocess", "prepare", "setup", "metadata",
                                       "descriptors", "offsets", "problems"}) {
                if (word == beside) return none(Role::other, kCommonWord, fmt::format("\"gemm\" and \"{}\"", word));
            }
        }
        MaybeReading found = own ? std::nullopt : read_elsewhere(function_of(name));
        return found ? found : none(Role::gemm, own ? kUniqueName : kCommonWord, "\"gemm\" in the name");
    }
    if (MaybeReading found =
            row(lower, Role::gemm, kUniqueName, {"nvjet", "cutlass::kernel", "cijk_", "xmma", "cublaslt", "tensorop"}))
        return found;
    for (const std::string_view product : {"triton_mm", "triton_bmm"}) {  // Inductor's names end in a number
        const bool numbered =
            lower.rfind(product, 0) == 0 && lower.find_first_not_of("_0123456789", product.size()) == std::string::npos;
        if (contains(lower, product))
            return none(Role::gemm, numbered ? kUniqueName : kCommonWord, fmt::format("\"{}\" in the name", product));
    }
    if (MaybeReading found = row(lower, Role::gemm, kCommonWord,
                                 {"gemv", "matmul", "dot_kernel", "_mm_", "marlin", "wvsplitk", "bmm_", "mul_mat",
                                  "lora_shrink", "lora_expand", "mm_kernel", "mfma_"}))
        return found;
    return std::nullopt;
}

}  // namespace

MaybeReading read_plain_kernel(std::string_view name) {
    const bool of_cute = name.substr(0, 14) == "kernel_cutlass";  // its arguments contain names of copies and GEMMs
    const std::string lower = lower_case(of_cute ? function_of(name) : without_parameters(name));
    if (MaybeReading found = row(lower, Role::other, kUniqueName,
                                 {"nccl", "rccl", "log_softmax", "logsoftmax", "cross_entropy", "nll_loss", "radixsort",
                                  "devicescan", "splitkreduce", "multi_tensor_apply"}))
        return found;
    if (MaybeReading found = row(lower, Role::other, kCommonWord,
                                 {"topk", "broadcast", "allgather", "all_gather", "allreduce", "all_reduce",
                                  "reduce_scatter", "all_to_all", "alltoall"}))
        return found;
    if (MaybeReading fused = read_xla_fusion(lower)) return fused;
    if (contains(lower, "triton_tem_")) {  // a user's own template may compute anything
        const bool product =
            contains_any(lower, {"mm_", "bmm", "conv", "linear"}) || lower.substr(lower.size() - 2) == "mm";
        return none(Role::gemm, product ? kUniqueName : kCommonWord,
                    "\"triton_tem_\" in the name: a template of Inductor");
    }
    if (MaybeReading softmax = read_softmax(name, lower)) return softmax;
    // Inductor's names include operators around the ones it fused; only "tem" marks the kernel of a GEMM.
    if (contains(lower, "triton_poi_"))
        return none(Role::elementwise, Confidence::likely, "\"triton_poi_\" in the name");
    if (contains_any(lower, {"triton_red_", "triton_per_"}))
        return none(Role::other, Confidence::likely, "\"triton_red_ / triton_per_\" in the name: a reduction");
    if (MaybeReading convolution = read_convolution(lower)) return convolution;
    if (MaybeReading product = read_gemm(name, lower)) return product;
    const bool of_pytorch = contains_any(lower, {"at::native", "at::cuda", "at_cuda_detail"});
    if (MaybeReading found =
            row(lower, Role::elementwise, of_pytorch ? kUniqueName : kCommonWord,
                {"elementwise", "catarray", "copy", "fillfunctor", "_fill", "triu_tril", "dropout", "memcpy", "memset",
                 "where", "masked", "transpose", "cast", "cpy_", "nchwtonhwc", "nhwctonchw"}))
        return found;
    if (MaybeReading found =
            row(lower, Role::other, kUniqueName,
                {"at::native", "at::cuda", "at_cuda_detail", "cub::", "rocprim::", "triton_for_", "triton_spl",
                 "triton_fused", "triton__", "thrust::", "cudnn", "transformer_engine::", "deep_ep", "rocclr"}))
        return found;
    return row(
        lower, Role::other, kCommonWord,
        {"reduce",      "norm",     "embedding",    "index",      "conv",    "adam",   "sort",           "moe",
         "cutlass",     "loop_",    "act_and_mul",  "gated_act",  "silu",    "gelu",   "swiglu",         "quant",
         "expert",      "dispatch", "cumsum",       "argmax",     "sampl",   "gating", "shuffle",        "hadamard",
         "logits",      "amax",     "histogram",    "seqlens",    "permute", "penalt", "prepare_inputs", "slot_mapping",
         "verify_tree", "_rows",    "temperature_", "scal_kernel"});
}

}  // namespace tessera::diagnose
