// SPDX-License-Identifier: Apache-2.0
//
// Tensors owned by the command, and conversions between a file's layout and the canonical one.
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

/// Throws Error(out_of_memory) if a plan for the host needs more workspace than the free memory.
void expect_workspace(const Plan& plan);

/// Allocates a tensor of zeros. `name` is for the error message if there is no memory for it.
OwnedTensor make_tensor(const std::string& name, DType dtype, std::span<const std::int64_t> shape);

/// A copy with every element rounded once to `dtype`, in C order.
OwnedTensor converted(const std::string& name, const TensorView& from, DType dtype);

/// The layout of a file's q, k and v.
struct FileLayout {
    Layout layout = Layout::bshd;
    bool ragged = false;     ///< rank 3 is [total, heads, dim] or, as bhsd, [heads, total, dim]
    bool unbatched = false;  ///< rank 3 is a single sequence

    /// Views the file's tensor as [batch, len, heads, dim] or [total, heads, dim], without a copy.
    TensorView canonical(const TensorView& in_file) const;

    /// The file's shape of a tensor of this canonical shape. The function is its own inverse, except for the batch of
    /// 1.
    std::vector<std::int64_t> in_file(std::span<const std::int64_t> canonical) const;

    /// Views LSE and dLSE, [batch, heads, len] or ragged [heads, total]; only a batch of 1 may be missing.
    TensorView canonical_lse(const TensorView& in_file) const;
    std::vector<std::int64_t> lse_in_file(const Problem& problem) const;
};

/// The number of elements that are NaN.
std::int64_t count_nan(const TensorView& tensor);

}  // namespace tessera::cli
