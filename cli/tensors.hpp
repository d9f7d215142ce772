// SPDX-License-Identifier: Apache-2.0
//
// Tensors that the command owns, and the way between a file's layout and the canonical one.
#pragma once

#include <span>
#include <string>

#include "io/file.hpp"
#include "options.hpp"
#include "tessera/tensor.hpp"

namespace tessera::cli {

/// A packed tensor and its memory.
struct OwnedTensor {
    io::AlignedBytes data;
    TensorView view;  ///< in the shape that a file gets
};

/// Throws Error(out_of_memory) when a plan for the host needs more workspace than memory is left.
void expect_workspace(const Plan& plan);

/// Zeros. `name` is for the message when there is no memory for it.
OwnedTensor make_tensor(const std::string& name, DType dtype, std::span<const std::int64_t> shape);

/// Every element rounded once to `dtype`, in C order.
OwnedTensor converted(const std::string& name, const TensorView& from, DType dtype);

/// How the q, k, v of a file are laid out.
struct FileLayout {
    Layout layout = Layout::bshd;
    bool ragged = false;     ///< rank 3 is [total, heads, dim] or, as bhsd, [heads, total, dim]
    bool unbatched = false;  ///< rank 3 is a single sequence

    /// The file's tensor as [batch, len, heads, dim] or [total, heads, dim]: the same memory, seen canonically.
    TensorView canonical(const TensorView& in_file) const;

    /// The shape that a tensor of this canonical shape has in a file. It is its own inverse up to the batch of 1.
    std::vector<std::int64_t> in_file(std::span<const std::int64_t> canonical) const;

    /// For LSE and dLSE, [batch, heads, len] or ragged [heads, total]: only a batch of 1 can be missing.
    TensorView canonical_lse(const TensorView& in_file) const;
    std::vector<std::int64_t> lse_in_file(const Problem& problem) const;
};

/// How many elements are NaN.
std::int64_t count_nan(const TensorView& tensor);

}  // namespace tessera::cli
