// SPDX-License-Identifier: Apache-2.0
//
// What scores and weights go through besides scale, mask and softmax, on transposed tiles: softcap, ALiBi, dropout.
// Rows are keys and columns queries; `key` and `query` are those of a thread's element 0. (On tiles whose rows are
// queries, tile/score.cuh does it.)
#pragma once

#include <cfloat>

#include "core/dropout.hpp"
#include "cuda/fa3/backward/elements.cuh"
#include "cuda/ptx/math.cuh"
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

    __device__ __forceinline__ bool drops() const { return params.keep_threshold != 0; }

    /// A bit for each of kCount elements: is the weight kept? One Philox block serves the keys of four lanes, each of
    /// which makes that of one element out of four; they exchange the words.
    template <int kCount>
    __device__ __forceinline__ std::uint32_t kept(int query, int key, int lane) const {
        static_assert(kCount <= 32);
        const auto last_kept = static_cast<std::uint32_t>(params.keep_threshold - 1);
        const int place = lane / 4 % 4;  // of the key among the four of a block
        std::uint32_t bits = 0;
#pragma unroll
        for (int j = 0; j < kCount / 4; ++j) {
            const PhiloxBlock own =
                dropout_block(params.seed, static_cast<std::uint32_t>(batch), static_cast<std::uint32_t>(head),
                              static_cast<std::uint32_t>(query + 8 * j + place % 2),
                              static_cast<std::uint32_t>((key + 8 * (place / 2)) / 4));
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const int other = place ^ t;  // whose key the word is sent for, and whose element is received
                const std::uint32_t low = other % 2 == 0 ? own[0] : own[1];
                const std::uint32_t high = other % 2 == 0 ? own[2] : own[3];
                const std::uint32_t word = __shfl_xor_sync(0xFFFFFFFF, other / 2 == 0 ? low : high, 4 * t);
                bits |= static_cast<std::uint32_t>(word <= last_kept) << (4 * j + other);
            }
        }
        return bits;
    }
};

}  // namespace tessera::cuda::fa3::backward
