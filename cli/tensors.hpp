// SPDX-License-Identifier: Apache-2.0
//
// Tensors that the command owns, and the conversion between a file's layout and the canonical one.
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

/// Throws Error(out_of_memory) if a plan for the host needs more workspace than the available memory.
void expect_workspace(const Plan& plan);

/// Returns a tensor of zeros. `name` appears in the message if memory runs out.
OwnedTensor make_tensor(const std::string& name, DType dtype, std::span<const std::int64_t> shape);

/// Returns every element rounded once to `dtype`, in C order.
OwnedTensor converted(const std::string& name, const TensorView& from, DType dtype);

/// The layout of q, k, v in a file.
struct FileLayout {
    Layout layout = Layout::bshd;
    bool ragged = false;     ///< rank 3 is [total, heads, dim] or, as bhsd, [heads, total, dim]
    bool unbatched = false;  ///< rank 3 is a single sequence

    /// Returns the file's tensor as [batch, len, heads, dim] or [total, heads, dim], a view of its memory.
    TensorView canonical(const TensorView& in_file) const;

    /// Returns the shape in a file of a tensor of this canonical shape. It is its own inverse up to the batch of 1.
    std::vector<std::int64_t> in_file(std::span<const std::int64_t> canonical) const;

    /// Returns LSE or dLSE as [batch, heads, len] or ragged [heads, total]; only a batch of 1 can be missing.
    TensorView canonical_lse(const TensorView& in_file) const;
    std::vector<std::int64_t> lse_in_file(const Problem& problem) const;
};

/// Returns the number of NaN elements.
std::int64_t count_nan(const TensorView& tensor);

}  // namespace tessera::cli
