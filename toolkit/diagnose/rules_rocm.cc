// SPDX-License-Identifier: Apache-2.0
//
// The checks of a PyTorch that is built for ROCm. Its flash and memory-efficient backends are both AOTriton's kernels
// (or Composable Kernel's, if the user prefers them); cuDNN, FA3 and FA4 do not exist. Other checks equal those for
// NVIDIA GPUs. The rows come from three states of the source, of about 2.4, 2.10 and 2.14. If a check changed between
// two of them, the answer for the releases between is unknown.
#include <algorithm>
#include <array>
#include <string_view>

#include "diagnose/rules_tables.hpp"

namespace tessera::diagnose {
namespace {

using checks::k24, checks::k25, checks::kEnd;
constexpr Version k26{2, 6, 0};
constexpr Version k27{2, 7, 0};
constexpr Version k29{2, 9, 0};
constexpr Version k213{2, 13, 0};
constexpr SdpBackend kFlash = SdpBackend::flash, kEfficient = SdpBackend::efficient;

constexpr const char* kSource =
    "ATen/native/transformers/cuda/sdp_utils.cpp under USE_ROCM; as of about 2.4, 2.10, 2.14";
constexpr const char* kAotriton = "which AOTriton this PyTorch has";
constexpr std::int64_t kNarrow = 256;  // the widest head of AOTriton before 0.9
constexpr std::int64_t kWide = 512;

Value<std::string> gfx(const Call& c) {
    return {c.gpu.gfx.empty() ? std::nullopt : std::optional(c.gpu.gfx), "the GPU's architecture (gfx942)"};
}
Fact prefers_ck(const Call& c) {
    return Value<bool>{c.prefers_ck, "torch.backends.cuda.preferred_rocm_fa_library"} == true;
}

/// AOTriton has no code for this GPU, or counts it as experimental, which depends on the release.
Fact gpu_without_kernels(const Call& c) {
    constexpr std::string_view sure[] = {"gfx90a", "gfx942"};
    constexpr std::string_view never[] = {"gfx900", "gfx906", "gfx908", "gfx1010", "gfx1030", "gfx1031", "gfx1032"};
    const auto in = [&](const auto& list) {
        return gfx(c).is(
            [&](const std::string& of) { return std::find(std::begin(list), std::end(list), of) != std::end(list); });
    };
    if (in(sure).is_false() && in(never).is_false())
        return !prefers_ck(c) && Fact::unknown("whether this AOTriton has code for " + c.gpu.gfx +
                                               ", and TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL");
    return !prefers_ck(c) && in(never);
}

/// The head is wider than this release's AOTriton takes, if that limit is known.
Fact wider_than_aotriton(const Call& c, const Size& width) {
    const Fact may_be_wider = (width > kNarrow) && (width <= kWide);
    const Fact gfx11 = gfx(c).is([](const std::string& of) { return of.substr(0, 5) == "gfx11"; });
    const Fact limit_known = (torch(c) < k27) || ((torch(c) >= k29) && (!gfx11 || (torch(c) >= k213)));
    const Fact limit_unknown = may_be_wider && !limit_known && Fact::unknown(kAotriton);
    return (width > kWide) || ((torch(c) < k27) && may_be_wider) || limit_unknown;
}

Fact head_dims_differ(const Call& c) { return !(same(head_dim(c), head_dim_k(c)) && same(head_dim(c), head_dim_v(c))); }
Fact flash_head_dim(const Call& c) { return head_dims_differ(c) || wider_than_aotriton(c, head_dim(c)); }

/// The head_dim is not a multiple of 16 bytes.
Fact head_dim_misaligned(const Call& c) {
    const auto multiple = [&](std::int64_t of) {
        return multiple_of(head_dim(c), of) && multiple_of(head_dim_v(c), of);
    };
    const Fact half = half_precision(c);
    return (half && !multiple(8)) || (!half && !multiple(4));
}

Fact efficient_head_dim_2_4(const Call& c) { return !same(head_dim(c), head_dim_k(c)) || head_dim_misaligned(c); }
Fact efficient_head_dim_as_flash(const Call& c) {
    const Fact alignment = (torch(c) >= k29) || Fact::unknown(kAotriton);
    return flash_head_dim(c) || (head_dim_misaligned(c) && alignment);
}
Fact efficient_head_dim(const Call& c) {
    return efficient_head_dim_2_4(c) || wider_than_aotriton(c, head_dim(c)) || wider_than_aotriton(c, head_dim_v(c));
}

Fact efficient_nested(const Call& c) { return is_nested(c) && ((torch(c) < k26) || Fact::unknown(kAotriton)); }

Fact mask_of_other_dtype(const Call& c) {
    return (mask_kind(c) == MaskKind::floating) && !same(element(c.mask, "attn_mask"), element(c.q, "q"));
}

Fact flash_dtype(const Call& c) { return !dtype_among(c, {Element::fp16, Element::bf16}); }
Fact efficient_dtype(const Call& c) {
    const Fact fp32 = dtype_among(c, {Element::fp32}) && !prefers_ck(c);
    return !(dtype_among(c, {Element::fp16, Element::bf16}) || fp32);
}

Fact always(const Call&) { return true; }

constexpr const char* kGpuMeaning = "AOTriton has no kernels for this GPU";
constexpr const char* kDtype = "Expected query, key and value to all be of dtype:";
constexpr const char* kHeads = "the memory-efficient backend supports no grouped heads on ROCm";

constexpr Rule kRules[] = {
    {"rocm-flash-head-dim", kFlash, k24, kEnd, flash_head_dim,
     "Flash attention requires q,k,v to have the same last dimension and to be less than or equal to 256.",
     "q, k and v differ in head_dim, or it is over 256 (512 from AOTriton 0.9 on, although the text says 256)",
     kSource},
    {"rocm-flash-gpu", kFlash, k24, kEnd, gpu_without_kernels,
     "Flash attention was not compiled for current AMD GPU architecture.", kGpuMeaning, kSource},
    {"rocm-flash-dtype", kFlash, k24, kEnd, flash_dtype, kDtype, "q, k, v are not all fp16 or all bf16", kSource},
    {"rocm-efficient-gpu", kEfficient, k24, kEnd, gpu_without_kernels,
     "Mem Efficient attention was not compiled for current AMD GPU architecture.", kGpuMeaning, kSource},
    {"rocm-efficient-head-dim", kEfficient, k24, k25, efficient_head_dim_2_4,
     "Mem efficient attention requires last dimension of inputs to be divisible by",
     "q and k differ in head_dim, or a head_dim is no multiple of 16 bytes", kSource},
    {"rocm-efficient-head-dim", kEfficient, k25, k213, efficient_head_dim_as_flash,
     "Efficient attention on ROCM requires q,k,v to have the same last dimension",
     "q, k and v differ in head_dim, or it is too wide, or no multiple of 16 bytes", kSource},
    {"rocm-efficient-head-dim", kEfficient, k213, kEnd, efficient_head_dim,
     "Mem efficient attention requires last dimension of inputs to be divisible by",
     "q and k differ in head_dim, or a head_dim is over 512 or no multiple of 16 bytes", kSource},
    {"rocm-efficient-nested", kEfficient, k24, k29, efficient_nested,
     "[ROCM] no support for nested tensors in memory efficient attention.", "this backend takes no nested tensors",
     kSource},
    {"rocm-efficient-heads", kEfficient, k24, k25, checks::heads_differ,
     "For dense inputs, both fused kernels require query, key and value to have the same batch_size and num_heads.",
     kHeads, kSource},
    {"rocm-efficient-heads", kEfficient, k25, kEnd, checks::heads_differ,
     "For dense input, both fused kernels require query, key and value to have the same num_heads.", kHeads, kSource},
    {"rocm-efficient-mask-dtype", kEfficient, k29, kEnd, mask_of_other_dtype,
     "Efficient attention on ROCM requires attn_mask be boolean, or has the same datatype as of q,k,v",
     "attn_mask is of another dtype than q", kSource},
    {"rocm-efficient-dtype", kEfficient, k24, kEnd, efficient_dtype, kDtype,
     "q, k, v are not all fp16, all bf16 or all fp32 (no fp32 if Composable Kernel is preferred)", kSource},
    {"rocm-cudnn", SdpBackend::cudnn, k24, kEnd, always, "Torch was not compiled with cuDNN attention.",
     "cuDNN is NVIDIA's", kSource},
    {"rocm-fa3", SdpBackend::fa3, k24, kEnd, always, "", "FA3 is CUDA code for Hopper",
     "github.com/Dao-AILab/flash-attention, hopper/setup.py"},
    {"rocm-fa4", SdpBackend::fa4, k24, kEnd, always, "", "FA4 is written in CuTe DSL, for NVIDIA's GPUs",
     "github.com/Dao-AILab/flash-attention, flash_attn/cute"},
};

/// The rows for NVIDIA GPUs that ROCm checks in another way or not at all.
constexpr std::string_view kReplaced[] = {
    "flash-gpu",           "flash-head-dim",         "flash-wide-training", "flash-dtype",
    "efficient-gpu",       "efficient-head-dim",     "efficient-offset",    "efficient-heads",
    "efficient-heads-k-v", "efficient-heads-divide", "efficient-dtype",     "efficient-nested-training"};

std::vector<Rule> all_rules() {
    std::vector<Rule> all;
    for (const auto& table : {flash_rules(), efficient_rules(), math_rules()}) {
        std::copy_if(table.begin(), table.end(), std::back_inserter(all), [](const Rule& rule) {
            return std::find(std::begin(kReplaced), std::end(kReplaced), rule.name) == std::end(kReplaced);
        });
    }
    all.insert(all.end(), std::begin(kRules), std::end(kRules));
    return all;
}

}  // namespace

std::span<const Rule> rocm_rules() {
    static const std::vector<Rule> all = all_rules();
    return all;
}

void recognise_amd(Gpu& gpu) {
    constexpr std::pair<std::string_view, std::string_view> names[] = {
        {"MI2", "gfx90a"}, {"MI30", "gfx942"}, {"MI32", "gfx942"}, {"MI35", "gfx950"}};
    const bool amd = gpu.name.substr(0, 4) == "AMD " || gpu.name.substr(0, 3) == "gfx";
    if (!amd) return;
    gpu.rocm = true;
    gpu.capability.reset();  // PyTorch reports the architecture's number there
    for (const auto& [part, architecture] : names) {
        if (gpu.gfx.empty() && gpu.name.find(part) != std::string::npos) gpu.gfx = architecture;
    }
}

}  // namespace tessera::diagnose
