// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "cpu/simd/primitives.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/scores.cc"
#include <hwy/foreach_target.h>  // first: it compiles this file once for each target

#include <hwy/highway.h>

#include "cpu/simd/exp-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
using DI = hn::RebindToSigned<D>;

constexpr std::int64_t kWidth = static_cast<std::int64_t>(hn::MaxLanes(D()));

/// tanh(y) where |y| > kSmall, to 3e-7 relative: (1 - e) / (1 + e), e = exp(-2 |y|).
HWY_INLINE V tanh_of_large(V y) {
    const D d;
    const V one = hn::Set(d, 1.0F);
    const V e = exp_of_nonpositive(hn::Mul(hn::Set(d, -2.0F), hn::Abs(y)));
    return hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), y);
}

constexpr float kSmall = 0.75F;

/// tanh(y) / y - 1 where |y| <= kSmall, z = y^2: a polynomial of least relative error of tanh (3e-8, fitted in fp64).
HWY_INLINE V small_excess(V z) {
    const D d;
    V p = hn::MulAdd(hn::Set(d, -0x1.3892c4p-8F), z, hn::Set(d, 0x1.4230a0p-6F));
    p = hn::MulAdd(p, z, hn::Set(d, -0x1.b55f7cp-5F));
    p = hn::MulAdd(p, z, hn::Set(d, 0x1.10ed5ap-3F));
    p = hn::MulAdd(p, z, hn::Set(d, -0x1.5554a4p-2F));
    return hn::Mul(p, z);
}

/// s = cap * tanh(scale * s / cap). Most scores are far under the cap and need only a short polynomial. The exponential
/// runs for vectors that hold a large score. The choice is made per element, so its bits don't depend on other
/// elements.
template <bool kSlope>
HWY_INLINE void Cap(const ScoreRule& rule, std::int64_t count, float* s, float* cap_slope) {
    const D d;
    // Clamped, since an infinite inverse of a tiny cap would turn a score of 0 into NaN.
    const float inverse =
        std::clamp(rule.scale / rule.softcap, -std::numeric_limits<float>::max(), std::numeric_limits<float>::max());
    const V to_argument = hn::Set(d, inverse);
    const V scale = hn::Set(d, rule.scale);
    const V cap = hn::Set(d, rule.softcap);
    const V one = hn::Set(d, 1.0F);
    const V small = hn::Set(d, kSmall * kSmall);
    for (std::int64_t at = 0; at < count; at += kWidth) {
        const V x = hn::Load(d, s + at);
        const V y = hn::Mul(x, to_argument);
        const V z = hn::Mul(y, y);
        const V excess = small_excess(z);
        const V scaled = hn::Mul(x, scale);
        V capped = hn::MulAdd(scaled, excess, scaled);
        V t = hn::MulAdd(y, excess, y);
        const auto is_small = hn::Le(z, small);
        if (HWY_UNLIKELY(!hn::AllTrue(d, is_small))) {
            const V large = tanh_of_large(y);
            capped = hn::IfThenElse(is_small, capped, hn::Mul(cap, large));
            t = hn::IfThenElse(is_small, t, large);
        }
        hn::Store(capped, d, s + at);
        if constexpr (kSlope) hn::Store(hn::NegMulAdd(t, t, one), d, cap_slope + at);
    }
}

void ScaleAndCap(const ScoreRule& rule, std::int64_t keys, float* s, std::int64_t stride, float* cap_slope) {
    if (rule.softcap > 0) {
        if (cap_slope != nullptr) Cap<true>(rule, keys * stride, s, cap_slope);
        else Cap<false>(rule, keys * stride, s, nullptr);
        return;
    }
    const D d;
    const V scale = hn::Set(d, rule.scale);
    for (std::int64_t at = 0; at < keys * stride; at += kWidth) {
        hn::Store(hn::Mul(hn::Load(d, s + at), scale), d, s + at);
    }
}

/// s = scale * s - slope * distance
void SubtractDistances(const ScoreRule& rule, float scale, const TilePosition& position, std::int64_t keys, float* s,
                       std::int64_t stride) {
    const D d;
    const V slope = hn::Set(d, rule.alibi);
    const V factor = hn::Set(d, scale);
    for (std::int64_t lane = 0; lane < stride; lane += kWidth) {
        const std::int64_t first = position.q + lane + rule.diagonal - position.kv;
        const auto subtract = [&](std::int64_t j, V distance) HWY_ATTR {
            float* at = s + j * stride + lane;
            hn::Store(hn::NegMulAdd(slope, hn::Abs(distance), hn::Mul(hn::Load(d, at), factor)), d, at);
        };
        // Positions are exact in fp32 up to here. Beyond, each distance is computed from its own position, so that
        // errors don't add up.
        constexpr std::int64_t kExact = std::int64_t{1} << 24;
        std::int64_t j = 0;
        if (first - keys > -kExact && first + kWidth < kExact) {
            V distance = hn::Iota(d, static_cast<float>(first));
            for (; j + 4 <= keys; j += 4) {
                subtract(j, distance);
                subtract(j + 1, hn::Sub(distance, hn::Set(d, 1.0F)));
                subtract(j + 2, hn::Sub(distance, hn::Set(d, 2.0F)));
                subtract(j + 3, hn::Sub(distance, hn::Set(d, 3.0F)));
                distance = hn::Sub(distance, hn::Set(d, 4.0F));
            }
        }
        for (; j < keys; ++j) subtract(j, hn::Iota(d, static_cast<float>(first - j)));
    }
}

void FillMasked(const TilePosition& position, std::int64_t keys, float* s, std::int64_t stride, float value) {
    const D d;
    const DI di;
    const V fill = hn::Set(d, value);
    const auto row = [&](std::int64_t j) { return std::clamp<std::int64_t>(j, 0, keys); };
    const auto iota = hn::Iota(di, 0);
    for (std::int64_t lane = 0; lane < stride; lane += kWidth) {
        // Lane lane + i sees the keys low + i <= j <= high + i. Some lanes see rows [low, high + kWidth), all of them
        // rows [low + kWidth - 1, high + 1). Only the rows between the two ranges are mixed, at most kWidth - 1 at
        // either edge. All rows are mixed for a vector in which some lanes have no query.
        const std::int64_t low = position.q + lane + position.band.low - position.kv;
        const std::int64_t high = position.q + lane + position.band.high - position.kv;
        const std::int64_t present = std::clamp<std::int64_t>(position.band.len_q - position.q - lane, 0, kWidth);
        const Range some{row(low), row(high + kWidth)};
        const Range all{row(low + kWidth - 1), present == kWidth ? row(high + 1) : 0};
        const auto lane_limit = [&](std::int64_t i) {
            return static_cast<std::int32_t>(std::clamp<std::int64_t>(i, -1, present));
        };
        const auto mix = [&](std::int64_t first, std::int64_t end) HWY_ATTR {
            for (std::int64_t j = first; j < end; ++j) {
                const auto sees_it = hn::And(hn::Gt(iota, hn::Set(di, lane_limit(j - high - 1))),
                                             hn::Lt(iota, hn::Set(di, lane_limit(j - low + 1))));
                float* at = s + j * stride + lane;
                hn::Store(hn::IfThenElse(hn::RebindMask(d, sees_it), hn::Load(d, at), fill), d, at);
            }
        };
        const auto hide = [&](std::int64_t first, std::int64_t end) HWY_ATTR {
            for (std::int64_t j = first; j < end; ++j) hn::Store(fill, d, s + j * stride + lane);
        };
        hide(0, some.begin);
        if (all.empty()) {
            mix(some.begin, some.end);
        } else {
            mix(some.begin, all.begin);
            mix(all.end, some.end);
        }
        hide(std::max(some.begin, some.end), keys);
    }
}

void Multiply(float* x, const float* y, std::int64_t count) {
    const D d;
    for (std::int64_t i = 0; i < count; i += kWidth)
        hn::Store(hn::Mul(hn::Load(d, x + i), hn::Load(d, y + i)), d, x + i);
}

void Add(float* x, const float* y, std::int64_t count) {
    const D d;
    for (std::int64_t i = 0; i < count; i += kWidth)
        hn::Store(hn::Add(hn::Load(d, x + i), hn::Load(d, y + i)), d, x + i);
}

/// A plain loop, which compilers vectorise: Highway's WebAssembly target cannot convert fp32 to fp64.
void MoveToTotal(float* sum, double* total, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        total[i] += static_cast<double>(sum[i]);
        sum[i] = 0;
    }
}

/// x[r, i] += y[r]
void AddToRows(float* x, const float* y, std::int64_t rows, std::int64_t stride) {
    const D d;
    for (std::int64_t r = 0; r < rows; ++r) {
        const V row = hn::Set(d, y[r]);
        for (std::int64_t lane = 0; lane < stride; lane += kWidth) {
            float* at = x + r * stride + lane;
            hn::Store(hn::Add(hn::Load(d, at), row), d, at);
        }
    }
}

void ScaleLanes(float* x, const float* lane_scale, std::int64_t rows, std::int64_t stride) {
    const D d;
    for (std::int64_t lane = 0; lane < stride; lane += kWidth) {
        const V scale = hn::Load(d, lane_scale + lane);
        for (std::int64_t r = 0; r < rows; ++r) {
            float* at = x + r * stride + lane;
            hn::Store(hn::Mul(hn::Load(d, at), scale), d, at);
        }
    }
}

}  // namespace tessera::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::cpu::simd {

HWY_EXPORT(ScaleAndCap);
HWY_EXPORT(SubtractDistances);
HWY_EXPORT(FillMasked);
HWY_EXPORT(Multiply);
HWY_EXPORT(Add);
HWY_EXPORT(MoveToTotal);
HWY_EXPORT(AddToRows);
HWY_EXPORT(ScaleLanes);

void transform_scores(const ScoreRule& rule, const TilePosition& position, std::int64_t keys, std::int64_t queries,
                      float* s, std::int64_t stride, float* scratch, float* cap_slope) {
    // Without a softcap, the scale is applied together with the distances: one pass over the scores, not two.
    const bool scales_first = rule.softcap > 0 || (rule.scale != 1 && rule.alibi == 0);
    if (scales_first) HWY_DYNAMIC_DISPATCH(ScaleAndCap)(rule, keys, s, stride, cap_slope);
    if (rule.alibi != 0) {
        HWY_DYNAMIC_DISPATCH(SubtractDistances)(rule, scales_first ? 1.0F : rule.scale, position, keys, s, stride);
    }
    if (rule.bias.data == nullptr) return;
    HeadRows columns = rule.bias;
    columns.data = static_cast<char*>(columns.at(0, position.kv));
    if (rule.bias.row_stride == 0) {  // one row for all queries, such as a padding mask
        load_rows(columns, 0, 1, keys, scratch, padded(keys));
        HWY_DYNAMIC_DISPATCH(AddToRows)(s, scratch, keys, stride);
        return;
    }
    load_transposed(columns, position.q, queries, keys, 1.0F, scratch, stride);
    add(s, scratch, keys, stride);
}

void fill_masked(const TilePosition& position, std::int64_t keys, float* s, std::int64_t stride, float value) {
    HWY_DYNAMIC_DISPATCH(FillMasked)(position, keys, s, stride, value);
}

void multiply(float* x, const float* y, std::int64_t rows, std::int64_t stride) {
    HWY_DYNAMIC_DISPATCH(Multiply)(x, y, rows * stride);
}

void add(float* x, const float* y, std::int64_t rows, std::int64_t stride) {
    HWY_DYNAMIC_DISPATCH(Add)(x, y, rows * stride);
}

void move_to_total(float* sum, double* total, std::int64_t rows, std::int64_t stride) {
    HWY_DYNAMIC_DISPATCH(MoveToTotal)(sum, total, rows * stride);
}

void add_total(float* sum, const double* total, std::int64_t rows, std::int64_t stride) {
    for (std::int64_t i = 0; i < rows * stride; ++i)
        sum[i] = static_cast<float>(static_cast<double>(sum[i]) + total[i]);
}

void scale_lanes(float* x, const float* lane_scale, std::int64_t rows, std::int64_t stride) {
    HWY_DYNAMIC_DISPATCH(ScaleLanes)(x, lane_scale, rows, stride);
}

}  // namespace tessera::cpu::simd
#endif
