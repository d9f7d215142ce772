// SPDX-License-Identifier: Apache-2.0
//
// score_mod on transposed tiles: softcap, ALiBi and dropout of scores and P. Rows are keys and columns queries; `key`
// and `query` are those of a thread's element 0. (tile/score.cuh does it on tiles whose rows are queries.)
#pragma once

#include <cfloat>

#include "core/dropout.hpp"
#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/dropout_mask.cuh"
#include "cuda/tile/params.hpp"
#include "cuda/tile/softcap.cuh"

namespace tessera::cuda::fa3::backward {

struct ScoreMod {
    const ForwardParams& params;
    int batch, head;
    float slope = 0;  ///< ALiBi slope of the head
    int diagonal;     ///< len_kv - len_q

    __device__ __forceinline__ ScoreMod(const ForwardParams& p, const SequenceSchedule& sequence, int own_batch,
                                        int own_head)
        : params(p), batch(own_batch), head(own_head), diagonal(sequence.len_kv() - sequence.len_q) {
        if (p.alibi_slopes) slope = p.alibi_slopes[batch * p.alibi_batch + head * p.alibi_head];
    }

    /// Turns q . k into a score in units of the natural logarithm. Returns d(score) / d(scale * q . k).
    __device__ __forceinline__ float transform(float& s, int query, int key) const {
        s = __fmul_rn(s, params.scale);
        float derivative = 1;
        if (params.softcap > 0) {
            const float inverse = fminf(ptx::reciprocal_approx(params.softcap), FLT_MAX);  // inf if subnormal
            const float t = hyperbolic_tangent(s * inverse);
            s = params.softcap * t;
            derivative = fmaf(-t, t, 1.0F);
        }
        if (slope != 0) s = fmaf(-slope, fabsf(static_cast<float>(query + diagonal - key)), s);
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

}  // namespace tessera::cuda::fa3::backward
