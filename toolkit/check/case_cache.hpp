// SPDX-License-Identifier: Apache-2.0
//
// The tensors of a case on a cache of keys. Without pages sequence b has slot b; with pages it has its own ones, and
// the sequences lie in the cache from its end on. Page 0 belongs to nobody.
#pragma once

#include <array>

#include "check/case.hpp"
#include "check/guarded.hpp"

namespace tessera::check {

/// The strides of K and V [count, rows, heads, head_dim] in one memory, and the elements where they begin.
struct CacheStrides {
    std::array<std::int64_t, 4> k{}, v{};
    std::int64_t first_k = 0, first_v = 0;
    std::int64_t elements = 0;  ///< of the memory
};
CacheStrides strides_of(CacheLayout cache_layout, std::int64_t count, std::int64_t rows, std::int64_t heads,
                        std::int64_t dim, std::int64_t dim_v);

/// K and V in one memory, which the first of them guards. Dimensions of size 1 have any stride.
std::array<GuardedTensor, 2> cache_in_one_memory(const Case& c, std::uint64_t layout_seed);

/// Pages or slots of a case's cache.
std::int64_t cache_count(const Problem& p);

/// int32 [batch]: lengths, or left padding.
GuardedTensor cache_integers(const Case& c, const std::vector<std::int64_t>& values, std::uint64_t layout_seed);

/// int32 [batch, pages of a sequence]. Entries of pages that hold no key that a query sees are those of an evicted
/// page: -1, numbers that no page has, and page 0.
GuardedTensor cache_page_table(const Case& c, std::uint64_t layout_seed);

/// Sets the rows of K or V that no query sees to NaN, infinity or a huge number.
void poison_unused_rows(const Case& c, const TensorView& t, std::uint64_t seed);

}  // namespace tessera::check
