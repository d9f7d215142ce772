// SPDX-License-Identifier: Apache-2.0
//
// One sequence of a call: its lengths and first rows. cu_seqlens of a varlen call are in device memory and unchecked.
// Whatever they hold, the clamps here keep every row inside the tensors.
#pragma once

#include "cuda/host/query_tiles.hpp"
#include "cuda/tile/params.hpp"

namespace tessera::cuda {

/// Element `index` of cu_seqlens, moved into [0, total].
__device__ __forceinline__ std::int64_t cu_seqlens_at(const void* cu_seqlens, std::int64_t index, bool is_64,
                                                      std::int64_t total) {
    const std::int64_t value = is_64 ? static_cast<const std::int64_t*>(cu_seqlens)[index]
                                     : static_cast<const std::int32_t*>(cu_seqlens)[index];
    return min(max(value, std::int64_t{0}), total);
}

__device__ __forceinline__ Sequence sequence_of(const ForwardParams& p, std::int64_t batch) {
    if (p.cu_seqlens_q == nullptr) return {0, 0, p.len_q, p.len_kv};
    const std::int64_t begin_q = cu_seqlens_at(p.cu_seqlens_q, batch * p.cu_stride_q, p.cu_q_is_64, p.total_q);
    const std::int64_t end_q = cu_seqlens_at(p.cu_seqlens_q, (batch + 1) * p.cu_stride_q, p.cu_q_is_64, p.total_q);
    const std::int64_t begin_kv = cu_seqlens_at(p.cu_seqlens_kv, batch * p.cu_stride_kv, p.cu_kv_is_64, p.total_kv);
    const std::int64_t end_kv = cu_seqlens_at(p.cu_seqlens_kv, (batch + 1) * p.cu_stride_kv, p.cu_kv_is_64, p.total_kv);
    return {begin_q, begin_kv,
            static_cast<int>(min(max(end_q - begin_q, std::int64_t{0}), static_cast<std::int64_t>(p.len_q))),
            static_cast<int>(min(max(end_kv - begin_kv, std::int64_t{0}), static_cast<std::int64_t>(p.len_kv)))};
}

/// Does this sequence begin past its end? Then cu_seqlens_q is invalid and sequences overlap. CTAs that add to dQ in a
/// fixed order would wait for each other forever, so a backward that finds such a sequence lists no key block, or (fa1)
/// waits for nothing.
__device__ __forceinline__ bool cu_seqlens_decrease(const ForwardParams& p, std::int64_t batch) {
    if (p.cu_seqlens_q == nullptr) return false;
    return cu_seqlens_at(p.cu_seqlens_q, (batch + 1) * p.cu_stride_q, p.cu_q_is_64, p.total_q) <
           cu_seqlens_at(p.cu_seqlens_q, batch * p.cu_stride_q, p.cu_q_is_64, p.total_q);
}

/// Do the keys of this sequence begin past their end?
__device__ __forceinline__ bool keys_decrease(const ForwardParams& p, std::int64_t batch) {
    return cu_seqlens_at(p.cu_seqlens_kv, (batch + 1) * p.cu_stride_kv, p.cu_kv_is_64, p.total_kv) <
           cu_seqlens_at(p.cu_seqlens_kv, batch * p.cu_stride_kv, p.cu_kv_is_64, p.total_kv);
}

/// The tile of queries at `index` of a head of all sequences.
__device__ __forceinline__ QueryTile ragged_tile(const ForwardParams& p, int index, int block_q) {
    return ragged_tile(static_cast<int>(p.batch), index, block_q, [&](int sequence) {
        return cu_seqlens_at(p.cu_seqlens_q, sequence * p.cu_stride_q, p.cu_q_is_64, p.total_q);
    });
}

/// Bytes from the tensor's first element to row 0 of the sequence's head, for elements of `size` bytes.
__device__ __forceinline__ std::int64_t head_offset(const Rows& rows, std::int64_t batch, std::int64_t first_row,
                                                    int head, int size) {
    return (batch * rows.batch + first_row * rows.row + head * rows.head) * size;
}

}  // namespace tessera::cuda
