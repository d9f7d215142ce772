// SPDX-License-Identifier: Apache-2.0
//
// Scaling and masking of scores between the MMA and the softmax. A warp has 16 rows of accumulators, in 8 keys each:
// s[kTiles][4].
#pragma once

#include <cfloat>

#include "cuda/decode/load.cuh"
#include "cuda/tile/softcap.cuh"

namespace tessera::cuda::decode {

/// Scales scores, then softcap and ALiBi. `key`: the thread's first. `rows`: those of `work`, or 0 if `work` is not
/// known yet.
template <int kTiles>
__device__ __forceinline__ void modify(float (&s)[kTiles][4], const Launch& launch, const SplitWork& work, int rows,
                                       int first_row, int key, int lane) {
    const ForwardParams& p = launch.params;
    const float inverse = p.softcap > 0 ? fminf(ptx::reciprocal_approx(p.softcap), FLT_MAX) : 0;
    const int shift = work.cached.sequence.len_kv - work.cached.sequence.len_q;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = first_row + 8 * r + lane / 4;
        const float slope = row < rows ? p.alibi_slope(work.batch, work.head(launch, row)) : 0;
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) {
            float& score = s[i / 2][2 * r + i % 2];
            score = __fmul_rn(score, p.scale);
            if (p.softcap > 0) score = __fmul_rn(p.softcap, hyperbolic_tangent(__fmul_rn(score, inverse)));
            if (slope == 0) continue;
            const int distance = abs(work.query(launch, row) + shift - (key + 8 * (i / 2) + i % 2));
            score = __fadd_rn(score, -__fmul_rn(slope, static_cast<float>(distance)));
        }
    }
}

/// Scores of keys that a row does not see become -inf. `key`: the thread's first; `rows`: the warp's 16.
template <int kTiles>
__device__ __forceinline__ void mask_scores(float (&s)[kTiles][4], const RowInfo* rows, int key, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const RowInfo row = rows[8 * r + lane / 4];
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) {
            const int at = key + 8 * (i / 2) + i % 2;
            if (at < row.first || at > row.last) s[i / 2][2 * r + i % 2] = -INFINITY;
        }
    }
}

/// The named barrier of the consumer warps.
inline constexpr int kBarrier = 1;

/// The sum of P over the slices of 16 keys of each tile, each of which has a sum of its own.
__device__ __forceinline__ float sum_of_slices(const float (&sums)[Config::kKeys / 16]) {
    return __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
}

/// The states of the rings that a consumer warp has.
template <class Shape>
struct PipelineStates {
    CopyPipelineState<Shape::kConfig.stages> k, v;
    CopyPipelineState<Shape::kConfig.q_stages> q;
};

}  // namespace tessera::cuda::decode
