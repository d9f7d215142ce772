// SPDX-License-Identifier: Apache-2.0
//
// Input tensors made from a seed, for `tessera gen` and `tessera bench`.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "check/generate.hpp"
#include "tensors.hpp"
#include "tessera/attention.hpp"

namespace tessera::cli {

struct GeneratedInputs {
    FileLayout layout;
    std::vector<OwnedTensor> owned;
    /// Views in the shapes that a file gets. dO is present on request, other tensors if the Problem has them.
    BackwardArgs tensors;
    /// The keys and the pages of each sequence of a cache, which only a forward has. Pages lie in reverse order.
    TensorView kv_lengths{};
    TensorView page_table{};

    /// The inputs of a forward.
    ForwardArgs forward_args() const;

    /// Returns name and tensor of everything that was generated.
    std::vector<std::pair<std::string, TensorView>> named() const;
};

/// Generates inputs. `sequences` holds the lengths of a ragged batch or of a
/// cache; without them its sequences fill it. A seed gives equal values in every layout.
GeneratedInputs generate_inputs(const Problem& problem,
                                const std::vector<std::pair<std::int64_t, std::int64_t>>& sequences, Layout layout,
                                check::Fill fill, std::uint64_t seed, bool gradient);

}  // namespace tessera::cli
