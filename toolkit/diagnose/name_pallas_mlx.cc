// SPDX-License-Identifier: Apache-2.0
//
// Reads attention of JAX's Pallas (for TPUs, and by Mosaic for GPUs) and of Apple's MLX.
#include <algorithm>

#include "diagnose/name_readers.hpp"

namespace tessera::diagnose {
namespace {

struct PallasRow {
    const char* begins;
    KernelPass pass;
    Confidence confidence;
    const char* library;
};

constexpr const char* kSplash = "JAX's splash attention (Pallas)";

constexpr PallasRow kPallas[] = {
    {"splash_mha_fwd", KernelPass::forward, Confidence::certain, kSplash},
    {"splash_mqa_fwd", KernelPass::forward, Confidence::certain, kSplash},
    {"splash_mha_dkv", KernelPass::backward, Confidence::certain, kSplash},
    {"splash_mqa_dkv", KernelPass::backward, Confidence::certain, kSplash},
    {"splash_mha_dq", KernelPass::backward, Confidence::certain, kSplash},
    {"splash_mqa_dq", KernelPass::backward, Confidence::certain, kSplash},
    {"splash_attention", KernelPass::unknown, Confidence::likely, kSplash},
    {"ragged_paged_attention", KernelPass::forward, Confidence::likely, "vLLM's and JAX's kernel for TPUs"},
    {"_ragged_paged_attention", KernelPass::forward, Confidence::likely, "vLLM's and JAX's kernel for TPUs"},
    {"mla_ragged_paged_attention", KernelPass::forward, Confidence::likely, "vLLM's and JAX's kernel for TPUs"},
    {"_mla_ragged_paged_attention", KernelPass::forward, Confidence::likely, "vLLM's and JAX's kernel for TPUs"},
    {"pallas_flash_attention", KernelPass::forward, Confidence::unsure, "a kernel in Pallas"},
    {"pallas_attention", KernelPass::forward, Confidence::unsure, "a kernel in Pallas"},
};

/// The numbers of "sdpa_vector_2pass_1_float_512_256" after its type: head_dim, and that of V.
std::vector<int> sizes_of_vector(std::string_view name) {
    std::vector<int> sizes;
    constexpr int kLeastHeadDim = 16;  // smaller numbers count passes
    for (std::size_t at = name.find('_'); at != std::string_view::npos; at = name.find('_', at + 1)) {
        const std::string_view word = name.substr(at + 1, name.find('_', at + 1) - at - 1);
        if (const auto size = number(word); size && *size >= kLeastHeadDim) sizes.push_back(*size);
    }
    return sizes;
}

}  // namespace

MaybeReading read_pallas(std::string_view name) {
    for (const PallasRow& row : kPallas) {
        if (!begins_any(name, {row.begins})) continue;
        NameReading reading = attention(Family::pallas, row.confidence, row.begins, row.pass);
        reading.library = row.library;
        if (reading.pass == KernelPass::unknown && contains_any(name, {"fwd", "forward"}))
            reading.pass = KernelPass::forward;
        if (contains_any(name, {"dkv", "_dq", "bwd", "backward"})) reading.pass = KernelPass::backward;
        if (contains(name, "paged")) reading.features.emplace_back("paged keys");
        if (contains(name, "mla")) reading.features.emplace_back("latent attention");
        return reading;
    }
    return std::nullopt;
}

MaybeReading read_mlx(std::string_view name) {
    const bool tiles = begins_any(name, {"steel_attention_"});
    const bool rows = begins_any(name, {"sdpa_vector_"});
    if (!tiles && !rows) return std::nullopt;
    NameReading reading = attention(Family::mlx, Confidence::certain, tiles ? "steel_attention" : "sdpa_vector");
    reading.library = "MLX, on Apple's GPUs";
    if (tiles) {
        reading.tile_q = number_after(name, "_bq").value_or(0);
        reading.tile_kv = number_after(name, "_bk").value_or(0);
        reading.head_dim = number_after(name, "_bd").value_or(0);
    } else {
        reading.algorithm = "online softmax, a few queries at a time";
        reading.features.emplace_back("decode");
        const std::vector<int> sizes = sizes_of_vector(name);
        if (!sizes.empty()) reading.head_dim = sizes[0];
        if (sizes.size() > 1) reading.head_dim_v = sizes[1];
        if (contains(name, "2pass")) reading.features.emplace_back("keys split");
        if (contains(name, "2pass_2")) reading.role = Role::helper;  // it combines the parts
    }
    if (contains(name, "float32")) reading.dtype = "fp32";
    return reading;
}

}  // namespace tessera::diagnose
