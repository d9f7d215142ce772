// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/numeric.hpp"
#include "cpu/simd/primitives.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/softmax.cc"
#include <hwy/foreach_target.h>  // first: it compiles this file once for each target

#include <hwy/highway.h>

#include "cpu/simd/exp-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

constexpr std::int64_t kWidth = static_cast<std::int64_t>(hn::MaxLanes(D()));

/// The maximum to subtract: 0 instead of -inf, so that a row without a key gets exp(-inf - 0) = 0, not NaN.
HWY_INLINE V shift_of(V maximum) {
    const D d;
    return hn::IfThenElse(hn::Eq(maximum, hn::Set(d, -std::numeric_limits<float>::infinity())), hn::Zero(d), maximum);
}

/// The keys that a vector of lanes reads: all, or those that the mask leaves to its kLanes queries.
HWY_INLINE Range keys_to_read(const TilePosition* cut, std::int64_t lane, std::int64_t keys) {
    return cut == nullptr ? Range{0, keys} : cut->keys_of_lanes(lane / kLanes * kLanes, keys);
}

// A long row is summed in blocks of kSumBlock keys, and these in blocks of kSumKeys. The rounding error then grows with
// the square root of the longest chain of additions.
constexpr std::int64_t kSumBlock = 256;
static_assert(kSumKeys % kSumBlock == 0);

/// Replaces the scores of keys [first, end) in one vector of lanes by exp(s - shift) and returns their sum. Four
/// partial sums hide the latency. Each takes every fourth key counted from the tile's first, so hidden keys, which add
/// 0, change no bits.
HWY_INLINE V exponentiate(float* s, std::int64_t first, std::int64_t end, std::int64_t stride, V shift) {
    const D d;
    const auto weight = [&](std::int64_t key) HWY_ATTR {
        float* at = s + key * stride;
        const V p = exp_of_nonpositive(hn::Sub(hn::Load(d, at), shift));
        hn::Store(p, d, at);
        return p;
    };
    V sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
    std::int64_t j = first;
    for (; j + 4 <= end; j += 4) {
        sum0 = hn::Add(sum0, weight(j));
        sum1 = hn::Add(sum1, weight(j + 1));
        sum2 = hn::Add(sum2, weight(j + 2));
        sum3 = hn::Add(sum3, weight(j + 3));
    }
    if (j < end) sum0 = hn::Add(sum0, weight(j));
    if (j + 1 < end) sum1 = hn::Add(sum1, weight(j + 1));
    if (j + 2 < end) sum2 = hn::Add(sum2, weight(j + 2));
    return hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3));
}

void OnlineSoftmax(float* s, std::int64_t keys, std::int64_t lanes, std::int64_t stride, const RowState& state,
                   float* rescale, const TilePosition* cut, std::int64_t before) {
    const D d;
    for (std::int64_t lane = 0; lane < lanes; lane += kWidth) {
        const V old = hn::Load(d, state.m + lane);
        Range seen = keys_to_read(cut, lane, keys);
        seen.begin = seen.begin / 4 * 4;  // a key's partial sum depends on its index in the tile only
        // Four independent maxima hide the latency.
        V max0 = old, max1 = old, max2 = old, max3 = old;
        std::int64_t j = seen.begin;
        for (; j + 4 <= seen.end; j += 4) {
            max0 = hn::Max(max0, hn::Load(d, s + j * stride + lane));
            max1 = hn::Max(max1, hn::Load(d, s + (j + 1) * stride + lane));
            max2 = hn::Max(max2, hn::Load(d, s + (j + 2) * stride + lane));
            max3 = hn::Max(max3, hn::Load(d, s + (j + 3) * stride + lane));
        }
        for (; j < seen.end; ++j) max0 = hn::Max(max0, hn::Load(d, s + j * stride + lane));
        const V maximum = hn::Max(hn::Max(max0, max1), hn::Max(max2, max3));
        const V shift = shift_of(maximum);
        V sum = hn::Zero(d);
        V part = sum;
        for (std::int64_t first = seen.begin, end = 0; first < seen.end; first = end) {
            end = std::min(seen.end, ((before + first) / kSumBlock + 1) * kSumBlock - before);
            part = hn::Add(part, exponentiate(s + lane, first, end, stride, shift));
            if ((before + end) % kSumKeys != 0) continue;
            sum = hn::Add(sum, part);
            part = hn::Zero(d);
        }
        sum = hn::Add(sum, part);
        for (j = 0; j < seen.begin; ++j) hn::Store(hn::Zero(d), d, s + j * stride + lane);
        for (j = seen.end; j < keys; ++j) hn::Store(hn::Zero(d), d, s + j * stride + lane);
        const V alpha = exp_of_nonpositive(hn::Sub(old, shift));
        hn::Store(alpha, d, rescale + lane);
        hn::Store(maximum, d, state.m + lane);
        hn::Store(hn::MulAdd(hn::Load(d, state.l + lane), alpha, sum), d, state.l + lane);
    }
}

/// Merges the states of a vector of lanes. a, b: the rescale factors for sums relative to their old maxima.
HWY_INLINE void merge_states(const RowState& into, const RowState& state, std::int64_t lane, V& a, V& b) {
    const D d;
    const V m_a = hn::Load(d, into.m + lane);
    const V m_b = hn::Load(d, state.m + lane);
    const V maximum = hn::Max(m_a, m_b);
    const V shift = shift_of(maximum);
    a = exp_of_nonpositive(hn::Sub(m_a, shift));
    b = exp_of_nonpositive(hn::Sub(m_b, shift));
    const V l = hn::MulAdd(hn::Load(d, into.l + lane), a, hn::Mul(hn::Load(d, state.l + lane), b));
    hn::Store(maximum, d, into.m + lane);
    hn::Store(l, d, into.l + lane);
}

/// x = x * a + y * b
HWY_INLINE void merge_vector(float* x, V a, const float* y, V b) {
    const D d;
    hn::Store(hn::MulAdd(hn::Load(d, x), a, hn::Mul(hn::Load(d, y), b)), d, x);
}

void Merge(const RowState& into, float* into_o, const RowState& state, const float* o, std::int64_t dim,
           std::int64_t lanes, std::int64_t stride) {
    for (std::int64_t lane = 0; lane < lanes; lane += kWidth) {
        V a, b;
        merge_states(into, state, lane, a, b);
        for (std::int64_t c = 0; c < dim; ++c) {
            merge_vector(into_o + c * stride + lane, a, o + c * stride + lane, b);
        }
    }
}

void MergeRows(const RowState& into, float* into_o, const RowState& state, const float* o, const Range& queries,
               std::int64_t stride) {
    const D d;
    HWY_ALIGN float of_a[kLanes];
    HWY_ALIGN float of_b[kLanes];
    for (std::int64_t lane = 0; lane < kLanes; lane += kWidth) {
        V a, b;
        merge_states(into, state, lane, a, b);
        hn::Store(a, d, of_a + lane);
        hn::Store(b, d, of_b + lane);
    }
    for (std::int64_t r = queries.begin; r < queries.end; ++r) {
        const V a = hn::Set(d, of_a[r]);
        const V b = hn::Set(d, of_b[r]);
        for (std::int64_t c = r * stride; c < (r + 1) * stride; c += kWidth) merge_vector(into_o + c, a, o + c, b);
    }
}

void FinishSoftmax(const RowState& state, const HeadRows& sinks, std::int64_t first, std::int64_t queries,
                   float* factors) {
    const D d;
    const V infinity = hn::Set(d, std::numeric_limits<float>::infinity());
    // The rows of a decoding task are not aligned, so each vector of them passes through these.
    HWY_ALIGN float of_sink[kWidth] = {};
    HWY_ALIGN float of_m[kWidth] = {};
    HWY_ALIGN float of_l[kWidth] = {};
    HWY_ALIGN float of_factor[kWidth];
    for (std::int64_t row = 0; row < queries; row += kWidth) {
        const std::int64_t rows = std::min(kWidth, queries - row);
        for (std::int64_t i = 0; i < rows; ++i) of_sink[i] = *static_cast<const float*>(sinks.at(first + row + i, 0));
        std::copy_n(state.m + row, rows, of_m);
        std::copy_n(state.l + row, rows, of_l);
        const V sink = hn::Load(d, of_sink);
        const V m = hn::Load(d, of_m);
        const V maximum = hn::Max(m, sink);
        const V shift = shift_of(maximum);
        const V rescale = exp_of_nonpositive(hn::Sub(m, shift));
        const V sum = hn::MulAdd(hn::Load(d, of_l), rescale, exp_of_nonpositive(hn::Sub(sink, shift)));
        // With scores of NaN and +inf, the exponential may lose the NaN.
        const V l = hn::IfThenElse(hn::Lt(sink, infinity), sum, hn::NaN(d));
        hn::Store(maximum, d, of_m);
        hn::Store(l, d, of_l);
        hn::Store(hn::IfThenZeroElse(hn::Eq(l, hn::Zero(d)), hn::Div(rescale, l)), d, of_factor);
        std::copy_n(of_m, rows, state.m + row);
        std::copy_n(of_l, rows, state.l + row);
        std::copy_n(of_factor, rows, factors + row);
    }
}

void WeightsFromLse(float* s, const float* lse, std::int64_t keys, std::int64_t lanes, std::int64_t stride,
                    const TilePosition* cut) {
    const D d;
    for (std::int64_t lane = 0; lane < lanes; lane += kWidth) {
        const Range seen = keys_to_read(cut, lane, keys);
        for (std::int64_t j = seen.begin; j < seen.end; ++j) {
            float* at = s + j * stride + lane;
            // A weight is at most 1: the difference is clamped to 0 if rounding put the LSE below the score.
            const V x = hn::Sub(hn::Load(d, at), hn::Load(d, lse + lane));
            hn::Store(exp_of_nonpositive(at_most_zero(x)), d, at);
        }
    }
}

void AddWeightedSums(const float* p, const float* x, std::int64_t keys, std::int64_t lanes, std::int64_t stride,
                     double* weights, double* products) {
    const D d;
    HWY_ALIGN float tile_weights[kWidth];
    HWY_ALIGN float tile_products[kWidth];
    for (std::int64_t lane = 0; lane < lanes; lane += kWidth) {
        // Two sums each, for even and odd keys, hide the latency of the additions.
        V weight[2] = {hn::Zero(d), hn::Zero(d)};
        V product[2] = {hn::Zero(d), hn::Zero(d)};
        const auto add = [&](std::int64_t j, int i) HWY_ATTR {
            const V of_p = hn::Load(d, p + j * stride + lane);
            weight[i] = hn::Add(weight[i], of_p);
            product[i] = hn::MulAdd(of_p, hn::Load(d, x + j * stride + lane), product[i]);
        };
        std::int64_t j = 0;
        for (; j + 2 <= keys; j += 2) add(j, 0), add(j + 1, 1);
        if (j < keys) add(j, 0);
        hn::Store(hn::Add(weight[0], weight[1]), d, tile_weights);
        hn::Store(hn::Add(product[0], product[1]), d, tile_products);
        for (std::int64_t i = 0; i < kWidth; ++i) {
            weights[lane + i] += static_cast<double>(tile_weights[i]);
            products[lane + i] += static_cast<double>(tile_products[i]);
        }
    }
}

void SoftmaxGradient(const float* p, float* dp, const float* delta, std::int64_t keys, std::int64_t lanes,
                     std::int64_t stride, const TilePosition* cut) {
    const D d;
    for (std::int64_t lane = 0; lane < lanes; lane += kWidth) {
        const Range seen = keys_to_read(cut, lane, keys);
        for (std::int64_t j = seen.begin; j < seen.end; ++j) {
            float* at = dp + j * stride + lane;
            const V difference = hn::Sub(hn::Load(d, at), hn::Load(d, delta + lane));
            hn::Store(hn::Mul(hn::Load(d, p + j * stride + lane), difference), d, at);
        }
    }
}

}  // namespace tessera::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::cpu::simd {

HWY_EXPORT(OnlineSoftmax);
HWY_EXPORT(Merge);
HWY_EXPORT(MergeRows);
HWY_EXPORT(FinishSoftmax);
HWY_EXPORT(WeightsFromLse);
HWY_EXPORT(AddWeightedSums);
HWY_EXPORT(SoftmaxGradient);

void online_softmax(float* s, std::int64_t keys, std::int64_t lanes, std::int64_t stride, const RowState& state,
                    float* rescale, const TilePosition* cut, std::int64_t before) {
    HWY_DYNAMIC_DISPATCH(OnlineSoftmax)(s, keys, lanes, stride, state, rescale, cut, before);
}

void merge(const RowState& into, float* into_o, const RowState& state, const float* o, std::int64_t dim,
           std::int64_t lanes, std::int64_t stride) {
    HWY_DYNAMIC_DISPATCH(Merge)(into, into_o, state, o, dim, lanes, stride);
}

void merge_rows(const RowState& into, float* into_o, const RowState& state, const float* o, const Range& queries,
                std::int64_t stride) {
    HWY_DYNAMIC_DISPATCH(MergeRows)(into, into_o, state, o, queries, stride);
}

void weights_from_lse(float* s, const float* lse, std::int64_t keys, std::int64_t lanes, std::int64_t stride,
                      const TilePosition* cut) {
    HWY_DYNAMIC_DISPATCH(WeightsFromLse)(s, lse, keys, lanes, stride, cut);
}

void add_weighted_sums(const float* p, const float* x, std::int64_t keys, std::int64_t lanes, std::int64_t stride,
                       double* weights, double* products) {
    HWY_DYNAMIC_DISPATCH(AddWeightedSums)(p, x, keys, lanes, stride, weights, products);
}

void softmax_gradient(const float* p, float* dp, const float* delta, std::int64_t keys, std::int64_t lanes,
                      std::int64_t stride, const TilePosition* cut) {
    HWY_DYNAMIC_DISPATCH(SoftmaxGradient)(p, dp, delta, keys, lanes, stride, cut);
}

void clear_state(const RowState& state, std::int64_t lanes) {
    for (std::int64_t i = 0; i < lanes; ++i) {
        state.m[i] = -std::numeric_limits<float>::infinity();
        state.l[i] = 0;
    }
}

void invert_sums(const RowState& state, std::int64_t lanes, float* inverse) {
    for (std::int64_t i = 0; i < lanes; ++i) inverse[i] = state.l[i] == 0 ? 0.0F : 1.0F / state.l[i];
}

void finish_softmax(const RowState& state, const HeadRows& sinks, std::int64_t first, std::int64_t queries,
                    std::int64_t lanes, float* factors) {
    if (sinks.data == nullptr) return invert_sums(state, lanes, factors);
    std::fill(factors + queries, factors + lanes, 0.0F);
    HWY_DYNAMIC_DISPATCH(FinishSoftmax)(state, sinks, first, queries, factors);
}

void store_lse(const RowState& state, std::int64_t rows, const HeadRows& to, std::int64_t first) {
    if (to.data == nullptr) return;
    for (std::int64_t i = 0; i < rows; ++i) {
        const double lse = static_cast<double>(state.m[i]) + std::log(static_cast<double>(state.l[i]));
        if (to.dtype == DType::fp32) *static_cast<float*>(to.at(first + i, 0)) = static_cast<float>(lse);
        else store_from_double(to.at(first + i, 0), to.dtype, lse);
    }
}

}  // namespace tessera::cpu::simd
#endif
