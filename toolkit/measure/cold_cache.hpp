// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/tensor.hpp"

namespace tessera::measure {

/// Evicts tensors from every cache, so that each repetition of a measurement reads them from memory.
class ColdCache {
 public:
    /// `cache_bytes` is the size of the last-level cache; it is used if lines cannot be evicted by address (not
    /// x86-64).
    explicit ColdCache(std::int64_t cache_bytes);

    /// Evicts the memory that the views span from all caches of all cores.
    void evict(std::span<const TensorView> tensors);

 private:
    std::vector<unsigned char> buffer_;  ///< empty if lines are evicted by address
};

}  // namespace tessera::measure
