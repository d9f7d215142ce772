// SPDX-License-Identifier: Apache-2.0
//
// Sequences whose keys are in a cache. Their lengths may be in device memory alone and are unchecked: the clamps here
// keep every row inside the cache.
#pragma once

#include "cuda/tile/cache.hpp"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda {

/// A sequence, and the slot of its keys. Without pages, key j is row first_kv + j of the slot; with pages, of the
/// sequence's own pages.
struct CachedSequence {
    Sequence sequence;
    std::int64_t slot = 0;
    std::int64_t first_query = 0;  ///< counted over all sequences
};

__device__ __forceinline__ CachedSequence cached_sequence_of(const ForwardParams& p, const Cache& cache, int batch) {
    if (cache.lengths == nullptr) {
        const Sequence sequence = sequence_of(p, batch);
        return {sequence, batch, p.cu_seqlens_q == nullptr ? std::int64_t{batch} * p.len_q : sequence.first_q};
    }
    CachedSequence m{{0, 0, p.len_q, 0}, batch, std::int64_t{batch} * p.len_q};
    if (p.cu_seqlens_q != nullptr) {
        const std::int64_t begin = cu_seqlens_at(p.cu_seqlens_q, batch * p.cu_stride_q, p.cu_q_is_64, p.total_q);
        const std::int64_t end = cu_seqlens_at(p.cu_seqlens_q, (batch + 1) * p.cu_stride_q, p.cu_q_is_64, p.total_q);
        m.sequence.first_q = m.first_query = begin;
        m.sequence.len_q = static_cast<int>(min(max(end - begin, std::int64_t{0}), std::int64_t{p.len_q}));
    }
    const int end = min(max(cache.lengths[batch * cache.lengths_step], 0), p.len_kv);
    const int padding = cache.padding == nullptr ? 0 : min(max(cache.padding[batch * cache.padding_step], 0), end);
    m.sequence.first_kv = padding;
    m.sequence.len_kv = end - padding;
    if (cache.slots != nullptr) m.slot = cache.slots[batch * cache.slots_step];
    const bool exists = cache.pages != nullptr || (m.slot >= 0 && m.slot < cache.count);
    if (!exists) m.sequence.len_kv = 0;
    return m;
}

}  // namespace tessera::cuda
