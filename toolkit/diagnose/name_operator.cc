// SPDX-License-Identifier: Apache-2.0
//
// Reads names that tables of profilers list beside kernels: PyTorch's operators, and the nodes of autograd.
#include <cctype>

#include "diagnose/name_readers.hpp"

namespace tessera::diagnose {
namespace {

bool is_identifier(std::string_view text) {
    if (text.empty()) return false;
    for (const char c : text) {
        if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_') return false;
    }
    return true;
}

bool begins(std::string_view text, std::string_view with) { return text.substr(0, with.size()) == with; }
bool ends(std::string_view text, std::string_view with) {
    return text.size() >= with.size() && text.substr(text.size() - with.size()) == with;
}

/// True if the name is a torch.autograd.Function about attention, or the node of its backward: "FlashAttnFunc",
/// "FusedAttnFuncBackward", "ScaledDotProductFlashAttentionBackward0", "_fMHABackward".
bool is_autograd_node(std::string_view name) {
    if (!is_identifier(name) || begins(name, "kernel_") || begins(name, "Blackwell")) return false;
    while (!name.empty() && std::isdigit(static_cast<unsigned char>(name.back())) != 0) name.remove_suffix(1);
    if (!contains_any(name, {"Attn", "Attention", "MHA"})) return false;
    return ends(name, "Backward") || ends(name, "AttnFunc") || ends(name, "VarlenFunc") || ends(name, "PackedFunc");
}

/// True if the name is an operator in one of the namespaces that PyTorch's dispatcher uses.
bool is_operator(std::string_view name) {
    if (contains_any(name, {"<", "("})) return false;
    for (const char* space : {"aten::", "prims::", "c10d::", "autograd::engine::", "torch::autograd::", "nccl:",
                              "flash_attn::_flash_attn", "flash_attn_3::", "xformers::efficient_attention",
                              "xformers_flash", "vllm::unified_attention", "sgl_kernel::", "aiter::wrapper_"}) {
        if (begins(name, space)) return true;
    }
    return false;
}

}  // namespace

MaybeReading read_operator(std::string_view name) {
    const bool node = is_autograd_node(name);
    if (!node && !is_operator(name)) return std::nullopt;
    NameReading reading;
    reading.role = Role::look_alike;
    reading.confidence = Confidence::likely;
    reading.evidence.emplace_back(node ? "a node of autograd, which launches kernels, and not a kernel"
                                       : "an operator of PyTorch, which launches kernels, and not a kernel");
    return reading;
}

}  // namespace tessera::diagnose
