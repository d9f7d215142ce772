// SPDX-License-Identifier: Apache-2.0
//
// The primitives of AVX512-BF16 for few queries (decoding): bf16 with keys in the lanes, as simd/few_queries.hpp. K and
// V are not packed: words of two elements are transposed or interleaved in registers, so reading them is the limit.
// Each row has the bits of primitives.hpp on this unit, since VDPBF16PS adds the same pairs in the same order. AMX adds
// in another order and has none of these.
#pragma once

#include <cstdint>

#include "cpu/matrix/primitives.hpp"
#include "tessera/mask.hpp"

namespace tessera::cpu::matrix {

/// Queries that one call of row_scores() and row_values() takes.
inline constexpr std::int64_t kMostRows = 8;

/// S = Q K^T for keys first .. first + keys of K.
struct RowScores {
    const Bf16* q = nullptr;  ///< [queries, q_stride], padded with 0 to a multiple of 32
    std::int64_t q_stride = 0;
    std::int64_t queries = 0;
    HeadRows k;                         ///< contiguous rows
    const void* const* rows = nullptr;  ///< in pages: the addresses of keys and kRowsAhead rows from `first` on
    std::int64_t first = 0;
    std::int64_t keys = 0;
    std::int64_t dim = 0;
    float* s = nullptr;  // [queries, s_stride], s_stride: a multiple of 32, at least keys
    std::int64_t s_stride = 0;
};

/// WeightsJob for one row of scores. P and its rows beyond the keys, up to a multiple of 32, are written.
struct RowWeights {
    float* s = nullptr;  ///< [keys], replaced by unrounded weights
    std::int64_t keys = 0;
    Range seen;  ///< other keys get weight 0
    float scale = 1;
    float offset = 0;
    float* m = nullptr;
    float* l = nullptr;
    Bf16* p = nullptr;  // [keys]
};

/// O = P V, and the sum of P as the unit adds it.
struct RowValues {
    const Bf16* p = nullptr;  // [queries, p_stride]
    std::int64_t p_stride = 0;
    std::int64_t queries = 0;
    HeadRows v;                         ///< contiguous rows
    const void* const* rows = nullptr;  ///< as in RowScores
    std::int64_t first = 0;
    std::int64_t keys = 0;
    std::int64_t dim = 0;
    float* const* o = nullptr;  ///< [queries] rows of round_up(dim, 16) floats
    std::int64_t sum_at = 0;    ///< o[i][sum_at] = the sum of P
};

/// The primitives. row_values returns whether all of O is finite; only then it has the bits of O = P V without hidden
/// keys.
struct RowPrimitives {
    void (*row_scores)(const RowScores&);
    void (*row_weights)(const RowWeights&);
    bool (*row_values)(const RowValues&);
};

}  // namespace tessera::cpu::matrix
