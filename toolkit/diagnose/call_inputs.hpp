// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "diagnose/call.hpp"

namespace tessera::diagnose {

/// The call of attention that an operator's inputs tell, as PyTorch's profiler writes them with record_shapes=True:
/// {"dims":[[1,8,128,64],...],"types":["c10::Half",...],"strides":...,"scalars":["","True",...]}. None where the
/// operator is not known, or the text says nothing of Q and K. Of `aten::bmm`, that an attention by hand begins with,
/// it tells shapes with batch and heads in one.
std::optional<Call> call_of_inputs(std::string_view op, const std::string& inputs);

/// The shape of the input at `index`; empty when it is not told.
Sizes shape_of_input(const std::string& inputs, int index);

/// The shape of the input with the most elements; empty: not told.
Sizes shape_of_largest_input(const std::string& inputs);

/// Shapes of a product's matrices.
struct Product {
    Sizes left{}, right{}, output{};  ///< [rows, columns]; empty: not told
};

/// Of `aten::bmm` or `aten::baddbmm`; empty shapes for another operator.
Product product_of(std::string_view op, const std::string& inputs);

/// "batch 1, heads 32, len 4096, head_dim 128, bf16, is_causal": for people, what is known of it.
std::string text_of(const Call& call);

}  // namespace tessera::diagnose
