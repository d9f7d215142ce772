// SPDX-License-Identifier: Apache-2.0
//
// The primitives of the SIMD path for few queries (decoding). With queries in the lanes (primitives.hpp), most lanes of
// one to eight queries would be padding. Here KEYS LIE IN THE LANES of the scores and head_dim_v in those of O, so each
// vector of K and V takes one multiply-add per query, and reading them is the limit:
//
//   S [queries, keys]       = Q K^T: blocks of K are transposed in registers, Q is broadcast
//   O [queries, head_dim_v] = P V: V is used as it lies in memory, P is broadcast
//
// In the backward dP = dO V^T is a tile of scores, and dQ = dS K one of values.
//
// Each row has the bits that the primitives with queries in the lanes give it: the same operations in the same order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/simd/primitives.hpp"

namespace tessera::cpu::simd {

/// Rows of K and V are prefetched this far ahead, since the hardware prefetcher does not follow blocks of 16 rows.
/// Measured on Zen 4 (2026-11) from the L3 cache: 16 to 64 rows are alike and 1.3 times as fast as none.
inline constexpr std::int64_t kRowsAhead = 32;

/// Rows of contiguous elements of K or V in fp32 or bf16, which is widened in registers.
struct ElementRows {
    const void* data = nullptr;
    std::int64_t stride = 0;  ///< elements from row to row
    DType dtype = DType::fp32;
    const void* const* rows = nullptr;  ///< [keys + kRowsAhead]: addresses of rows in pages; null: evenly spaced
};

/// Row `key` of a tile.
template <class T>
inline const T* row_of(const ElementRows& x, std::int64_t key) {
    return x.rows != nullptr ? static_cast<const T*>(x.rows[key]) : static_cast<const T*>(x.data) + key * x.stride;
}

/// Bytes from row `key` of a tile to the row to prefetch with it.
template <class T>
inline std::int64_t bytes_ahead(const ElementRows& x, std::int64_t key) {
    if (x.rows == nullptr) return kRowsAhead * x.stride * static_cast<std::int64_t>(sizeof(T));
    return reinterpret_cast<std::intptr_t>(x.rows[key + kRowsAhead]) - reinterpret_cast<std::intptr_t>(x.rows[key]);
}

/// Addresses of rows first .. first + count that are before `end`, in pages; then the last of them is repeated.
inline void row_addresses(const HeadRows& x, std::int64_t first, std::int64_t count, std::int64_t end,
                          const void** addresses) {
    const std::int64_t present = std::min(count, end - first);
    for_each_run(x, first, present, [&](const void* address, std::int64_t i, std::int64_t rows) {
        const auto* at = static_cast<const char*>(address);
        for (std::int64_t r = 0; r < rows; ++r, at += x.row_stride * size_of(x.dtype)) addresses[i + r] = at;
    });
    for (std::int64_t i = present; i < count; ++i) addresses[i] = addresses[present - 1];
}

/// Rows first .. first + keys of K or V: where they lie, or a copy in fp32. `whole`: vectors read whole rows. copy:
/// [keys, stride]. For rows in pages: addresses: [keys + kRowsAhead]; end: one past the last row of the sequence
inline ElementRows element_rows(const HeadRows& x, std::int64_t first, std::int64_t keys, std::int64_t dim, bool whole,
                                float* copy, std::int64_t stride, const void** addresses = nullptr,
                                std::int64_t end = 0) {
    const bool in_place = x.dtype != DType::fp16 && x.column_stride == 1 && (!whole || dim % kLanes == 0);
    if (in_place && x.paged()) {
        row_addresses(x, first, keys + kRowsAhead, end, addresses);
        return {addresses[0], x.row_stride, x.dtype, addresses};
    }
    if (in_place) return {x.at(first, 0), x.row_stride, x.dtype};
    load_rows(x, first, keys, dim, copy, stride);
    return {copy, stride, DType::fp32};
}

/// S = Q K^T for one tile of keys. Sums over head_dim are cut where matmul_scores() cuts them. Rows of K after the tile
/// are prefetched, as a part of the same matrix.
struct RowScores {
    const float* q = nullptr;  // [queries, q_stride]
    std::int64_t q_stride = 0;
    std::int64_t queries = 0;
    ElementRows k;  // [keys, dim]
    std::int64_t keys = 0;
    std::int64_t dim = 0;
    float* s = nullptr;  // [queries, s_stride], s_stride >= padded(keys)
    std::int64_t s_stride = 0;
};
void row_scores(const RowScores& job);

/// online_softmax() for scores [queries, stride]. seen[i]: the keys of the tile that query i sees; the weights of all
/// others, up to padded(keys), become 0. Tiles have at most kMostRowKeys keys, which online_softmax() sums in one
/// block.
inline constexpr std::int64_t kMostRowKeys = 256;
void row_softmax(float* s, std::int64_t queries, std::int64_t stride, std::int64_t keys, const Range* seen,
                 const RowState& state, float* rescale);

/// O = O * rescale + P V for one tile of keys, or O = P V. Query i adds the keys seen[i] only, so a hidden NaN does not
/// reach it.
struct RowValues {
    const float* p = nullptr;  // [queries, p_stride]
    std::int64_t p_stride = 0;
    std::int64_t queries = 0;
    const Range* seen = nullptr;  // [queries]
    ElementRows v;                // [keys, dim], padded(dim) elements of each row can be read
    std::int64_t dim = 0;
    float* o = nullptr;  // [queries, o_stride]
    std::int64_t o_stride = 0;
    const float* rescale = nullptr;  ///< [queries], or null: O = P V
};
void row_values(const RowValues& job);

// ---- The backward -----------------------------------------------------------------------------------------

/// Scores and dP of some rows, or P and dS: both [queries, stride].
struct RowGradients {
    float* p = nullptr;
    float* dp = nullptr;
    std::int64_t queries = 0;
    std::int64_t stride = 0;  ///< at least padded(keys)
    std::int64_t keys = 0;
    const Range* seen = nullptr;  ///< [queries], as in row_softmax()
};

/// weights_from_lse(): p = exp(p - lse) * norm. p and dp of hidden pairs become 0. lse, norm: [queries]; norm may be
/// null
void row_weights_from_lse(const RowGradients& job, const float* lse, const float* norm);

/// The sums that add_weighted_sums() makes of one tile, in fp32: weights[i] = sum of p, products[i] = sum of p * dp.
void row_weighted_sums(const RowGradients& job, float* weights, float* products);

/// softmax_gradient(): dp = p * (dp - delta), 0 for hidden pairs. delta: [queries]
void row_softmax_gradient(const RowGradients& job, const float* delta);

}  // namespace tessera::cpu::simd
