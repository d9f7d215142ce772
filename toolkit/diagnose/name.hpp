// SPDX-License-Identifier: Apache-2.0
//
// What a GPU kernel's name says about attention.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::diagnose {

/// Who wrote the kernel. `unknown` is an answer.
enum class Family : std::uint8_t {
    unknown,
    fa1,            ///< FlashAttention 0.2 to 1.0
    fa2,            ///< FlashAttention-2, wherever it was copied to
    fa3,            ///< FlashAttention-3
    fa4,            ///< FlashAttention-4 (CuTe DSL)
    cudnn,          ///< NVIDIA cuDNN's fused attention
    mem_efficient,  ///< the CUTLASS kernel of xFormers and PyTorch
    flex,           ///< FlexAttention, compiled by Triton
    triton,         ///< other attention in Triton
    flashinfer,
    flashmla,
    trtllm,        ///< TensorRT-LLM and TensorRT
    cutlass_fmha,  ///< attention among CUTLASS's examples, and what was made of it
    sage,          ///< SageAttention: quantised, not exact
    ck,            ///< Composable Kernel (AMD)
    aotriton,      ///< Triton compiled ahead, in PyTorch for AMD
    aiter,         ///< AMD's AITER
    paged,         ///< vLLM's first paged attention
    ggml,          ///< llama.cpp
    natten,        ///< neighbourhood attention
    other,         ///< attention of another kind, told apart by its name alone
    tessera,
    math,   ///< PyTorch's math path: products and a softmax, one kernel each
    eager,  ///< the same, written by hand in a model
};

/// What the kernel does. `exact` and the like stand in the reading.
enum class Role : std::uint8_t {
    unknown,
    attention,   ///< computes attention, or its gradients
    helper,      ///< a small kernel beside one: sums of rows, conversions, merging of parts, lists of work
    look_alike,  ///< has attention's words in its name and computes none: it writes a cache, rotates, normalises
    gemm,        ///< a matrix product: part of an attention by hand, or of anything else
    softmax,
    softmax_backward,
    elementwise,
    other,  ///< known, and no part of attention
};

enum class KernelPass : std::uint8_t { unknown, forward, backward };

/// How sure a statement is. certain: the name spells it out. likely: it has one meaning in what is known of. unsure: a
/// word speaks for it, and others use that word too.
enum class Confidence : std::uint8_t { none, unsure, likely, certain };

enum class Exactness : std::uint8_t { unknown, exact, not_exact };

struct NameReading {
    Family family = Family::unknown;
    Role role = Role::unknown;
    KernelPass pass = KernelPass::unknown;
    Confidence confidence = Confidence::none;
    Exactness exactness = Exactness::unknown;
    std::string algorithm{};  ///< "FlashAttention-2"; empty: not told
    std::string library{};    ///< "PyTorch's own copy"; empty: not told
    std::string release{};    ///< "2.6.2 to 2.7.3"; empty: not told
    std::string dtype{};      ///< "bf16"; empty: not told
    std::string mask{};       ///< "causal", "none", "window", "custom"; empty: not told
    int arch = 0;             ///< that it was compiled for: 90; 0: not told
    int head_dim = 0;         ///< 0: not told
    int head_dim_v = 0;       ///< 0: not told, or as head_dim
    int tile_q = 0;           ///< 0: not told
    int tile_kv = 0;
    bool amd = false;                     ///< arch is told otherwise there
    bool cut = false;                     ///< the name is cut off: what stood behind it is not told
    std::vector<std::string> features{};  ///< "dropout", "paged keys"
    std::vector<std::string> evidence{};  ///< the pieces of the name that say so
};

/// Reads a name as any of the tools writes it, mangled names too. Never throws but bad_alloc.
NameReading read_name(std::string_view name);

/// "fa2", and the family by that name (unknown when there is none): what --expect takes and --json gives.
const char* name_of(Family family);
Family family_named(std::string_view name);
std::vector<std::string> family_names();

/// "FlashAttention-2": for people.
const char* title_of(Family family);
const char* name_of(Role role);
const char* name_of(KernelPass pass);
const char* name_of(Confidence confidence);
const char* name_of(Exactness exactness);

}  // namespace tessera::diagnose
