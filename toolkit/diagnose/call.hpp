// SPDX-License-Identifier: Apache-2.0
//
// One call of attention, as far as a trace or the options of a command describe it. Every field may be unknown, which
// differs from no, none or 0.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::diagnose {

/// A release such as "2.11.0". `patch` matters once: 2.5.0 and 2.5.1 order the backends differently.
struct Version {
    int major = 0;
    int minor = 0;
    int patch = 0;
    auto operator<=>(const Version&) const = default;
};

/// PyTorch's element types. `other` is any type not listed: integers, complex, another float8.
enum class Element : std::uint8_t { fp16, bf16, fp32, fp64, fp8_e4m3, other };

using Sizes = std::vector<std::int64_t>;

/// A tensor as its caller holds it. PyTorch's SDPA expects [batch, heads, len, head_dim]; strides are in elements.
struct Operand {
    std::optional<Element> element{};
    std::optional<Sizes> shape{};
    std::optional<Sizes> strides{};
    std::optional<bool> requires_grad{};
    std::optional<std::int64_t> storage_offset{};  ///< in elements
};

/// The kind of tensor given as attn_mask. The flag is_causal is another argument.
enum class MaskKind : std::uint8_t { none, boolean, floating };

/// The backends that the user has switched on; all of them by default.
struct Enabled {
    bool flash = true;
    bool efficient = true;
    bool math = true;
    bool cudnn = true;
    bool operator==(const Enabled&) const = default;
};

/// The kernels behind PyTorch's flash backend: its own copy, or those that activate_flash_attention_impl() installed.
enum class FlashImplementation : std::uint8_t { own, fa3, fa4 };

struct Gpu {
    std::string name{};               ///< "NVIDIA H200"; empty: unknown
    std::optional<int> capability{};  ///< 90 for 9.0, 121 for 12.1
    std::optional<bool> rocm{};
    std::string gfx{};  ///< "gfx942", for AMD GPUs; empty: unknown
    std::optional<int> multiprocessors{};
    std::optional<double> memory_gib{};
};

struct Call {
    std::optional<Version> torch{};
    Gpu gpu{};

    Operand q{};     ///< [batch, heads_q, len_q, head_dim]
    Operand k{};     ///< [batch, heads_kv, len_kv, head_dim]
    Operand v{};     ///< [batch, heads_kv, len_kv, head_dim_v]
    Operand mask{};  ///< attn_mask, if there is one: broadcastable to [batch, heads_q, len_q, len_kv]
    std::optional<MaskKind> mask_kind{};
    std::optional<bool> is_causal{};
    bool causal_lower_right = false;  ///< attn_mask is torch.nn.attention.bias.causal_lower_right, not a tensor
    std::optional<double> dropout{};  ///< probability
    std::optional<double> scale{};    ///< unknown means the default, 1 / sqrt(head_dim)
    std::optional<bool> enable_gqa{};
    std::optional<bool> nested{};  ///< q, k, v are NestedTensors
    bool packed = false;           ///< q, k, v are packed documents (cu_seqlens), whose lengths are unknown
    /// Arguments that PyTorch's SDPA does not have: "a window", "softcap", "ALiBi".
    std::vector<std::string> beyond_sdpa{};
    bool heads_in_batch = false;  ///< the trace gives batch x heads as one number, which stands for the heads

    std::optional<Enabled> enabled{};
    std::optional<bool> deterministic{};  ///< torch.use_deterministic_algorithms(True)
    std::optional<int> cudnn{};           ///< at run time, as cudnnGetVersion() returns it: 91501
    std::optional<int> cuda{};            ///< the CUDA_VERSION that PyTorch was built for: 12080
    std::optional<FlashImplementation> flash_implementation{};
    std::optional<bool> prefers_ck{};  ///< on ROCm: torch.backends.cuda.preferred_rocm_fa_library("ck")
};

/// The strides of a packed tensor of this shape.
inline Sizes packed_strides(const Sizes& shape) {
    Sizes strides(shape.size(), 1);
    for (std::size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
    return strides;
}

/// Adds a dimension of one in front of a tensor whose shape is known.
inline void unsqueeze(Operand& tensor) {
    tensor.shape->insert(tensor.shape->begin(), 1);
    if (std::optional<Sizes>& strides = tensor.strides)
        strides->insert(strides->begin(), strides->empty() ? 1 : strides->front());
}

}  // namespace tessera::diagnose
