// SPDX-License-Identifier: Apache-2.0
//
// Softcap, ALiBi, bias and dropout of S^T, whose rows are keys: element e of the accumulator s[4] of mma.m16n8k16 is
// key half e / 2 (8 keys apart) and query e % 2. The arithmetic is that of tile/score.cuh.
#pragma once

#include "cuda/tile/score.cuh"

namespace tessera::cuda::gradient {

/// A score in units of the natural logarithm, and its derivative by scale * q . k (the derivative of the softcap).
struct Scored {
    float score;
    float slope;
};

template <class T>
struct TransposedScores {
    const ForwardParams& params;
    const ScoreInputs inputs;
    const int diagonal;  // len_kv - len_q
    const std::uint32_t batch;
    const std::uint32_t head;

    /// The score of a visible pair.
    __device__ __forceinline__ Scored transform(float product, int query, int key) const {
        Scored out{__fmul_rn(product, params.scale), 1.0F};
        if (params.softcap > 0) {
            const float x = out.score * fminf(ptx::reciprocal_approx(params.softcap), FLT_MAX);
            out.score = params.softcap * hyperbolic_tangent(x);
            const float r = ptx::reciprocal_approx(ptx::exp2_approx(fabsf(x) * (2 * kLog2E)) + 1.0F);
            out.slope = 4 * r * (1 - r);  // 1 - tanh^2
        }
        if (inputs.slope != 0) {
            const auto same = static_cast<float>(query + diagonal);  // the key with distance 0
            out.score = fmaf(-inputs.slope, fabsf(same - static_cast<float>(key)), out.score);
        }
        if (inputs.bias) out.score += bias_at(query * params.bias.row + key * params.bias.column);
        return out;
    }

    __device__ __forceinline__ bool drops() const { return params.drops(); }

    /// Draws the dropout mask of 16 keys x 64 queries. All lanes of the warp call it.
    __device__ __forceinline__ DropoutBitsTransposed draw(int query, int key, int lane) const {
        return DropoutBitsTransposed::draw(params.keep, batch, static_cast<int>(head), query, key, lane);
    }

 private:
    __device__ __forceinline__ float bias_at(std::int64_t index) const {
        if (params.bias.fp32) return reinterpret_cast<const float*>(inputs.bias)[index];
        return static_cast<float>(reinterpret_cast<const T*>(inputs.bias)[index]);
    }
};

}  // namespace tessera::cuda::gradient
