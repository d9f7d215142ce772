// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/append.hpp"

namespace tessera {

/// The row of the cache that a row of k and v is written to.
struct CacheRow {
    std::int64_t index = -1;    ///< page or slot of the cache; -1: the row is not written
    std::int64_t row = 0;       ///< row in it
    std::int64_t position = 0;  ///< of the rotary embedding

    bool exists() const { return index >= 0; }
};

struct AppendedRows {
    std::vector<CacheRow> of_keys;         ///< of every row of k
    std::vector<std::int64_t> of_queries;  ///< the position of every row of q in the rotary embedding
};

/// Checks the shapes, dtypes, devices and memory of a call of append(), and on the CPU cu_seqlens_k. Throws
/// Error(invalid_argument) naming the tensor.
void check_append(const AppendArgs& args, const AppendOptions& options);

/// check_append(), and the row of the cache for each row of k, for tensors in host memory.
AppendedRows checked_rows(const AppendArgs& args, const AppendOptions& options);

}  // namespace tessera
