// SPDX-License-Identifier: Apache-2.0
//
// Reads attention kernels of other projects, and names whose only evidence is a word.
#include <algorithm>
#include <cctype>

#include "diagnose/name_readers.hpp"
#include "diagnose/name_words.hpp"

namespace tessera::diagnose {
namespace {

/// The place at which the class begins in a name of CuTe DSL; 0 if there is none.
std::size_t class_of(std::string_view name) {
    const std::string_view function = function_of(name);
    for (std::size_t at = 0; at < function.size(); ++at) {
        if (std::isupper(static_cast<unsigned char>(function[at])) != 0)
            return static_cast<std::size_t>(function.data() - name.data()) + at;
    }
    return 0;
}

/// Reads a name that is in no table and has only a word for attention, which other kernels use too.
MaybeReading read_attention_words(std::string_view name) {
    const std::string lower = lower_case(name);
    // This is a plain softmax, though its name mentions the attention by hand it belongs to.
    const bool of_inductor = contains_any(lower, {"triton_per_", "triton_red_"});
    std::vector<std::string> last = words_of(function_of(name));
    while (!last.empty() && (last.back() == "kernel" || last.back().size() == 1)) last.pop_back();
    const bool ends_so = !last.empty() && last.back() == "softmax";  // "sdpa_fused_softmax"
    const bool softmax_alone = ends_so || contains_any(lower, {"attn_softmax", "attention_softmax", "token_softmax"});
    if (softmax_alone || (of_inductor && contains(lower, "softmax"))) return std::nullopt;
    WordReading words = read_words(words_of(function_of(name)));
    // A name of CuTe DSL begins with the path of its file, in small letters; the class says what it computes.
    const std::size_t own_class = begins_any(name, {"kernel_cutlass"}) ? std::min(class_of(name), lower.size()) : 0;
    if (words.role == Role::unknown &&
        contains_any(std::string_view(lower).substr(own_class),
                     {"attention", "attn", "fmha", "sdpa", "flash_fwd", "flash_bwd", "flashatt", "multihead"})) {
        words.role = Role::attention;  // the word is in the namespace or the arguments
        if (contains_any(lower, {"bwd", "backward", "grad"})) words.pass = KernelPass::backward;
        words.found = "attention / attn / fmha / sdpa / flash_fwd / flash_bwd / flashatt / multihead";
        const std::vector<std::string> own = words_of(function_of(name));
        for (const char* sums : {"reduce", "merge", "combine"}) {
            if (std::find(own.begin(), own.end(), sums) != own.end()) words.role = Role::helper;
        }
    }
    if (words.role == Role::unknown) return std::nullopt;
    NameReading reading = attention(Family::unknown, Confidence::unsure, words.found, words.pass);
    reading.role = words.role;
    reading.arch = number_after(name, "arch::Sm").value_or(0);
    reading.evidence = {"\"" + words.found + "\" is in the name, and nothing else in it is known"};
    return reading;
}

}  // namespace

MaybeReading read_paged(std::string_view name) {
    const std::size_t plain = name.find("paged_attention_kernel");
    const bool of_other_library =
        plain != std::string_view::npos && plain > 0 &&
        (name[plain - 1] == '_' || std::isalnum(static_cast<unsigned char>(name[plain - 1])) != 0);
    if (of_other_library) return std::nullopt;  // "ragged_paged_attention_kernel" is not vLLM's
    const bool paged = plain != std::string_view::npos ||
                       begins_any(name, {"paged_attention_v1_kernel", "paged_attention_v2_kernel",
                                         "paged_attention_ll4mi", "single_query_cached_kv_attention"});
    const bool reduce = contains(name, "paged_attention_v2_reduce") || contains(name, "paged_attention_ll4mi_reduce");
    if (!paged && !reduce) return std::nullopt;
    const bool common = plain != std::string_view::npos;
    NameReading reading =
        attention(Family::paged, common ? Confidence::likely : Confidence::certain, "paged_attention");
    reading.library = "vLLM";
    if (reduce) reading.role = Role::helper;
    reading.features = {"decode", "paged keys"};
    for (const char* kernel : {"paged_attention_v1_kernel", "paged_attention_v2_kernel"}) {
        const auto arguments = template_arguments(name, kernel);
        if (arguments && arguments->size() > 2) reading.head_dim = number((*arguments)[2]).value_or(0);
    }
    reading.amd = contains(name, "ll4mi");
    return reading;
}

MaybeReading read_ggml(std::string_view name) {
    if (!contains_any(
            name, {"flash_attn_ext", "flash_attn_vec", "flash_attn_tile", "flash_attn_mma", "flash_attn_wmma",
                   "flash_attn_stream_k", "flash_attn_combine_results", "flash_attn_mask_to_KV", "flash_attn_f32_f16"}))
        return std::nullopt;
    NameReading reading =
        attention(Family::ggml, Confidence::certain,
                  "flash_attn_ext / flash_attn_vec / flash_attn_tile / flash_attn_mma / flash_attn_wmma / "
                  "flash_attn_stream_k / flash_attn_combine_results / flash_attn_mask_to_KV / flash_attn_f32_f16");
    reading.library = "llama.cpp (ggml)";
    const std::vector<std::string> words = words_of(function_of(name));
    const auto says = [&](const char* word) { return std::find(words.begin(), words.end(), word) != words.end(); };
    if (contains_any(name, {"stream_k_fixup", "combine_results", "mask_to_KV"}) || says("reduce") || says("pad") ||
        says("blk"))
        reading.role = Role::helper;
    for (const char* metal :
         {"_dk", "_h", "_d"}) {  // Metal kernels: "..._f16_dk576_dv512", in older releases "..._f16_h64"
        if (reading.head_dim == 0) reading.head_dim = number_after(name, metal).value_or(0);
    }
    if (reading.head_dim != 0) reading.head_dim_v = number_after(name, "_dv").value_or(0);
    for (const char* kernel : {"flash_attn_ext_f16", "flash_attn_ext_vec", "flash_attn_vec_ext_f16",
                               "flash_attn_vec_ext_f32", "flash_attn_tile", "flash_attn_mma_ext_f16"}) {
        const auto arguments = template_arguments(name, kernel);
        if (arguments && !arguments->empty()) reading.head_dim = number((*arguments)[0]).value_or(0);
    }
    if (contains_any(name, {"q4_", "q5_", "q8_"})) {
        reading.exactness = Exactness::unknown;
        reading.features.emplace_back("quantised cache");
    }
    return reading;
}

/// NATTEN's kernels derive from those of CUTLASS and xFormers, and keep their words.
MaybeReading read_natten(std::string_view name) {
    if (!contains_any(name, {"natten::", "::fna::", "FusedNeighborhoodAttention", "FnaFwd", "FnaBwd", "FnaMainloop"}) ||
        contains(name, "flash_fna::"))
        return std::nullopt;
    NameReading reading = attention(Family::natten, Confidence::certain,
                                    "natten:: / ::fna:: / FusedNeighborhoodAttention / FnaFwd / FnaBwd / FnaMainloop");
    reading.library = "NATTEN";
    const std::string lower = lower_case(name);
    const bool sums = contains_any(lower, {"computedelta", "sumodo", "::reduction::"});
    if (sums || contains_any(lower, {"bwd", "backward"})) reading.pass = KernelPass::backward;
    if (sums || contains_any(lower, {"bwdconvert", "token_permute", "tokperm"})) reading.role = Role::helper;
    reading.arch = number_after(name, "Sm").value_or(0);
    return reading;
}

MaybeReading read_other_attention(std::string_view name) {
    const std::string lower = lower_case(name);
    const auto with = [&](Family family, Confidence confidence, const char* found, const char* algorithm) {
        NameReading reading = attention(family, confidence, found);
        if (*algorithm != '\0') reading.algorithm = algorithm;
        if (contains_any(lower, {"bwd", "backward", "dgrad", "bprop"})) reading.pass = KernelPass::backward;
        return reading;
    };
    if (contains_any(lower, {"natten", "flash_fna", "fna_", "neighborhood"}))
        return with(Family::natten, Confidence::likely, "natten / flash_fna / fna_ / neighborhood", "");
    if (contains(lower, "fmha_fprop_fp16_") || contains(lower, "fmha_dgrad_fp16_"))
        return with(Family::other, Confidence::likely, "fmha_fprop_fp16_ / fmha_dgrad_fp16_",
                    "fused attention of NVIDIA's Apex, up to 512 keys");
    if (contains(lower, "hstuattention") || contains(lower, "hstu_attn")) {
        NameReading reading = with(Family::other, Confidence::likely, "HSTU", "HSTU: without a softmax");
        reading.exactness = Exactness::not_exact;
        return reading;
    }
    if (contains_any(lower, {"attend_ker", "fwd_attend", "bwd_attend"})) {
        NameReading reading = with(Family::other, Confidence::likely, "attend_ker / fwd_attend / bwd_attend",
                                   "ThunderKittens, online softmax over tiles");
        reading.exactness = Exactness::exact;
        if (contains(lower, "prep")) reading.role = Role::helper;
        for (const char* kernel : {"fwd_attend_ker", "bwd_attend_ker", "bwd_attend_prep_ker"}) {
            const auto arguments = template_arguments(name, kernel);
            if (arguments && !arguments->empty()) reading.head_dim = number((*arguments)[0]).value_or(0);
        }
        return reading;
    }
    if (contains(lower, "block_sparse") && contains(lower, "att")) {
        NameReading reading = with(Family::other, Confidence::likely, "block_sparse...att", "block-sparse attention");
        reading.exactness = Exactness::not_exact;
        return reading;
    }
    return read_attention_words(name);
}

}  // namespace tessera::diagnose
