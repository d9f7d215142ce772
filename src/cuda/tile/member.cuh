// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tile/params.hpp"

namespace tessera::cuda {

/// Entry `index` of a cu_seqlens tensor, whatever it holds: clamped to [0, total].
__device__ __forceinline__ std::int64_t cu_seqlen(const void* data, bool is_64, std::int64_t stride, std::int64_t index,
                                                  std::int64_t total) {
    const std::int64_t value = is_64 ? static_cast<const std::int64_t*>(data)[index * stride]
                                     : static_cast<const std::int32_t*>(data)[index * stride];
    return value < 0 ? 0 : value > total ? total : value;
}

/// Lengths and first rows of a batch member. A malformed cu_seqlens can't be reported from here, but leads to no access
/// outside of the tensors: begins and lengths are clamped to the totals and to the Problem's bounds.
__device__ __forceinline__ Member member_of(const ForwardParams& p, std::int64_t batch) {
    if (p.cu_seqlens_q == nullptr) return {0, 0, p.len_q, p.len_kv};
    Member m;
    m.first_q = cu_seqlen(p.cu_seqlens_q, p.cu_q_is_64, p.cu_stride_q, batch, p.total_q);
    m.first_kv = cu_seqlen(p.cu_seqlens_kv, p.cu_kv_is_64, p.cu_stride_kv, batch, p.total_kv);
    const std::int64_t len_q = cu_seqlen(p.cu_seqlens_q, p.cu_q_is_64, p.cu_stride_q, batch + 1, p.total_q) - m.first_q;
    const std::int64_t len_kv =
        cu_seqlen(p.cu_seqlens_kv, p.cu_kv_is_64, p.cu_stride_kv, batch + 1, p.total_kv) - m.first_kv;
    m.len_q = len_q < 0 ? 0 : len_q > p.len_q ? p.len_q : static_cast<int>(len_q);
    m.len_kv = len_kv < 0 ? 0 : len_kv > p.len_kv ? p.len_kv : static_cast<int>(len_kv);
    return m;
}

}  // namespace tessera::cuda
