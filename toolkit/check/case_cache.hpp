// SPDX-License-Identifier: Apache-2.0
//
// The tensors of a case on a cache of keys. Without pages sequence b has slot b; with pages it has its own ones, and
// the sequences lie in the cache from its end on.
#pragma once

#include "check/case.hpp"
#include "check/guarded.hpp"

namespace tessera::check {

/// int32 [batch]: lengths, or left padding.
GuardedTensor cache_integers(const Case& c, const std::vector<std::int64_t>& values, std::uint64_t layout_seed);

/// int32 [batch, pages of a sequence]; -1 for pages without a key.
GuardedTensor cache_page_table(const Case& c, std::uint64_t layout_seed);

/// Sets the rows of K or V that are no keys to NaN.
void poison_unused_rows(const Case& c, const TensorView& t);

}  // namespace tessera::check
