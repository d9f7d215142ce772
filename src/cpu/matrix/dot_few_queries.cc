// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include <hwy/base.h>
#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/matrix/few_queries.hpp"
#include "cpu/matrix/units.hpp"
#include "cpu/simd/exp.hpp"
#include "cpu/simd/few_queries.hpp"
#include "cpu/simd/simd.hpp"

HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")
namespace tessera::cpu::matrix {
namespace {

#include "cpu/matrix/inl/parts-inl.hpp"
// These use parts-inl.hpp.
#include "cpu/matrix/inl/pack-inl.hpp"
// This uses pack-inl.hpp.
#include "cpu/matrix/inl/softmax-inl.hpp"

constexpr std::int64_t kKeys = 16;  // of a vector of scores

using simd::kRowsAhead;

/// 32 elements of a row, or the first `count` of them and 0 beyond. Prefetches the elements of the row at `ahead`. This
/// is an integer, since it may be an address past the tensor, for which a prefetch does nothing.
template <bool kWhole>
HWY_INLINE __m512i read(const Bf16* at, std::int64_t count, std::intptr_t ahead) {
    __builtin_prefetch(reinterpret_cast<const void*>(ahead), 0, 2);
    if constexpr (kWhole) return _mm512_loadu_si512(at);
    else return _mm512_maskz_loadu_epi16(first_elements(count), at);
}

const Bf16* row_of(const HeadRows& x, std::int64_t row) { return static_cast<const Bf16*>(x.at(row, 0)); }
std::int64_t bytes_ahead(const HeadRows& x) { return kRowsAhead * x.row_stride * size_of(x.dtype); }
std::intptr_t address(const void* at) { return reinterpret_cast<std::intptr_t>(at); }

HWY_INLINE __m512bh broadcast_pair(const Bf16* pair) {
    std::int32_t word;
    std::memcpy(&word, pair, sizeof word);
    return from_bits(_mm512_set1_epi32(word));
}

/// 16 rows of keys and, in pages, the addresses of the rows to prefetch.
struct KeyRows {
    const Bf16* at[16];
    std::intptr_t ahead[16];
};

/// sums += the products of 32 elements of head_dim, from c on, for kQueries queries and 16 keys.
template <int kQueries, bool kWhole, bool kPaged>
HWY_INLINE void add_products(const RowScores& job, const KeyRows& rows, std::int64_t c, std::int64_t ahead,
                             __m512 (&sums)[kQueries]) {
    __m512i x[16];
    TESSERA_UNROLL for (int r = 0; r < 16; ++r) {
        const std::intptr_t next =
            kPaged ? rows.ahead[r] + c * std::intptr_t{sizeof(Bf16)} : address(rows.at[r] + c) + ahead;
        x[r] = read<kWhole>(rows.at[r] + c, job.dim - c, next);
    }
    transpose(x);
    const Bf16* q = job.q + c;
    TESSERA_UNROLL for (int j = 0; j < 16; ++j) {
        TESSERA_UNROLL for (int i = 0; i < kQueries; ++i) sums[i] =
            _mm512_dpbf16_ps(sums[i], broadcast_pair(q + i * job.q_stride + 2 * j), from_bits(x[j]));
    }
}

template <int kQueries, bool kPaged>
HWY_NOINLINE void scores_of(const RowScores& by_reference) {
    // Two vectors of keys hide the latency of one query's sums.
    constexpr int kBlocks = kQueries == 1 ? 2 : 1;
    const RowScores job = by_reference;  // stores of scores do not alias a copy
    const std::int64_t ahead = bytes_ahead(job.k);
    for (std::int64_t key = 0; key < job.keys; key += kBlocks * kKeys) {
        KeyRows rows[kBlocks];
        for (int b = 0; b < kBlocks; ++b) {
            for (int r = 0; r < 16; ++r) {  // the last key again in place of keys beyond it
                const std::int64_t row = std::min(job.keys - 1, key + b * kKeys + r);
                rows[b].at[r] = kPaged ? static_cast<const Bf16*>(job.rows[row]) : row_of(job.k, job.first + row);
                if (kPaged) rows[b].ahead[r] = address(job.rows[row + kRowsAhead]);
            }
        }
        __m512 sums[kBlocks][kQueries];
        TESSERA_UNROLL for (int b = 0; b < kBlocks; ++b) {
            TESSERA_UNROLL for (int i = 0; i < kQueries; ++i) sums[b][i] = _mm512_setzero_ps();
        }
        std::int64_t c = 0;
        for (; c + kTileDepth <= job.dim; c += kTileDepth) {
            TESSERA_UNROLL for (int b = 0; b < kBlocks; ++b)
                add_products<kQueries, true, kPaged>(job, rows[b], c, ahead, sums[b]);
        }
        if (c < job.dim) {
            TESSERA_UNROLL for (int b = 0; b < kBlocks; ++b)
                add_products<kQueries, false, kPaged>(job, rows[b], c, ahead, sums[b]);
        }
        TESSERA_UNROLL for (int i = 0; i < kQueries; ++i) {
            TESSERA_UNROLL for (int b = 0; b < kBlocks; ++b)
                _mm512_storeu_ps(job.s + i * job.s_stride + key + b * kKeys, sums[b][i]);
        }
    }
}

/// sums[i, c] = or += the products of pairs [begin, end) of keys, for kTiles x 32 columns of kQueries queries. With
/// kSum, sums of P too. rows: null, or the addresses of the rows from these pairs on, which lie in pages.
template <int kQueries, int kTiles, bool kSum, bool kWhole>
HWY_INLINE void value_block(const RowValues& job, const Bf16* p, std::int64_t begin, std::int64_t end,
                            std::int64_t column, const void* const* rows, float* sums, std::int64_t stride,
                            float* of_p) {
    const __m512bh ones = from_bits(_mm512_set1_epi32(0x3F803F80));
    const std::int64_t p_stride = job.p_stride;
    const std::int64_t row = job.v.row_stride;
    const std::int64_t count = job.dim - column;
    const std::int64_t ahead = bytes_ahead(job.v);
    __m512 sum[kQueries][2 * kTiles];
    __m512 p_sum[kQueries];
    TESSERA_UNROLL for (int i = 0; i < kQueries; ++i) {
        TESSERA_UNROLL for (int c = 0; c < 2 * kTiles; ++c) sum[i][c] =
            begin > 0 ? _mm512_loadu_ps(sums + i * stride + column + 16 * c) : _mm512_setzero_ps();
        if constexpr (kSum) p_sum[i] = begin > 0 ? _mm512_loadu_ps(of_p + 16 * i) : _mm512_setzero_ps();
    }
    // ahead_even, ahead_odd: the rows to prefetch
    const auto add_pair = [&](std::int64_t pair, const Bf16* v, const Bf16* next, std::intptr_t ahead_even,
                              std::intptr_t ahead_odd, auto is_whole_pair) {
        __m512bh weight[kQueries];
        TESSERA_UNROLL for (int i = 0; i < kQueries; ++i) {
            weight[i] = broadcast_pair(p + i * p_stride + 2 * pair);
            if constexpr (kSum) p_sum[i] = _mm512_dpbf16_ps(p_sum[i], weight[i], ones);
        }
        TESSERA_UNROLL for (int tile = 0; tile < kTiles; ++tile) {
            const __m512i even = read<kWhole>(v + 32 * tile, count, ahead_even + 64 * tile);
            const __m512i odd =
                is_whole_pair() ? read<kWhole>(next + 32 * tile, count, ahead_odd + 64 * tile) : _mm512_setzero_si512();
            const __m512bh low = from_bits(_mm512_unpacklo_epi16(even, odd));
            const __m512bh high = from_bits(_mm512_unpackhi_epi16(even, odd));
            TESSERA_UNROLL for (int i = 0; i < kQueries; ++i) {
                sum[i][2 * tile] = _mm512_dpbf16_ps(sum[i][2 * tile], weight[i], low);
                sum[i][2 * tile + 1] = _mm512_dpbf16_ps(sum[i][2 * tile + 1], weight[i], high);
            }
        }
    };
    const Bf16* v = rows != nullptr ? nullptr : row_of(job.v, job.first + 2 * begin) + column;
    const std::int64_t whole = std::min(end, job.keys / 2);
    for (std::int64_t pair = begin; rows == nullptr && pair < whole; ++pair, v += 2 * row)
        add_pair(pair, v, v + row, address(v) + ahead, address(v + row) + ahead, std::true_type());
    const auto row_at = [&](std::int64_t i) { return static_cast<const Bf16*>(rows[i]) + column; };
    for (std::int64_t pair = begin; rows != nullptr && pair < whole; ++pair) {
        const std::int64_t i = 2 * (pair - begin);
        add_pair(pair, row_at(i), row_at(i + 1), address(row_at(i + kRowsAhead)), address(row_at(i + kRowsAhead + 1)),
                 std::true_type());
    }
    if (rows != nullptr && whole < end) v = row_at(2 * (whole - begin));
    if (whole < end) add_pair(whole, v, nullptr, address(v), address(v), std::false_type());
    TESSERA_UNROLL for (int i = 0; i < kQueries; ++i) {
        TESSERA_UNROLL for (int c = 0; c < 2 * kTiles; ++c)
            _mm512_storeu_ps(sums + i * stride + column + 16 * c, sum[i][c]);
        if constexpr (kSum) _mm512_storeu_ps(of_p + 16 * i, p_sum[i]);
    }
}

/// Stores a row of sums whose 32 columns of a tile lie in two vectors: columns 0-3, 8-11, ..., then 4-7, 12-15, ...
/// Returns whether all are finite.
bool store_interleaved(const float* sums, std::int64_t dim, float* o) {
    const __m512i first_half = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second_half = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const __m512i exponent = _mm512_set1_epi32(0x7F800000);
    __mmask16 special = 0;
    for (std::int64_t c = 0; c < dim; c += 32) {
        const __m512i low = _mm512_loadu_si512(sums + c);
        const __m512i high = _mm512_loadu_si512(sums + c + 16);
        special |= _mm512_cmpeq_epi32_mask(_mm512_and_si512(low, exponent), exponent);
        special |= _mm512_cmpeq_epi32_mask(_mm512_and_si512(high, exponent), exponent);
        _mm512_storeu_si512(o + c, _mm512_permutex2var_epi64(low, first_half, high));
        if (c + 16 < dim) _mm512_storeu_si512(o + c + 16, _mm512_permutex2var_epi64(low, second_half, high));
    }
    return special == 0;
}

/// kQueries queries from `query` on.
template <int kQueries>
HWY_NOINLINE bool values_of(const RowValues& job, std::int64_t query) {
    constexpr int kTiles = kQueries <= 2 ? 4 : 2;
    constexpr std::int64_t kMaxDim = 256;
    alignas(64) float sums[kQueries][kMaxDim];
    alignas(64) float of_p[kQueries][16];
    const Bf16* p = job.p + query * job.p_stride;
    const std::int64_t pairs = (job.keys + 1) / 2;
    // If O is more than one block wide, some keys at a time: their rows of V stay in the L1 cache for all blocks.
    const std::int64_t at_once = job.dim > 32 * kTiles ? 8 : pairs;
    for (std::int64_t begin = 0; begin < pairs; begin += at_once) {
        const std::int64_t end = std::min(pairs, begin + at_once);
        std::int64_t column = 0;
        const auto run = [&](auto tiles, auto sum, auto whole) {
            value_block<kQueries, tiles(), sum(), whole()>(job, p, begin, end, column,
                                                           job.rows != nullptr ? job.rows + 2 * begin : nullptr,
                                                           sums[0], kMaxDim, of_p[0]);
            column += 32 * tiles();
        };
        constexpr std::integral_constant<int, kTiles> kWide{};
        constexpr std::integral_constant<int, 1> kNarrow{};
        constexpr std::true_type kYes{};
        constexpr std::false_type kNo{};
        if (job.dim >= 32 * kTiles) run(kWide, kYes, kYes);
        else if (job.dim >= 32) run(kNarrow, kYes, kYes);
        else run(kNarrow, kYes, kNo);
        while (column + 32 * kTiles <= job.dim) run(kWide, kNo, kYes);
        while (column + 32 <= job.dim) run(kNarrow, kNo, kYes);
        if (column < job.dim) run(kNarrow, kNo, kNo);
    }
    bool finite = true;
    for (int i = 0; i < kQueries; ++i) {
        finite = store_interleaved(sums[i], job.dim, job.o[query + i]) && finite;
        job.o[query + i][job.sum_at] = of_p[i][0];
    }
    return finite;
}

template <bool kPaged>
void scores(const RowScores& job) {
    switch (job.queries) {
        case 1: return scores_of<1, kPaged>(job);
        case 2: return scores_of<2, kPaged>(job);
        case 3: return scores_of<3, kPaged>(job);
        case 4: return scores_of<4, kPaged>(job);
        case 5: return scores_of<5, kPaged>(job);
        case 6: return scores_of<6, kPaged>(job);
        case 7: return scores_of<7, kPaged>(job);
        default: return scores_of<8, kPaged>(job);
    }
}

void row_scores(const RowScores& job) { job.rows != nullptr ? scores<true>(job) : scores<false>(job); }

/// sum += the weights of each tile: those of its even keys, one after another, plus those of its odd keys. The chains
/// of several tiles hide the latency.
template <int kTiles>
HWY_INLINE void add_tiles(const float* weights, float& sum) {
    __m128 sums[kTiles];  // lanes 0 and 1: even and odd keys
    TESSERA_UNROLL for (int i = 0; i < kTiles; ++i) sums[i] = _mm_setzero_ps();
    for (std::int64_t key = 0; key < kTileDepth; key += 2) {
        TESSERA_UNROLL for (int i = 0; i < kTiles; ++i) {
            const auto* even_and_odd = reinterpret_cast<const double*>(weights + key + i * kTileDepth);
            sums[i] = _mm_add_ps(sums[i], _mm_castpd_ps(_mm_load_sd(even_and_odd)));
        }
    }
    TESSERA_UNROLL for (int i = 0; i < kTiles; ++i) {
        sum = sum + (_mm_cvtss_f32(sums[i]) + _mm_cvtss_f32(_mm_movehdup_ps(sums[i])));
    }
}

void row_weights(const RowWeights& job) {
    constexpr float kLowestScore = -std::numeric_limits<float>::infinity();
    const auto seen_from = [&](std::int64_t key) {
        const std::int64_t low = std::clamp<std::int64_t>(job.seen.begin - key, 0, 16);
        const std::int64_t high = std::clamp<std::int64_t>(job.seen.end - key, low, 16);
        return static_cast<__mmask16>(((1U << high) - 1) & ~((1U << low) - 1));
    };
    __m512 maximum = _mm512_set1_ps(kLowestScore);
    for (std::int64_t key = 0; key < job.keys; key += 16)
        maximum = _mm512_mask_max_ps(maximum, seen_from(key), maximum, _mm512_loadu_ps(job.s + key));
    // The arithmetic is that of WeightsInSteps; all lanes are alike.
    const __m512 scale = _mm512_set1_ps(job.scale);
    const __m512 m = _mm512_mul_ps(_mm512_set1_ps(_mm512_reduce_max_ps(maximum)), scale);
    *job.m = _mm512_cvtss_f32(m);
    __m512 shift =
        _mm512_mask_mov_ps(m, _mm512_cmp_ps_mask(m, _mm512_set1_ps(kLowestScore), _CMP_EQ_OQ), _mm512_setzero_ps());
    const __m512 with_offset = _mm512_add_ps(shift, _mm512_set1_ps(job.offset));
    const __m512 added = _mm512_sub_ps(with_offset, shift);
    shift = with_offset;
    const std::int64_t rows = (job.keys + kTileDepth - 1) / kTileDepth * kTileDepth;
    for (std::int64_t key = 0; key < rows; key += 16) {
        const __m512 x = _mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(job.s + key), scale), shift);
        const __m512 p = _mm512_maskz_mov_ps(seen_from(key), exp_of_nonpositive(x, kLowest<1>));
        _mm512_storeu_ps(job.s + key, p);
        const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(p), _mm512_set1_epi32(0x8000));  // to_bf16_pairs()
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(job.p + key),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
    }
    float sum = 0;
    std::int64_t key = 0;
    for (; key + 4 * kTileDepth <= rows; key += 4 * kTileDepth) add_tiles<4>(job.s + key, sum);
    for (; key < rows; key += kTileDepth) add_tiles<1>(job.s + key, sum);
    *job.l = sum / _mm512_cvtss_f32(exp_of_nonpositive(_mm512_sub_ps(_mm512_setzero_ps(), added), kLowest<1>));
}

bool row_values(const RowValues& job) {
    constexpr std::int64_t kMost = 4;
    bool finite = true;
    for (std::int64_t query = 0; query < job.queries; query += kMost) {
        switch (std::min(kMost, job.queries - query)) {
            case 1: finite = values_of<1>(job, query) && finite; break;
            case 2: finite = values_of<2>(job, query) && finite; break;
            case 3: finite = values_of<3>(job, query) && finite; break;
            default: finite = values_of<4>(job, query) && finite; break;
        }
    }
    return finite;
}

}  // namespace

const RowPrimitives kDotRowPrimitives = {
    .row_scores = row_scores, .row_weights = row_weights, .row_values = row_values};

}  // namespace tessera::cpu::matrix
HWY_POP_ATTRIBUTES
