// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "diagnose/call.hpp"

namespace tessera::diagnose {

/// Reads a call of attention from an operator's inputs, as PyTorch's profiler writes them with record_shapes=True:
/// {"dims":[[1,8,128,64],...],"types":["c10::Half",...],"strides":...,"scalars":["","True",...]}.
/// Returns none if the operator is unknown or the text does not describe Q and K. For `aten::bmm`, the first operator
/// of an attention by hand, the shapes have batch and heads in one dimension.
std::optional<Call> call_of_inputs(std::string_view op, const std::string& inputs);

/// The shape of the input at `index`; empty if unknown.
Sizes shape_of_input(const std::string& inputs, int index);

/// The shape of the input with the most elements; empty if unknown.
Sizes shape_of_largest_input(const std::string& inputs);

/// The shapes of a GEMM's matrices.
struct GemmShapes {
    Sizes left{}, right{}, output{};  ///< [rows, columns]; empty: unknown
};

/// Reads the inputs of `aten::bmm` or `aten::baddbmm`; returns empty shapes for another operator.
GemmShapes gemm_shapes_of(std::string_view op, const std::string& inputs);

/// Describes the known fields for people: "batch 1, heads 32, len 4096, head_dim 128, bf16, is_causal".
std::string text_of(const Call& call);

/// K or V with each head repeated.
struct RepeatedHeads {
    std::int64_t batch = 0;
    std::int64_t heads = 0;  ///< before they are repeated
    std::int64_t times = 0;
    std::int64_t len = 0;
    std::int64_t head_dim = 0;
};

/// Reads aten::repeat_interleave over the heads of [batch, heads, len, head_dim], and aten::expand of
/// [batch, heads, 1, len, head_dim], as transformers' repeat_kv() calls it. None for any other call.
std::optional<RepeatedHeads> repeat_of_inputs(std::string_view op, const std::string& inputs);

}  // namespace tessera::diagnose
