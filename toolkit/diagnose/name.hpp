// SPDX-License-Identifier: Apache-2.0
//
// Reads what a GPU kernel's name says about attention.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::diagnose {

/// The kernel's family, by its author. `unknown` is a valid answer.
enum class Family : std::uint8_t {
    unknown,
    fa1,            ///< FlashAttention 0.2 to 1.0
    fa2,            ///< FlashAttention-2 and all its copies
    fa3,            ///< FlashAttention-3
    fa4,            ///< FlashAttention-4 (CuTe DSL)
    cudnn,          ///< NVIDIA cuDNN's fused attention
    mem_efficient,  ///< the CUTLASS kernel of xFormers and PyTorch
    flex,           ///< FlexAttention, compiled by Triton
    triton,         ///< other attention in Triton
    flashinfer,
    flashmla,
    trtllm,        ///< TensorRT-LLM and TensorRT
    cutlass_fmha,  ///< attention among CUTLASS's examples, and code derived from it
    sage,          ///< SageAttention: quantised, not exact
    ck,            ///< Composable Kernel (AMD)
    aotriton,      ///< Triton compiled ahead, in PyTorch for AMD
    aiter,         ///< AMD's AITER
    paged,         ///< vLLM's original paged attention
    ggml,          ///< llama.cpp
    natten,        ///< neighbourhood attention
    pallas,        ///< JAX's Pallas, on TPUs and by Mosaic on GPUs
    mlx,           ///< Apple's MLX
    other,         ///< attention of another kind, recognised by its name alone
    tessera,
    math,   ///< PyTorch's math path: GEMMs and a softmax, one kernel each
    eager,  ///< attention that a model computes by GEMMs and a softmax
};

/// The kernel's task. Whether attention is exact is a field of the reading.
enum class Role : std::uint8_t {
    unknown,
    attention,  ///< computes attention, or its gradients
    /// a small kernel that serves an attention: sums of rows, conversions, merging of parts, lists of work
    helper,
    look_alike,  ///< computes no attention though its name suggests it: it writes a cache, rotates, normalises
    gemm,        ///< a GEMM: part of an attention by hand, or of anything else
    softmax,
    softmax_backward,
    elementwise,
    other,  ///< known, but no part of attention
};

enum class KernelPass : std::uint8_t { unknown, forward, backward };

/// The confidence of a statement. certain: the name spells it out. likely: the words have one meaning in all known
/// kernels. unsure: a word suggests it, but other kernels use that word too.
enum class Confidence : std::uint8_t { none, unsure, likely, certain };

enum class Exactness : std::uint8_t { unknown, exact, not_exact };

struct NameReading {
    Family family = Family::unknown;
    Role role = Role::unknown;
    KernelPass pass = KernelPass::unknown;
    Confidence confidence = Confidence::none;
    Exactness exactness = Exactness::unknown;
    std::string algorithm{};  ///< "FlashAttention-2"; empty: unknown
    std::string library{};    ///< "PyTorch's own copy"; empty: unknown
    std::string release{};    ///< "2.6.2 to 2.7.3"; empty: unknown
    std::string dtype{};      ///< "bf16"; empty: unknown
    std::string mask{};       ///< "causal", "none", "window", "custom"; empty: unknown
    int arch = 0;             ///< the compute capability it was compiled for: 90; 0: unknown
    int head_dim = 0;         ///< 0: unknown
    int head_dim_v = 0;       ///< 0: unknown, or equal to head_dim
    int tile_q = 0;           ///< 0: unknown
    int tile_kv = 0;
    bool amd = false;                     ///< an AMD GPU, for which `arch` is not set
    bool cut = false;                     ///< the name is cut off, and the rest is unknown
    std::vector<std::string> features{};  ///< "dropout", "paged keys"
    std::vector<std::string> evidence{};  ///< the pieces of the name that support the reading
};

/// Reads a name as any of the tools writes it, mangled names too. Throws nothing but bad_alloc.
NameReading read_name(std::string_view name);

/// "fa2", as --expect takes it and --json prints it, and the family of that name (unknown if there is none).
const char* name_of(Family family);
Family family_named(std::string_view name);
std::vector<std::string> family_names();

/// "FlashAttention-2", the name for people.
const char* title_of(Family family);
const char* name_of(Role role);
const char* name_of(KernelPass pass);
const char* name_of(Confidence confidence);
const char* name_of(Exactness exactness);

}  // namespace tessera::diagnose
