// SPDX-License-Identifier: Apache-2.0
//
// What scores and weights go through besides scale, mask and softmax, on transposed tiles: softcap, ALiBi, dropout.
// Rows are keys and columns queries; `key` and `query` are those of a thread's element 0. (On tiles whose rows are
// queries, tile/score.cuh does it.)
#pragma once

#include <cfloat>

#include "core/dropout.hpp"
#include "cuda/fa3/backward/main/mask.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/dropout_mask.cuh"
#include "cuda/tile/params.hpp"
#include "cuda/tile/softcap.cuh"

namespace tessera::cuda::fa3::backward {

struct Features {
    const ForwardParams& params;
    int batch, head;
    float slope = 0;  ///< of ALiBi
    int diagonal;     ///< len_kv - len_q

    __device__ __forceinline__ Features(const ForwardParams& p, const Pairs& pairs, int own_batch, int own_head)
        : params(p), batch(own_batch), head(own_head), diagonal(pairs.len_kv - pairs.len_q) {
        if (p.alibi_slopes) slope = p.alibi_slopes[batch * p.alibi_batch + head * p.alibi_head];
    }

    /// From a product of Q and K to a score in units of the natural logarithm; returns what the score's gradient is to
    /// be multiplied by to become the scaled product's.
    __device__ __forceinline__ float transform(float& s, int query, int key) const {
        s = __fmul_rn(s, params.scale);
        float derivative = 1;
        if (params.softcap > 0) {
            const float inverse = fminf(ptx::reciprocal_approx(params.softcap), FLT_MAX);  // of a subnormal: inf
            const float t = hyperbolic_tangent(s * inverse);
            s = params.softcap * t;
            derivative = fmaf(-t, t, 1.0F);
        }
        if (slope != 0) s = fmaf(-slope, fabsf(static_cast<float>(query + diagonal - key)), s);
        return derivative;
    }

    /// Which weights of a warp's 16 keys and 64 queries dropout keeps.
    __device__ __forceinline__ DropoutBitsTransposed kept(int query, int key, int lane) const {
        if (!params.drops()) return {};
        // Opaque: what follows from them is made anew, so that no register is kept for it over the loop.
        return DropoutBitsTransposed::draw(params.keep, ptx::opaque(batch), ptx::opaque(head), ptx::opaque(query),
                                           ptx::opaque(key), ptx::opaque(lane));
    }
};

}  // namespace tessera::cuda::fa3::backward
