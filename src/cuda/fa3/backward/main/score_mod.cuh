// SPDX-License-Identifier: Apache-2.0
//
// score_mod on transposed tiles: softcap, ALiBi and dropout of scores and P. Rows are keys and columns queries; `key`
// and `query` are those of a thread's element 0. (tile/score.cuh does it on tiles whose rows are queries.)
//
// ScoreMod has all of them, for general shapes. StepScoreMod has those that a shape is compiled for, in the form that
// costs the inner loop least.
#pragma once

#include <cfloat>

#include "core/dropout.hpp"
#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/fa3/host/score_mod.h"
#include "cuda/fa3/host/softcap.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/dropout_mask.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/head_bias.cuh"
#include "cuda/tile/params.hpp"
#include "cuda/tile/softcap.cuh"

namespace tessera::cuda::fa3::backward {

struct ScoreMod {
    const ForwardParams& params;
    int batch, head;
    float slope = 0;             ///< ALiBi slope of the head
    int diagonal;                ///< len_kv - len_q
    const char* bias = nullptr;  ///< at query 0 and key 0 of the head
    bool by_pairs;               ///< the caller adds the bias

    __device__ __forceinline__ ScoreMod(const ForwardParams& p, const SequenceSchedule& sequence, int own_batch,
                                        int own_head, bool bias_by_pairs)
        : params(p),
          batch(own_batch),
          head(own_head),
          diagonal(sequence.len_kv() - sequence.len_q),
          by_pairs(bias_by_pairs) {
        if (p.alibi_slopes) slope = p.alibi_slopes[batch * p.alibi_batch + head * p.alibi_head];
        if (p.bias.data) bias = bias_row(p.bias, batch, head, 0);
    }

    /// Turns q . k into a score in units of the natural logarithm. Returns d(score) / d(scale * q . k). kScores: those
    /// of the shape, which does not compute others.
    template <class T, Scores kScores>
    __device__ __forceinline__ float transform(float& s, int query, int key) const {
        s = __fmul_rn(s, params.scale);
        float derivative = 1;
        if (kScores != Scores::alibi && params.softcap > 0) {
            const float inverse = fminf(ptx::reciprocal_approx(params.softcap), FLT_MAX);  // inf if subnormal
            const float t = hyperbolic_tangent(s * inverse);
            s = params.softcap * t;
            derivative = fmaf(-t, t, 1.0F);
        }
        if (kScores != Scores::capped && slope != 0)
            s = fmaf(-slope, fabsf(static_cast<float>(query + diagonal - key)), s);
        // A pair past the end gets the bias of another one, and the mask hides it.
        if (kScores == Scores::general && bias != nullptr && !by_pairs) {
            const std::int64_t row = min(query, params.len_q - 1) * params.bias.row;
            s += bias_element<T>(params.bias, bias + row * (params.bias.fp32 ? 4 : 2), min(key, params.len_kv - 1));
        }
        return derivative;
    }

    /// Which P of a warp's 16 keys and 64 queries dropout keeps.
    __device__ __forceinline__ DropoutBitsTransposed kept(int query, int key, int lane) const {
        if (!params.drops()) return {};
        // Opaque: values derived from them are computed anew, so that no register holds them over the loop.
        return DropoutBitsTransposed::draw(params.keep, ptx::opaque(batch), ptx::opaque(head), ptx::opaque(query),
                                           ptx::opaque(key), ptx::opaque(lane));
    }
};

/// The score modification of a step, of a thread's pairs with 64 queries. addend() is what is added to scale_log2 times
/// an element of Q K^T: minus the row's LSE, and ALiBi's part of the score. keeps() says whether dropout keeps a pair.
template <Scores kScores>
struct StepScoreMod {
    __device__ __forceinline__ static float addend(int /*element*/, float minus_lse) { return minus_lse; }
    __device__ __forceinline__ static constexpr bool keeps(int /*element*/) { return true; }
};

template <>
struct StepScoreMod<Scores::alibi> {
    float first_distance;  ///< from the key to the query's diagonal, of element 0; exact up to 2^24
    float slope;           ///< RowStats::slope

    __device__ __forceinline__ float distance(int element) const {
        return fabsf(first_distance + static_cast<float>(column_of(element) - 8 * row_of(element)));
    }
    __device__ __forceinline__ float addend(int element, float minus_lse) const {
        return fmaf(-kLog2E * slope, distance(element), minus_lse);
    }
    __device__ __forceinline__ static constexpr bool keeps(int /*element*/) { return true; }
};

template <>
struct StepScoreMod<Scores::dropout> {
    DropoutBitsTransposed kept;

    __device__ __forceinline__ static float addend(int /*element*/, float minus_lse) { return minus_lse; }
    __device__ __forceinline__ bool keeps(int element) const { return kept(element / 4, element % 4); }
};

/// The bias of a warp's 16 keys and 64 queries in 16 bits, as the forward reads it: [8 queries][8 keys] in each word,
/// of query lane / 4 and keys 2 * (lane % 4) and the next.
using BiasPairs = std::uint32_t[8][2];

/// `query`, `key`: the warp's first ones. Queries and keys past the end get the bias of the last one, and the mask
/// hides them.
__device__ __forceinline__ void load_bias_pairs(BiasPairs& pairs, const ForwardParams& p, const char* head_bias,
                                                int query, int key, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int own_key = min(key + 8 * r + lane % 4 * 2, p.len_kv - 2);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const std::int64_t row = min(query + 8 * j + lane / 4, p.len_q - 1) * p.bias.row;
            pairs[j][r] = bias_pair(head_bias + 2 * row, own_key);
        }
    }
}
/// The bias of a thread's elements i and i + 1, whose rows are keys; i is even. All lanes take part.
template <class T>
__device__ __forceinline__ float2 bias_of_elements(const BiasPairs& pairs, int i) {
    return unpack_bias<T>(ptx::movmatrix_trans(pairs[i / 4][row_of(i)]));
}
/// Scores with a bias from elements of Q K^T, of a warp's 16 keys and 64 queries.
template <class T>
__device__ __forceinline__ void add_bias_pairs(float (&s)[32], const ForwardParams& p, const char* head_bias, int query,
                                               int key, int lane) {
    BiasPairs pairs;
    load_bias_pairs(pairs, p, head_bias, query, key, lane);
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        const float2 bias = bias_of_elements<T>(pairs, i);
        s[i] = fmaf(s[i], p.scale, bias.x);
        s[i + 1] = fmaf(s[i + 1], p.scale, bias.y);
    }
}
/// add_bias_pairs() for a bias of another layout or in fp32. `query`, `key`: those of the thread's element 0.
template <class T>
__device__ __forceinline__ void add_bias_elements(float (&s)[32], const ForwardParams& p, const char* head_bias,
                                                  int query, int key) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const std::int64_t row = min(query + column_of(i), p.len_q - 1) * p.bias.row;
        s[i] = fmaf(
            s[i], p.scale,
            bias_element<T>(p.bias, head_bias + row * (p.bias.fp32 ? 4 : 2), min(key + 8 * row_of(i), p.len_kv - 1)));
    }
}

/// Applies a softcap to elements of Q K^T, as the forward does: scale * x is the capped score. Scores that are small
/// beside the cap take a polynomial without the special function unit, which the exponentials keep busy.
template <int kCount>
__device__ __forceinline__ void cap_scores(const Softcap& softcap, float (&x)[kCount]) {
    const auto near = [&](float value) {
        const float u = __fmul_rn(value, value);
        return __fmul_rn(value, fmaf(tanh_near(u, softcap.coefficients), u, 1.0F));
    };
    // Scores that are handled together. With more of them, ptxas serializes wgmma.
    constexpr int kTogether = 8;
#pragma unroll
    for (int first = 0; first < kCount; first += kTogether) {
        float largest = 0;
#pragma unroll
        for (int i = first; i < first + kTogether; ++i) largest = fmaxf(largest, fabsf(x[i]));
        if (any_lane(largest >= softcap.near)) {
#pragma unroll
            for (int i = first; i < first + kTogether; ++i) {
                const float e = ptx::exp2_approx(__fmul_rn(x[i], softcap.exponent));
                const float far = fmaf(ptx::reciprocal_approx(e + 1.0F), -softcap.twice_cap, softcap.cap);
                x[i] = fabsf(x[i]) < softcap.near ? near(x[i]) : far;
            }
        } else {
#pragma unroll
            for (int i = first; i < first + kTogether; ++i) x[i] = near(x[i]);
        }
    }
}

}  // namespace tessera::cuda::fa3::backward
