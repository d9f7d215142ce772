// SPDX-License-Identifier: Apache-2.0
//
// Reads FlashAttention-3 (templates of CUTLASS 3) and -4 (CuTe DSL, compiled at run time).
#include <fmt/format.h>

#include <algorithm>

#include "diagnose/name_readers.hpp"

namespace tessera::diagnose {
namespace {

constexpr const char* kFa3Library = "package flash_attn_3, or a copy of it (vLLM, SGLang)";

/// Extracts the numbers of "cute::tuple<cute::C<128>,cute::C<80>,cute::C<256>>".
std::vector<int> extents(std::string_view tuple) {
    std::vector<int> result;
    std::size_t at = 0;
    while ((at = tuple.find("C<", at)) != std::string_view::npos) {
        const std::size_t end = tuple.find('>', at);
        if (end == std::string_view::npos) break;
        if (const auto value = number(tuple.substr(at + 2, end - at - 2))) result.push_back(*value);
        at = end;
    }
    return result;
}

/// True if the template is MagiAttention's, by the number of arguments after the architecture. Its forward has nine
/// and no head_dim_v; FlashAttention-3's has at least twelve, or eleven without head_dim_v. Its backward has 15,
/// FlashAttention-3's 13.
bool is_magi(const NameReading& reading, std::size_t behind_arch) {
    if (reading.pass == KernelPass::backward) return behind_arch == 15;
    return reading.head_dim_v == 0 && behind_arch == 9;
}

void set_magi(NameReading& reading, const std::vector<bool>& switches) {
    reading.library = "MagiAttention";
    reading.release.clear();
    reading.evidence.assign({"\"FlashAttn...Sm90\" in the name", "its template is MagiAttention's"});
    if (switches[0]) reading.features.emplace_back("softcap");
    if (reading.pass == KernelPass::backward && switches[1]) reading.features.emplace_back("deterministic");
    reading.features.emplace_back("ranges of keys");
}

/// Reads tile and switches of "CollectiveMainloopFwdSm90<stages, cluster, tile, head_dim_v, element, accumulator, arch,
/// causal, local, softcap, varlen, paged, append, ...>". The backward and the Ampere template begin with other numbers,
/// and "deterministic" follows varlen there.
void set_mainloop(NameReading& reading, const std::vector<std::string>& arguments, bool cut, bool closed) {
    std::size_t at = 0;
    for (; at < arguments.size() && !contains(arguments[at], "arch::Sm"); ++at) {
        const std::string& argument = arguments[at];
        if (contains(argument, "tuple<")) {
            const std::vector<int> tile = extents(argument);
            if (tile.size() == 3 && tile[2] >= 16) {
                reading.tile_q = tile[0];
                reading.tile_kv = tile[1];
                reading.head_dim = tile[2];
            }
        } else if (reading.head_dim != 0) {
            if (const auto head_dim_v = number(argument)) reading.head_dim_v = *head_dim_v;
        }
        if (const std::string dtype = dtype_in(argument); reading.dtype.empty() && !dtype.empty())
            reading.dtype = dtype;
    }
    const std::size_t behind_arch = arguments.size() - std::min(arguments.size(), at + 1);
    std::vector<bool> switches;
    for (++at; at < arguments.size() && boolean(arguments[at]); ++at) switches.push_back(*boolean(arguments[at]));
    constexpr std::size_t kOfMagi = 5;  // MagiAttention has at least this many before the first number
    if (closed && switches.size() >= kOfMagi && is_magi(reading, behind_arch)) return set_magi(reading, switches);
    // Release 2.7.3 has neither head_dim_v nor the switch of a second Q; a shorter list may be another library's.
    const bool backward = reading.pass == KernelPass::backward;
    if (!backward && reading.head_dim_v == 0 && switches.size() < 11) return;
    if (switches.size() >= 2) reading.mask = switches[1] ? "window" : switches[0] ? "causal" : "none";
    const auto add = [&](std::size_t index, const char* feature) {
        if (index < switches.size() && switches[index]) reading.features.emplace_back(feature);
    };
    add(2, "softcap");
    add(3, "varlen");
    if (backward) return add(4, "deterministic");
    add(4, "paged keys");
    add(5, "appends to the cache");
    const bool first_release = reading.head_dim_v == 0 && switches.size() == 11;
    const std::size_t later = first_release ? 0 : 1;
    if (!first_release) add(6, "second Q");
    add(8 + later, "packs query heads");
    add(9 + later, "keys split");
    if (first_release && !cut) {
        reading.release = "2.7.3";
        reading.evidence.emplace_back("its template has no head_dim_v: release 2.7.3");
    }
}

NameReading fa3_helper(std::string_view name) {
    NameReading reading = attention(Family::fa3, Confidence::likely,
                                    "FlashAttnFwdCombine / FlashAttnBwdPreprocess / FlashAttnBwdPostprocess / "
                                    "FlashAttnFwdPostprocess / FlashAttnBwdDkvPostprocess / prepare_varlen_num_blocks");
    reading.role = Role::helper;
    if (contains_any(name, {"FlashAttnFwdPostprocess", "BwdDkvPostprocess"})) reading.library = "MagiAttention";
    reading.pass = contains(name, "Bwd") ? KernelPass::backward : KernelPass::forward;
    reading.library = kFa3Library;
    reading.arch = number_after(name, "arch::Sm").value_or(0);
    return reading;
}

MaybeReading read_compute_attn_ws(std::string_view name) {
    if (!contains(name, "compute_attn_ws")) return std::nullopt;
    if (contains_any(name, {"nv_float4", "e2m1", "BlockScaled", "blockscaled"})) {
        NameReading sage = attention(Family::sage, Confidence::likely, "compute_attn_ws");
        sage.evidence.emplace_back("its operands are 4-bit floats");
        sage.library = "SageAttention 3";
        sage.dtype = "fp4";
        return sage;
    }
    NameReading reading = attention(Family::fa3, Confidence::certain, "compute_attn_ws");
    reading.release = "beta, to 2.7.2";
    reading.library = "package flashattn-hopper, or a copy of it";
    reading.arch = 90;
    if (const auto traits = template_arguments(name, "Flash_fwd_kernel_traits"); traits && traits->size() > 3) {
        reading.head_dim = number((*traits)[0]).value_or(0);
        reading.tile_q = number((*traits)[1]).value_or(0);
        reading.tile_kv = number((*traits)[2]).value_or(0);
        if (traits->size() > 8) reading.head_dim_v = number((*traits)[8]).value_or(0);
    }
    if (const auto arguments = template_arguments(name, "compute_attn_ws")) {
        const std::vector<bool> switches = bools_from(*arguments, 1);
        if (!switches.empty()) reading.mask = switches[0] ? "causal" : "none";
        if (switches.size() > 1 && switches[1]) reading.mask = "window";
    }
    return reading;
}

/// A class name in parts: the pass after "FlashAttention" or "FlashAttentionMLA", and the text after the pass.
struct CuteClass {
    KernelPass pass = KernelPass::unknown;
    std::string_view rest;
};

bool ends_in(std::string_view text, std::string_view end) {
    while (!text.empty() && text.back() == '.') text.remove_suffix(1);
    return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

std::optional<CuteClass> cute_class(std::string_view name) {
    for (const char* prefix : {"FlashAttention", "FlashAttentionMLA"}) {
        for (const auto& [word, pass] :
             {std::pair{"Forward", KernelPass::forward}, std::pair{"Backward", KernelPass::backward}}) {
            const std::string whole = std::string(prefix) + word;
            const std::size_t at = name.find(whole);
            if (at != std::string_view::npos) return CuteClass{pass, name.substr(at + whole.size())};
        }
    }
    return std::nullopt;
}

/// Reads "flash_fwd_sm90_bf16_head_dim64_gqa_ratio2_tile192x128_...", the names that say what they are (flash-attention
/// pull request 2564).
MaybeReading read_fa4_by_its_facts(std::string_view name) {
    const bool backward = begins_any(name, {"flash_bwd_"});
    if (!backward && !begins_any(name, {"flash_fwd_"})) return std::nullopt;
    const std::size_t at = name.find(backward ? "flash_bwd_" : "flash_fwd_");
    const std::string_view text = name.substr(at);
    const auto arch = number_after(text, "_sm");
    if (!arch || *arch < 70) return std::nullopt;
    const bool spelled = contains(text, "_head_dim");
    NameReading reading = attention(Family::fa4, spelled ? Confidence::certain : Confidence::likely,
                                    backward ? "flash_bwd_...sm" : "flash_fwd_...sm");
    reading.pass = backward ? KernelPass::backward : KernelPass::forward;
    reading.library = "flash-attn-4, or a copy of it";
    reading.arch = *arch;
    // In a cut name, the last number may be a beginning: "head_dim12...".
    const auto whole = [&](std::string_view prefix) {
        const auto value = number_after(text, prefix);
        const bool at_the_end = value && looks_cut(name) && ends_in(text, std::string(prefix) + std::to_string(*value));
        return at_the_end ? 0 : value.value_or(0);
    };
    reading.head_dim = whole("_head_dim");
    reading.head_dim_v = std::max(whole("_head_dim_v"), whole("_head_dimv"));
    if (const auto tile = pair_after(text, "_tile"); tile && whole(fmt::format("_tile{}x", tile->first)) != 0) {
        reading.tile_q = tile->first;
        reading.tile_kv = tile->second;
    }
    if (const int ratio = whole("_gqa_ratio"); ratio > 1)
        reading.features.push_back(fmt::format("{} query heads for each head of K and V", ratio));
    if (contains(text, "_causal")) reading.mask = "causal";
    if (contains_any(text, {"_local", "_window"})) reading.mask = "window";
    if (contains(text, "_varlen")) reading.features.emplace_back("varlen");
    if (contains(text, "_paged")) reading.features.emplace_back("paged keys");
    if (contains(text, "_softcap")) reading.features.emplace_back("softcap");
    if (contains_any(text, {"_split", "_num_splits"})) reading.features.emplace_back("keys split");
    if (contains_any(text, {"combine", "preprocess", "postprocess", "prepare_"})) reading.role = Role::helper;
    return reading;
}

}  // namespace

MaybeReading read_fa3(std::string_view name) {
    if (contains(name, "flash_fna::")) return std::nullopt;
    if (MaybeReading early = read_compute_attn_ws(name)) return early;
    for (const char* helper : {"FlashAttnFwdCombine", "FlashAttnBwdPreprocess", "FlashAttnBwdPostprocess",
                               "FlashAttnFwdPostprocess", "FlashAttnBwdDkvPostprocess"}) {
        // the main kernels share this beginning
        constexpr std::size_t kShared = std::string_view("FlashAttnFwd").size();
        if (contains(name, helper) || cut_inside(name, helper, kShared + 1)) return fa3_helper(name);
    }
    if (contains(name, "prepare_varlen_num_blocks")) return fa3_helper(name);
    const bool hopper = contains_any(
        name, {"FlashAttnFwdSm90", "FlashAttnBwdSm90", "CollectiveMainloopFwdSm90", "CollectiveMainloopBwdSm90"});
    const bool old_wrapper = contains(name, "flash::enable_sm80_to_sm89");
    const bool wrapped = old_wrapper || contains(name, "flash::enable_sm90");
    const bool spelled_80 = contains_any(
        name, {"FlashAttnFwdSm80", "FlashAttnBwdSm80", "CollectiveMainloopFwdSm80", "CollectiveMainloopBwdSm80"});
    const bool ampere = spelled_80 || old_wrapper;
    if (!hopper && !ampere && !wrapped && !contains_any(name, {"flash::FlashAttnFwd", "flash::FlashAttnBwd"}))
        return std::nullopt;
    NameReading reading = attention(Family::fa3, hopper || spelled_80 ? Confidence::certain : Confidence::likely,
                                    hopper       ? "FlashAttn...Sm90 / CollectiveMainloop...Sm90"
                                    : spelled_80 ? "FlashAttn...Sm80 / CollectiveMainloop...Sm80"
                                    : wrapped    ? "flash::enable_sm"
                                                 : "flash::FlashAttn");
    reading.pass = contains_any(name, {"FlashAttnBwd", "MainloopBwd"})   ? KernelPass::backward
                   : contains_any(name, {"FlashAttnFwd", "MainloopFwd"}) ? KernelPass::forward
                                                                         : KernelPass::unknown;
    reading.library = kFa3Library;
    reading.arch = ampere ? 80 : 90;
    const bool cut_word = cut_inside(name, "FlashAttnFwd", 1) || cut_inside(name, "FlashAttnBwd", 1);
    if (wrapped && !hopper && !spelled_80) {
        reading.evidence.emplace_back("only the main kernels of FlashAttention-3 have that wrapper");
    } else if (!wrapped && cut_word) {
        reading.confidence = Confidence::unsure;
        reading.arch = 0;
        if (contains(name, "device_kernel<flash::")) {
            reading.role = Role::helper;
            reading.evidence.emplace_back("the main kernels have a wrapper, so this is a helper");
        }
    }
    if (ampere) {
        reading.algorithm = "FlashAttention-2";
        reading.evidence.emplace_back(
            "FlashAttention-3's package, but its Ampere code: the schedule of FlashAttention-2");
    }
    if (contains(name, "enable_sm90_or_later")) reading.release = "2.7.3 to March 2026";
    else if (contains(name, "enable_sm90<")) reading.release = "since March 2026";
    if (!reading.release.empty()) reading.evidence.push_back("its wrapper is that of the releases " + reading.release);
    const bool cut = looks_cut(name);
    const bool closed = !cut || contains(name, "CollectiveEpilogue");
    for (const char* mainloop : {"CollectiveMainloopFwdSm90", "CollectiveMainloopBwdSm90", "CollectiveMainloopFwdSm80",
                                 "CollectiveMainloopBwdSm80"}) {
        if (const auto arguments = template_arguments(name, mainloop)) set_mainloop(reading, *arguments, cut, closed);
    }
    return reading;
}

MaybeReading read_fa4(std::string_view name) {
    if (MaybeReading spelled = read_fa4_by_its_facts(name)) return spelled;
    const bool path = contains_any(name, {"flash_attncute", "flash_attn_cute", "flash_attn_4", "flash_attn.cute"});
    const bool dsl = contains_any(name, {"kernel_cutlass", "_object_at_"});
    const auto found = cute_class(name);
    const bool fused_mha = contains(name, "BlackwellFusedMultiHeadAttention");
    if (fused_mha && !path) return std::nullopt;  // a CUTLASS example
    if (!path && !(found && (dsl || contains(found->rest.substr(0, 2), "Sm")))) return std::nullopt;
    const bool certain = path || (found && dsl);
    NameReading reading =
        attention(Family::fa4, certain ? Confidence::certain : Confidence::likely,
                  "FlashAttentionForward / FlashAttentionBackward / FlashAttentionMLA / flash_attncute / "
                  "flash_attn_cute / flash_attn_4 / flash_attn.cute");
    reading.library = path && contains(name, "kernel_cutlass_kernel_flash_attncute") ? "package flash-attn-4"
                                                                                     : "flash-attn-4, or a copy of it";
    const std::string lower = lower_case(name);
    if (found) reading.pass = found->pass;
    else if (contains_any(lower, {"flash_bwd", "backward"})) reading.pass = KernelPass::backward;
    if (contains_any(lower, {"combine", "preprocess", "postprocess", "prepare_", "scheduler_metadata"}))
        reading.role = Role::helper;
    for (const char* prefix : {"BackwardSm", "ForwardSm", "_fwd_sm", "_bwd_sm", "_cute_sm"}) {
        if (reading.arch == 0) reading.arch = number_after(name, prefix).value_or(0);
    }
    reading.head_dim = number_after(lower, "_hd").value_or(0);
    if (contains(lower, "mla")) reading.features.emplace_back("latent attention");
    return reading;
}

}  // namespace tessera::diagnose
