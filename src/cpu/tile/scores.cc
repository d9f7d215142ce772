// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/philox.hpp"
#include "cpu/tile/tile.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/tile/scores.cc"
#include <hwy/foreach_target.h>  // first: it compiles this file once for each target

#include <hwy/highway.h>

#include <hwy/contrib/math/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::tile::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
using DI = hn::RebindToSigned<D>;
using DU = hn::RebindToUnsigned<D>;
using VU = hn::Vec<DU>;

constexpr std::int64_t kWidth = static_cast<std::int64_t>(hn::MaxLanes(D()));

void ScaleAndCap(const ScoreRule& rule, std::int64_t keys, float* s, std::int64_t stride, float* cap_slope) {
    const D d;
    const V scale = hn::Set(d, rule.scale);
    const V cap = hn::Set(d, rule.softcap);
    const V one = hn::Set(d, 1.0F);
    for (std::int64_t at = 0; at < keys * stride; at += kWidth) {
        V x = hn::Mul(hn::Load(d, s + at), scale);
        if (rule.softcap > 0) {
            const V t = hn::Tanh(d, hn::Div(x, cap));
            if (cap_slope != nullptr) hn::Store(hn::NegMulAdd(t, t, one), d, cap_slope + at);
            x = hn::Mul(cap, t);
        }
        hn::Store(x, d, s + at);
    }
}

void SubtractDistances(const ScoreRule& rule, const Place& place, std::int64_t keys, float* s, std::int64_t stride) {
    const D d;
    const V slope = hn::Set(d, rule.alibi);
    for (std::int64_t j = 0; j < keys; ++j) {
        for (std::int64_t lane = 0; lane < stride; lane += kWidth) {
            const auto first = static_cast<float>(place.q + lane + rule.diagonal - place.kv - j);
            const V distance = hn::Abs(hn::Iota(d, first));
            float* at = s + j * stride + lane;
            hn::Store(hn::NegMulAdd(slope, distance, hn::Load(d, at)), d, at);
        }
    }
}

void FillHidden(const Place& place, std::int64_t keys, float* s, std::int64_t stride, float value) {
    const D d;
    const DI di;
    const V fill = hn::Set(d, value);
    const auto row = [&](std::int64_t j) { return std::clamp<std::int64_t>(j, 0, keys); };
    const auto iota = hn::Iota(di, 0);
    for (std::int64_t lane = 0; lane < stride; lane += kWidth) {
        // Lane lane + i sees keys j, low + i <= j <= high + i: some lanes rows [low, high + kWidth), all of them rows
        // [low + kWidth - 1, high + 1). Only rows between those mix, at the most kWidth - 1 of them at either edge, and
        // all rows of a vector in which some lanes have no query.
        const std::int64_t low = place.q + lane + place.band.low - place.kv;
        const std::int64_t high = place.q + lane + place.band.high - place.kv;
        const std::int64_t present = std::clamp<std::int64_t>(place.band.len_q - place.q - lane, 0, kWidth);
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

struct Product64 {
    VU high;
    VU low;
};

/// The 64-bit products of all lanes by one 32-bit constant, as high and low words.
HWY_INLINE Product64 multiply_wide(VU a, VU b) {
    const DU du;
    const hn::Repartition<std::uint64_t, DU> d64;
    const auto even = hn::MulEven(a, b);
    const auto odd = hn::MulEven(hn::BitCast(du, hn::ShiftRight<32>(hn::BitCast(d64, a))), b);
    return {hn::OddEven(hn::BitCast(du, odd), hn::BitCast(du, hn::ShiftRight<32>(even))),
            hn::OddEven(hn::BitCast(du, hn::ShiftLeft<32>(odd)), hn::BitCast(du, even))};
}

/// Philox4x32-10 for consecutive queries in the lanes: the words of keys 4 * quad .. 4 * quad + 3 (core/philox.hpp).
HWY_INLINE void philox_words(const DropoutRule& rule, std::int64_t query, std::int64_t quad, VU (&words)[4]) {
    const DU du;
    VU c0 = hn::Set(du, static_cast<std::uint32_t>(quad));
    VU c1 = hn::Iota(du, static_cast<std::uint32_t>(query));
    VU c2 = hn::Set(du, static_cast<std::uint32_t>(rule.head));
    VU c3 = hn::Set(du, static_cast<std::uint32_t>(rule.batch));
    auto key0 = static_cast<std::uint32_t>(rule.seed);
    auto key1 = static_cast<std::uint32_t>(rule.seed >> 32);
    const VU multiplier0 = hn::Set(du, philox::kMultiplier0);
    const VU multiplier1 = hn::Set(du, philox::kMultiplier1);
    for (int round = 0; round < philox::kRounds; ++round) {
        const Product64 p0 = multiply_wide(c0, multiplier0);
        const Product64 p1 = multiply_wide(c2, multiplier1);
        c0 = hn::Xor(hn::Xor(p1.high, c1), hn::Set(du, key0));
        c2 = hn::Xor(hn::Xor(p0.high, c3), hn::Set(du, key1));
        c1 = p1.low;
        c3 = p0.low;
        key0 += philox::kWeyl0;
        key1 += philox::kWeyl1;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}

void DropoutFactors(const DropoutRule& rule, const Place& place, std::int64_t keys, float* factors,
                    std::int64_t stride) {
    const D d;
    const DU du;
    const V kept = hn::Set(d, rule.kept);
    // 2^32, "keep all", does not fit 32 bits; then every word is at most the largest one.
    const bool keep_all = rule.threshold >> 32 != 0;
    const VU threshold = hn::Set(du, static_cast<std::uint32_t>(rule.threshold));
    for (std::int64_t lane = 0; lane < stride; lane += kWidth) {
        for (std::int64_t quad = place.kv / 4; quad * 4 < place.kv + keys; ++quad) {
            VU words[4];
            philox_words(rule, place.q + lane, quad, words);
            for (std::int64_t w = 0; w < 4; ++w) {
                const std::int64_t j = quad * 4 + w - place.kv;
                if (j < 0 || j >= keys) continue;
                const auto keep = hn::RebindMask(d, hn::Lt(words[w], threshold));
                hn::Store(keep_all ? kept : hn::IfThenElseZero(keep, kept), d, factors + j * stride + lane);
            }
        }
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

}  // namespace tessera::cpu::tile::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::cpu::tile {

HWY_EXPORT(ScaleAndCap);
HWY_EXPORT(SubtractDistances);
HWY_EXPORT(FillHidden);
HWY_EXPORT(DropoutFactors);
HWY_EXPORT(Multiply);
HWY_EXPORT(Add);
HWY_EXPORT(ScaleLanes);

void transform_scores(const ScoreRule& rule, const Place& place, std::int64_t keys, std::int64_t queries, float* s,
                      std::int64_t stride, float* scratch, float* cap_slope) {
    if (rule.scale != 1 || rule.softcap > 0) HWY_DYNAMIC_DISPATCH(ScaleAndCap)(rule, keys, s, stride, cap_slope);
    if (rule.alibi != 0) HWY_DYNAMIC_DISPATCH(SubtractDistances)(rule, place, keys, s, stride);
    if (rule.bias.data == nullptr) return;
    HeadRows columns = rule.bias;
    columns.data = static_cast<char*>(columns.at(0, place.kv));
    load_transposed(columns, place.q, queries, keys, 1.0F, scratch, stride);
    add(s, scratch, keys, stride);
}

void fill_hidden(const Place& place, std::int64_t keys, float* s, std::int64_t stride, float value) {
    HWY_DYNAMIC_DISPATCH(FillHidden)(place, keys, s, stride, value);
}

void dropout_factors(const DropoutRule& rule, const Place& place, std::int64_t keys, float* factors,
                     std::int64_t stride) {
    HWY_DYNAMIC_DISPATCH(DropoutFactors)(rule, place, keys, factors, stride);
}

void multiply(float* x, const float* y, std::int64_t rows, std::int64_t stride) {
    HWY_DYNAMIC_DISPATCH(Multiply)(x, y, rows * stride);
}

void add(float* x, const float* y, std::int64_t rows, std::int64_t stride) {
    HWY_DYNAMIC_DISPATCH(Add)(x, y, rows * stride);
}

void scale_lanes(float* x, const float* lane_scale, std::int64_t rows, std::int64_t stride) {
    HWY_DYNAMIC_DISPATCH(ScaleLanes)(x, lane_scale, rows, stride);
}

}  // namespace tessera::cpu::tile
#endif
