// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd/few_queries.hpp"

#include <algorithm>
#include <limits>

#include "core/numeric.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/few_queries.cc"
#include <hwy/foreach_target.h>  // first: it compiles this file once for each target

#include <hwy/highway.h>

#include "cpu/simd/exp-inl.hpp"
#include "cpu/simd/simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
using Two = hn::FixedTag<float, 2>;
using Four = hn::FixedTag<float, 4>;

constexpr std::int64_t kWidth = static_cast<std::int64_t>(hn::MaxLanes(D()));
constexpr bool kFewRegisters = HWY_ARCH_X86 && HWY_TARGET >= HWY_AVX2;  // 16, otherwise 32

/// Prefetches the line `bytes` after `at` into the L2 cache. The address is an integer, since it may lie beyond the
/// tensor, where a prefetch does nothing.
HWY_INLINE void prefetch(const void* at, std::int64_t bytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::intptr_t>(at) + bytes), 0, 2);
}

HWY_INLINE V load(const float* from) { return hn::LoadU(D(), from); }
HWY_INLINE V load(const Bf16* from) {
    const hn::RebindToUnsigned<D> words;
    return hn::BitCast(D(),
                       hn::ShiftLeft<16>(hn::PromoteTo(words, hn::LoadU(hn::Rebind<std::uint16_t, D>(), &from->bits))));
}

HWY_INLINE float to_fp32(float x) { return x; }
HWY_INLINE float to_fp32(Bf16 x) { return to_float(x); }

/// Transposes kWidth x kWidth numbers: x[r] is row r on entry and column r on return.
HWY_INLINE void transpose(V (&x)[kWidth]) {
    const D d;
    const hn::Repartition<std::uint64_t, D> pairs;
    V y[kWidth];
    TESSERA_UNROLL for (int r = 0; r < kWidth; r += 2) {
        y[r] = hn::InterleaveLower(d, x[r], x[r + 1]);
        y[r + 1] = hn::InterleaveUpper(d, x[r], x[r + 1]);
    }
    const auto as_pairs = [&](V v) HWY_ATTR { return hn::BitCast(pairs, v); };
    TESSERA_UNROLL for (int r = 0; r < kWidth; r += 4) {  // block b of x[r + i]: column 4b + i of rows r .. r + 3
        x[r] = hn::BitCast(d, hn::InterleaveLower(pairs, as_pairs(y[r]), as_pairs(y[r + 2])));
        x[r + 1] = hn::BitCast(d, hn::InterleaveUpper(pairs, as_pairs(y[r]), as_pairs(y[r + 2])));
        x[r + 2] = hn::BitCast(d, hn::InterleaveLower(pairs, as_pairs(y[r + 1]), as_pairs(y[r + 3])));
        x[r + 3] = hn::BitCast(d, hn::InterleaveUpper(pairs, as_pairs(y[r + 1]), as_pairs(y[r + 3])));
    }
    if constexpr (kWidth == 8) {
        TESSERA_UNROLL for (int i = 0; i < 4; ++i) {
            const V low = hn::ConcatLowerLower(d, x[4 + i], x[i]);
            x[4 + i] = hn::ConcatUpperUpper(d, x[4 + i], x[i]);
            x[i] = low;
        }
    } else if constexpr (kWidth == 16) {
        const auto even_blocks = [](V a, V b) HWY_ATTR { return hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b), a); };
        const auto odd_blocks = [](V a, V b) HWY_ATTR { return hn::OddEvenBlocks(b, hn::SwapAdjacentBlocks(a)); };
        TESSERA_UNROLL for (int i = 0; i < 4; ++i) {
            const V low0 = hn::ConcatLowerLower(d, x[8 + i], x[i]);  // blocks 0 and 1 of rows 0-3, then of 8-11
            const V low1 = hn::ConcatLowerLower(d, x[12 + i], x[4 + i]);
            const V high0 = hn::ConcatUpperUpper(d, x[8 + i], x[i]);
            const V high1 = hn::ConcatUpperUpper(d, x[12 + i], x[4 + i]);
            x[i] = even_blocks(low0, low1);
            x[4 + i] = odd_blocks(low0, low1);
            x[8 + i] = even_blocks(high0, high1);
            x[12 + i] = odd_blocks(high0, high1);
        }
    }
}

/// sums += the products of a vector of words of kWidth keys: kWidth numbers of fp32, or 2 kWidth of bf16, where a word
/// is two of them.
template <int kQueries, class T>
HWY_INLINE void add_products(const T* const (&rows)[kWidth], std::int64_t c, std::int64_t ahead, const float* q,
                             std::int64_t q_stride, V (&sums)[kQueries]) {
    const D d;
    V x[kWidth];
    TESSERA_UNROLL for (int r = 0; r < kWidth; ++r) {
        prefetch(rows[r] + c, ahead);
        x[r] = hn::LoadU(d, reinterpret_cast<const float*>(rows[r] + c));
    }
    transpose(x);
    const auto add = [&](V column, std::int64_t at) HWY_ATTR {
        TESSERA_UNROLL for (int i = 0; i < kQueries; ++i) sums[i] =
            hn::MulAdd(hn::Set(d, q[i * q_stride + at]), column, sums[i]);
    };
    TESSERA_UNROLL for (int j = 0; j < kWidth; ++j) {
        if constexpr (sizeof(T) == sizeof(float)) {
            add(x[j], c + j);
        } else {
            const hn::RebindToUnsigned<D> words;
            const auto pair = hn::BitCast(words, x[j]);
            add(hn::BitCast(d, hn::ShiftLeft<16>(pair)), c + 2 * j);
            add(hn::BitCast(d, hn::And(pair, hn::Set(words, 0xFFFF0000U))), c + 2 * j + 1);
        }
    }
}

/// The scores of kQueries queries and one vector of keys, from `key` on.
template <int kQueries, class T>
HWY_INLINE void score_block(const RowScores& job, const float* q, float* s, std::int64_t key) {
    constexpr std::int64_t kLongestSum = 64;  // matmul_scores()
    constexpr std::int64_t kAtOnce = kWidth * static_cast<std::int64_t>(sizeof(float) / sizeof(T));
    const D d;
    const std::int64_t dim = job.dim;
    const std::int64_t q_stride = job.q_stride;
    const std::int64_t ahead = bytes_ahead<T>(job.k, key);
    const T* rows[kWidth];
    for (int r = 0; r < kWidth; ++r)  // the last key again in place of keys beyond it
        rows[r] = row_of<T>(job.k, std::min(job.keys - 1, key + r));
    for (std::int64_t first = 0; first < dim; first += kLongestSum) {
        const std::int64_t end = std::min(dim, first + kLongestSum);
        V sums[kQueries];
        TESSERA_UNROLL for (int i = 0; i < kQueries; ++i) sums[i] = hn::Zero(d);
        std::int64_t c = first;
        for (; c + kAtOnce <= end; c += kAtOnce) add_products<kQueries>(rows, c, ahead, q, q_stride, sums);
        for (; c < end; ++c) {
            HWY_ALIGN float column[kWidth];
            for (int r = 0; r < kWidth; ++r) column[r] = to_fp32(rows[r][c]);
            const V x = hn::Load(d, column);
            TESSERA_UNROLL for (int i = 0; i < kQueries; ++i) sums[i] =
                hn::MulAdd(hn::Set(d, q[i * q_stride + c]), x, sums[i]);
        }
        TESSERA_UNROLL for (int i = 0; i < kQueries; ++i) {
            float* at = s + i * job.s_stride + key;
            hn::Store(first == 0 ? sums[i] : hn::Add(hn::Load(d, at), sums[i]), d, at);
        }
    }
}

template <int kQueries>
HWY_NOINLINE void scores_of(const RowScores& job, std::int64_t query) {
    const float* q = job.q + query * job.q_stride;
    float* s = job.s + query * job.s_stride;
    for (std::int64_t key = 0; key < job.keys; key += kWidth) {
        if (job.k.dtype == DType::bf16) score_block<kQueries, Bf16>(job, q, s, key);
        else score_block<kQueries, float>(job, q, s, key);
    }
}

void RowScoresOf(const RowScores& job) {
    constexpr std::int64_t kMost = kFewRegisters ? 4 : 8;
    for (std::int64_t query = 0; query < job.queries; query += kMost) {
        switch (std::min(kMost, job.queries - query)) {
            case 1: scores_of<1>(job, query); break;
            case 2: scores_of<2>(job, query); break;
            case 3: scores_of<3>(job, query); break;
            case 4: scores_of<4>(job, query); break;
            case 5: scores_of<(kMost > 4 ? 5 : 1)>(job, query); break;
            case 6: scores_of<(kMost > 4 ? 6 : 1)>(job, query); break;
            case 7: scores_of<(kMost > 4 ? 7 : 1)>(job, query); break;
            default: scores_of<(kMost > 4 ? 8 : 1)>(job, query); break;
        }
    }
}

/// The maximum to subtract, as in softmax.cc.
HWY_INLINE V shift_of(V maximum) {
    const D d;
    return hn::IfThenElse(hn::Eq(maximum, hn::Set(d, -std::numeric_limits<float>::infinity())), hn::Zero(d), maximum);
}

/// The maximum of the seen scores, in all lanes. A NaN makes the whole row NaN, whatever the maximum is.
HWY_INLINE V maximum_of_row(const float* s, const Range& seen) {
    const D d;
    V maximum = hn::Set(d, -std::numeric_limits<float>::infinity());
    std::int64_t j = seen.begin;
    for (; j + kWidth <= seen.end; j += kWidth) maximum = hn::Max(maximum, hn::LoadU(d, s + j));
    for (; j < seen.end; ++j) maximum = hn::Max(maximum, hn::Set(d, s[j]));
    return hn::MaxOfLanes(d, maximum);
}

/// Replaces a row of scores by exp(s - shift) and returns their sum. Lane i of `sum` takes every fourth key, as in
/// exponentiate() of softmax.cc.
HWY_INLINE float exponentiate_row(float* s, const Range& seen, std::int64_t keys, V shift) {
    const D d;
    for (std::int64_t j = seen.begin / kWidth * kWidth; j < seen.end; j += kWidth)
        hn::Store(exp_of_nonpositive(hn::Sub(hn::Load(d, s + j), shift)), d, s + j);
    for (std::int64_t j = 0; j < seen.begin; ++j) s[j] = 0;
    for (std::int64_t j = seen.end; j < padded(keys); ++j) s[j] = 0;
    const Four four;
    auto sum = hn::Zero(four);
    for (std::int64_t j = seen.begin / 4 * 4; j < seen.end; j += 4) sum = hn::Add(sum, hn::Load(four, s + j));
    HWY_ALIGN float parts[4];
    hn::Store(sum, four, parts);
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

/// Each row's state is in all lanes of vectors, so that its arithmetic is that of softmax.cc.
void RowSoftmax(float* s, std::int64_t queries, std::int64_t stride, std::int64_t keys, const Range* seen,
                const RowState& state, float* rescale) {
    const D d;
    for (std::int64_t i = 0; i < queries; ++i) {
        const V old = hn::Set(d, state.m[i]);
        const V maximum = hn::Max(old, maximum_of_row(s + i * stride, seen[i]));
        const V shift = shift_of(maximum);
        const V alpha = exp_of_nonpositive(hn::Sub(old, shift));
        const float sum = exponentiate_row(s + i * stride, seen[i], keys, shift);
        state.m[i] = hn::GetLane(maximum);
        rescale[i] = hn::GetLane(alpha);
        state.l[i] = hn::GetLane(hn::MulAdd(hn::Set(d, state.l[i]), alpha, hn::Set(d, sum)));
    }
}

/// sums[i, c] = or += the products of some keys, for kVectors vectors of kQueries queries from `query` on.
template <int kQueries, int kVectors, class T>
HWY_INLINE void value_block(const RowValues& job, std::int64_t query, const Range& keys, bool add, std::int64_t column,
                            float* HWY_RESTRICT sums, std::int64_t stride) {
    const D d;
    const bool paged = job.v.rows != nullptr;
    const T* HWY_RESTRICT v = row_of<T>(job.v, keys.begin) + column;
    const float* HWY_RESTRICT p = job.p + query * job.p_stride;
    const std::int64_t p_stride = job.p_stride;
    const std::int64_t v_stride = job.v.stride;
    std::int64_t ahead = bytes_ahead<T>(job.v, keys.begin);
    V sum[kQueries][kVectors];
    TESSERA_UNROLL for (int i = 0; i < kQueries; ++i) {
        TESSERA_UNROLL for (int c = 0; c < kVectors; ++c) sum[i][c] =
            add ? hn::Load(d, sums + i * stride + column + c * kWidth) : hn::Zero(d);
    }
    for (std::int64_t key = keys.begin; key < keys.end; ++key, v += v_stride) {
        if (paged) {
            v = row_of<T>(job.v, key) + column;
            ahead = bytes_ahead<T>(job.v, key);
        }
        V weight[kQueries];
        TESSERA_UNROLL for (int i = 0; i < kQueries; ++i) weight[i] = hn::Set(d, p[i * p_stride + key]);
        TESSERA_UNROLL for (int c = 0; c < kVectors; ++c) {
            prefetch(v + c * kWidth, ahead);
            const V x = load(v + c * kWidth);
            TESSERA_UNROLL for (int i = 0; i < kQueries; ++i) sum[i][c] = hn::MulAdd(x, weight[i], sum[i][c]);
        }
    }
    TESSERA_UNROLL for (int i = 0; i < kQueries; ++i) {
        TESSERA_UNROLL for (int c = 0; c < kVectors; ++c)
            hn::Store(sum[i][c], d, sums + i * stride + column + c * kWidth);
    }
}

/// kQueries queries from `query` on, which see the same keys.
template <int kQueries, class T>
HWY_NOINLINE void values_of(const RowValues& job, std::int64_t query) {
    constexpr int kVectors = kFewRegisters ? (kQueries == 1 ? 8 : kQueries == 2 ? 4 : 2) : kQueries <= 3 ? 8 : 4;
    constexpr std::int64_t kMaxDim = 256;
    const D d;
    HWY_ALIGN float sums[kQueries][kMaxDim];
    const std::int64_t columns = padded(job.dim);
    const Range keys = job.seen[query];
    // If O is more than one block wide, some keys at a time: their rows of V stay in the L1 cache for all blocks.
    const std::int64_t at_once = columns <= kVectors * kWidth ? kMostRowKeys : 16;
    Range some{keys.begin, keys.begin};
    do {
        some = {some.end, std::min(keys.end, some.end + at_once)};
        const bool add = some.begin > keys.begin;
        std::int64_t column = 0;
        for (; column + kVectors * kWidth <= columns; column += kVectors * kWidth)
            value_block<kQueries, kVectors, T>(job, query, some, add, column, sums[0], kMaxDim);
        for (; column < columns; column += kWidth)
            value_block<kQueries, 1, T>(job, query, some, add, column, sums[0], kMaxDim);
    } while (some.end < keys.end);
    for (int i = 0; i < kQueries; ++i) {
        float* o = job.o + (query + i) * job.o_stride;
        for (std::int64_t c = 0; c < columns; c += kWidth) {
            V sum = hn::Load(d, sums[i] + c);
            if (job.rescale != nullptr) sum = hn::MulAdd(hn::Load(d, o + c), hn::Set(d, job.rescale[query + i]), sum);
            hn::Store(sum, d, o + c);
        }
    }
}

template <class T>
HWY_INLINE void values_of_rows(const RowValues& job) {
    constexpr std::int64_t kMost = 4;
    std::int64_t next = 0;
    for (std::int64_t query = 0; query < job.queries; query = next) {
        next = query + 1;  // queries that see the same keys go together
        while (next < std::min(job.queries, query + kMost) && job.seen[next] == job.seen[query]) ++next;
        switch (next - query) {
            case 1: values_of<1, T>(job, query); break;
            case 2: values_of<2, T>(job, query); break;
            case 3: values_of<3, T>(job, query); break;
            default: values_of<4, T>(job, query); break;
        }
    }
}

void RowValuesOf(const RowValues& job) {
    if (job.v.dtype == DType::bf16) values_of_rows<Bf16>(job);
    else values_of_rows<float>(job);
}

HWY_INLINE void clear_hidden(float* row, const Range& seen, std::int64_t keys) {
    for (std::int64_t j = 0; j < seen.begin; ++j) row[j] = 0;
    for (std::int64_t j = seen.end; j < padded(keys); ++j) row[j] = 0;
}

void RowWeightsFromLse(const RowGradients& job, const float* lse, const float* norm) {
    const D d;
    for (std::int64_t i = 0; i < job.queries; ++i) {
        float* p = job.p + i * job.stride;
        const Range seen = job.seen[i];
        const V shift = hn::Set(d, lse[i]);
        const V factor = hn::Set(d, norm == nullptr ? 1.0F : norm[i]);
        for (std::int64_t j = seen.begin / kWidth * kWidth; j < seen.end; j += kWidth) {
            const V weight = exp_of_nonpositive(at_most_zero(hn::Sub(hn::Load(d, p + j), shift)));
            hn::Store(hn::Mul(weight, factor), d, p + j);
        }
        clear_hidden(p, seen, job.keys);
        clear_hidden(job.dp + i * job.stride, seen, job.keys);
    }
}

/// The two lanes sum even and odd keys, as AddWeightedSums() of softmax.cc does.
void RowWeightedSums(const RowGradients& job, float* weights, float* products) {
    const Two two;
    HWY_ALIGN float parts[2];
    for (std::int64_t i = 0; i < job.queries; ++i) {
        const float* p = job.p + i * job.stride;
        const float* dp = job.dp + i * job.stride;
        auto weight = hn::Zero(two);
        auto product = hn::Zero(two);
        for (std::int64_t j = 0; j < job.keys; j += 2) {  // the key after an odd number of keys has weight 0
            const auto of_p = hn::Load(two, p + j);
            weight = hn::Add(weight, of_p);
            product = hn::MulAdd(of_p, hn::Load(two, dp + j), product);
        }
        hn::Store(weight, two, parts);
        weights[i] = parts[0] + parts[1];
        hn::Store(product, two, parts);
        products[i] = parts[0] + parts[1];
    }
}

void RowSoftmaxGradient(const RowGradients& job, const float* delta) {
    const D d;
    for (std::int64_t i = 0; i < job.queries; ++i) {
        const float* p = job.p + i * job.stride;
        float* dp = job.dp + i * job.stride;
        const Range seen = job.seen[i];
        const V of_row = hn::Set(d, delta[i]);
        for (std::int64_t j = seen.begin / kWidth * kWidth; j < seen.end; j += kWidth)
            hn::Store(hn::Mul(hn::Load(d, p + j), hn::Sub(hn::Load(d, dp + j), of_row)), d, dp + j);
        clear_hidden(dp, seen, job.keys);
    }
}

}  // namespace tessera::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::cpu::simd {

HWY_EXPORT(RowScoresOf);
HWY_EXPORT(RowSoftmax);
HWY_EXPORT(RowValuesOf);
HWY_EXPORT(RowWeightsFromLse);
HWY_EXPORT(RowWeightedSums);
HWY_EXPORT(RowSoftmaxGradient);

void row_scores(const RowScores& job) { HWY_DYNAMIC_DISPATCH(RowScoresOf)(job); }

void row_softmax(float* s, std::int64_t queries, std::int64_t stride, std::int64_t keys, const Range* seen,
                 const RowState& state, float* rescale) {
    HWY_DYNAMIC_DISPATCH(RowSoftmax)(s, queries, stride, keys, seen, state, rescale);
}

void row_values(const RowValues& job) { HWY_DYNAMIC_DISPATCH(RowValuesOf)(job); }

void row_weights_from_lse(const RowGradients& job, const float* lse, const float* norm) {
    HWY_DYNAMIC_DISPATCH(RowWeightsFromLse)(job, lse, norm);
}

void row_weighted_sums(const RowGradients& job, float* weights, float* products) {
    HWY_DYNAMIC_DISPATCH(RowWeightedSums)(job, weights, products);
}

void row_softmax_gradient(const RowGradients& job, const float* delta) {
    HWY_DYNAMIC_DISPATCH(RowSoftmaxGradient)(job, delta);
}

}  // namespace tessera::cpu::simd
#endif
