// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "tessera/attention.hpp"
#include "tessera/mask.hpp"
#include "tessera/problem.hpp"

namespace tessera {

/// Entry `index` of a cu_seqlens tensor (int32 or int64).
inline std::int64_t cu_seqlen(const TensorView& cu_seqlens, std::int64_t index) {
    return cu_seqlens.dtype == DType::int32 ? *cu_seqlens.at<const std::int32_t>(index)
                                            : *cu_seqlens.at<const std::int64_t>(index);
}

/// One sequence: its lengths and where its rows begin in a ragged tensor.
struct Sequence {
    std::int64_t batch = 0;
    std::int64_t first_q = 0;  ///< first row of this sequence in a ragged q; 0 when dense
    std::int64_t first_kv = 0;
    std::int64_t len_q = 0;
    std::int64_t len_kv = 0;
};

inline Sequence sequence_of(const Problem& problem, const TensorView& cu_q, const TensorView& cu_kv,
                            std::int64_t batch) {
    if (!problem.ragged) return {batch, 0, 0, problem.len_q, problem.len_kv};
    const std::int64_t q = cu_seqlen(cu_q, batch);
    const std::int64_t kv = cu_seqlen(cu_kv, batch);
    return {batch, q, kv, cu_seqlen(cu_q, batch + 1) - q, cu_seqlen(cu_kv, batch + 1) - kv};
}

/// The rows of one head of one sequence: element (row, column), whatever the layout. `data` is null when the tensor was
/// not given, whatever pointer its view has.
struct HeadRows {
    char* data = nullptr;
    DType dtype = DType::fp32;
    std::int64_t row_stride = 0;  ///< in elements
    std::int64_t column_stride = 0;

    void* at(std::int64_t row, std::int64_t column) const {
        return data + (row * row_stride + column * column_stride) * size_of(dtype);
    }
};

/// Stride of a dimension; 0 for one of size 1, which is never stepped and may have any stride.
inline std::int64_t step(const TensorView& t, std::size_t dimension) {
    return t.shape[dimension] == 1 ? 0 : t.strides[dimension];
}

/// Was the tensor given, and are there elements to point at? No offset may be added to the null of an empty tensor.
inline bool has_elements(const TensorView& t) { return t.given() && t.data != nullptr; }

/// Rows of a [batch, len, heads, dim] or ragged [total, heads, dim] tensor; `first` is the sequence's first ragged row.
inline HeadRows head_rows(const TensorView& t, const Sequence& sequence, std::int64_t first, std::int64_t head) {
    if (!has_elements(t)) return {};
    auto* base = static_cast<char*>(t.data);
    if (t.rank == 3) {
        return {base + (first * step(t, 0) + head * step(t, 1)) * size_of(t.dtype), t.dtype, step(t, 0), step(t, 2)};
    }
    return {base + (sequence.batch * step(t, 0) + head * step(t, 2)) * size_of(t.dtype), t.dtype, step(t, 1),
            step(t, 3)};
}

/// The LSE entries of one head: [batch, heads, len] or ragged [heads, total]; one column.
inline HeadRows lse_rows(const TensorView& t, const Sequence& sequence, std::int64_t head) {
    if (!has_elements(t)) return {};
    auto* base = static_cast<char*>(t.data);
    if (t.rank == 2) {
        return {base + (head * step(t, 0) + sequence.first_q * step(t, 1)) * size_of(t.dtype), t.dtype, step(t, 1), 0};
    }
    return {base + (sequence.batch * step(t, 0) + head * step(t, 1)) * size_of(t.dtype), t.dtype, step(t, 2), 0};
}

/// The [len_q, len_kv] matrix of a bias (or dbias) for one head: sizes 1 are broadcast by stride 0.
inline HeadRows bias_rows(const TensorView& t, std::int64_t batch, std::int64_t head) {
    if (!has_elements(t)) return {};
    auto* base = static_cast<char*>(t.data) + (batch * step(t, 0) + head * step(t, 1)) * size_of(t.dtype);
    return {base, t.dtype, step(t, 2), step(t, 3)};
}

/// The sink of each query of one head, one column: [heads_q], or [heads, len_q] where query heads are stacked as rows
/// (stack_heads.hpp).
inline HeadRows sink_rows(const TensorView& t, std::int64_t head) {
    if (!has_elements(t)) return {};
    auto* base = static_cast<char*>(t.data) + head * step(t, 0) * size_of(t.dtype);
    return {base, t.dtype, t.rank == 2 ? step(t, 1) : 0, 0};
}

/// ALiBi slope of one head: [heads_q] or [batch, heads_q]; 0 without ALiBi.
inline float alibi_slope(const TensorView& t, std::int64_t batch, std::int64_t head) {
    if (!t.given()) return 0.0F;
    return t.rank == 1 ? *t.at<const float>(head) : *t.at<const float>(batch, head);
}

}  // namespace tessera
