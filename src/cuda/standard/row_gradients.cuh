// SPDX-License-Identifier: Apache-2.0
//
// The row kernel of the backward: a row of S becomes P, a row of dP becomes dS = P (dP - delta). Both are in 16 bits
// and overwrite the first half of the row of S or dP. A CTA has one row; a thread has four keys in every 512, as in the
// forward's softmax. delta is the sum of P dP in fp32, since O in 16 bits is rounded too much for dO . O
// (docs/decisions/delta-of-rounded-output.md).
#pragma once

#include "cuda/gradient/main/fragments.cuh"
#include "cuda/gradient/main/transposed_scores.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/standard/softmax.cuh"

namespace tessera::cuda::standard {

/// The fp16 scale of dS of a row (cuda/backward/host/fp16_scale.hpp). `bound`: of every |dS| of the row; the scale is 1
/// if it is not finite.
template <class T>
__device__ __forceinline__ float ds_scale(float bound) {
    if constexpr (!std::is_same_v<T, __half>) return 1;
    if (!(bound < INFINITY)) return 1;
    return power_of_two(Fp16DsScaleOfRows::exponent(biased_exponent(bound)));
}

/// One query of a head: its rows of Q K^T and dO V^T.
template <class T>
struct GradientRow {
    using Row = ScoreRow<kGradientKeysCached>;
    const ForwardParams& params;
    const Head& head;
    const int query;
    const Row qk;  // Q K^T
    const Row dp;  // dO V^T
    const Band32 band;
    const gradient::TransposedScores<T> transforms;

    /// The scores of four neighbouring keys.
    struct Keys {
        bool visible[kKeysPerThread];
        float score[kKeysPerThread];
        float slope[kKeysPerThread];  // derivative of the softcap
    };

    __device__ __forceinline__ Keys keys(int key) const {
        const float4 x = qk.read(key);
        const float product[kKeysPerThread] = {x.x, x.y, x.z, x.w};
        Keys out;
#pragma unroll
        for (int i = 0; i < kKeysPerThread; ++i) {
            out.visible[i] = band.sees(query, key + i);
            gradient::Scored scored{-INFINITY, 0};
            if (out.visible[i]) scored = transforms.transform(product[i], query, key + i);
            out.score[i] = scored.score;
            out.slope[i] = scored.slope;
        }
        return out;
    }

    /// dP of the four keys, with the dropout; 0 for pairs that are hidden or dropped. `kept`: bit i is set if key + i
    /// is not dropped.
    __device__ __forceinline__ void gradients(int key, const Keys& of, float (&out)[kKeysPerThread],
                                              unsigned& kept) const {
        const float4 x = dp.read(key);
        const float from[kKeysPerThread] = {x.x, x.y, x.z, x.w};
        kept = 0xF;
        if (params.drops()) {
            kept = kept_keys<kKeysPerThread>(params.keep, head.batch, static_cast<int>(head.head), query, key);
        }
#pragma unroll
        for (int i = 0; i < kKeysPerThread; ++i) {
            out[i] = of.visible[i] && (kept >> i & 1) != 0 ? from[i] * params.keep_scale : 0.0F;
        }
    }

    __device__ __forceinline__ float maximum() const {
        float m = -INFINITY;
        qk.for_each([&](int key, bool exists) {
            if (!exists) return;
            const Keys of = keys(key);
#pragma unroll
            for (const float score : of.score) m = fmaxf(m, score);
        });
        return m;
    }
};

/// A thread's part of the sums over a row, with exp(S - m) for P.
struct RowSums {
    float p = 0;
    float p_dp = 0;     // the sum of P dP
    float largest = 0;  // the largest |P dP| of a pair
};

template <class T>
__device__ __forceinline__ RowSums sums_of(const GradientRow<T>& row, float m) {
    RowSums sums;
    row.qk.for_each([&](int key, bool exists) {
        if (!exists) return;
        const typename GradientRow<T>::Keys of = row.keys(key);
        float dp[kKeysPerThread];
        unsigned kept;
        row.gradients(key, of, dp, kept);
#pragma unroll
        for (int i = 0; i < kKeysPerThread; ++i) {
            const float p = of.visible[i] ? ptx::exp2_approx((of.score[i] - m) * kLog2E) : 0.0F;
            sums.p += p;
            sums.p_dp = fmaf(p, dp[i], sums.p_dp);
            sums.largest = fmaxf(sums.largest, fabsf(p * dp[i]));
        }
    });
    return sums;
}

/// The numbers of a row on which P and dS depend.
struct RowFactors {
    float m;
    float norm;  // 1 / l
    float delta;
    float scale;  // fp16: the scale of dS
};

/// Writes P and dS; `exact`: also dS in fp32, `unrounded`: also the gradient before the softcap, in fp32.
template <class T>
__device__ __forceinline__ void write_row(const GradientRow<T>& row, const RowFactors& f, T* p_row, T* ds_row,
                                          float* exact, float* unrounded) {
    row.qk.for_each([&](int key, bool exists) {
        float p[kKeysPerThread] = {};
        float ds[kKeysPerThread] = {};
        if (exists) {
            const typename GradientRow<T>::Keys of = row.keys(key);
            float dp[kKeysPerThread];
            unsigned kept;
            row.gradients(key, of, dp, kept);
            float before_softcap[kKeysPerThread] = {};
#pragma unroll
            for (int i = 0; i < kKeysPerThread; ++i) {
                if (!of.visible[i]) continue;
                const float prob = ptx::exp2_approx((of.score[i] - f.m) * kLog2E) * f.norm;
                before_softcap[i] = prob * (dp[i] - f.delta);
                p[i] = (kept >> i & 1) != 0 ? prob * kPScale<T> : 0.0F;
                ds[i] = before_softcap[i] * of.slope[i];
            }
            if (exact != nullptr) *reinterpret_cast<float4*>(exact + key) = make_float4(ds[0], ds[1], ds[2], ds[3]);
            if (unrounded != nullptr) {
                *reinterpret_cast<float4*>(unrounded + key) =
                    make_float4(before_softcap[0], before_softcap[1], before_softcap[2], before_softcap[3]);
            }
        }
        if (!row.qk.is_cached(key)) __syncthreads();  // all threads have read the elements that are overwritten
        if (!exists) return;
        *reinterpret_cast<uint2*>(p_row + key) = {ptx::pack<T>(p[0], p[1]), ptx::pack<T>(p[2], p[3])};
        *reinterpret_cast<uint2*>(ds_row + key) = {ptx::pack<T>(ds[0] * f.scale, ds[1] * f.scale),
                                                   ptx::pack<T>(ds[2] * f.scale, ds[3] * f.scale)};
    });
}

template <class T>
__global__ void __launch_bounds__(kSoftmaxThreads)
    row_gradient_kernel(const __grid_constant__ RowGradientLaunch launch) {
    extern __shared__ __align__(16) float cached[];
    __shared__ float parts[4][kSoftmaxThreads / 32];
    const ForwardParams& p = launch.forward.params;
    const QueryWork work(p);
    const Head head(launch.forward, work.pair);
    const int query = work.query;
    if (query >= head.sequence.len_q) return;
    const BlockRange tiles = head.tiles(query / kBlockQ * kBlockQ);
    const int begin = tiles.begin * kBlockKv;
    const int first = begin / kKeysAtOnce * kKeysAtOnce;
    const std::int64_t at = query * launch.forward.pitch;
    float* const s_row = head.scores + at;
    float* const dp_row = launch.dp + (s_row - launch.forward.scores);
    using Row = typename GradientRow<T>::Row;
    const GradientRow<T> row{p,
                             head,
                             query,
                             Row{s_row, cached, first, begin, tiles.end * kBlockKv},
                             Row{dp_row, cached + kGradientKeysCached, first, begin, tiles.end * kBlockKv},
                             Band32(head.band),
                             {p, ScoreInputs(p, head.batch, head.head), head.sequence.len_kv - head.sequence.len_q,
                              static_cast<std::uint32_t>(head.batch), static_cast<std::uint32_t>(head.head)}};
    row.qk.cache();
    row.dp.cache();

    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    const auto sum = [](float a, float b) { return a + b; };
    float m = block_reduce(row.maximum(), parts[0], larger);
    if (m == -INFINITY) m = 0;  // no visible key: exp(-inf - 0) = 0
    const RowSums sums = sums_of(row, m);
    const float l = block_reduce(sums.p, parts[1], sum);
    const float p_dp = block_reduce(sums.p_dp, parts[2], sum);
    const float largest = std::is_same_v<T, __half> ? block_reduce(sums.largest, parts[3], larger) : 0.0F;
    float dlse = 0;
    if (launch.dlse.data != nullptr) {
        const Rows& rows = launch.dlse;
        const std::int64_t offset = head_offset(rows, head.batch, head.sequence.first_q, head.head, sizeof(float));
        dlse = reinterpret_cast<const float*>(rows.data + offset)[query * rows.row];
    }
    // The sink has a part of the sum of P, and its dP is 0.
    const float sink = sink_of(p, head.head);
    RowFactors factors{m, 0, sink == -INFINITY ? 0.0F : -dlse, 1};
    if (l != 0) {
        const float all = l + ptx::exp2_approx((sink - m) * kLog2E);
        factors.norm = 1 / all;
        factors.delta = p_dp / all - dlse;
        factors.scale = ds_scale<T>((largest + fabsf(p_dp)) / all + fabsf(dlse));
    }
    const std::int64_t offset = s_row - launch.forward.scores;
    write_row(row, factors, reinterpret_cast<T*>(s_row), reinterpret_cast<T*>(dp_row),
              launch.exact == nullptr ? nullptr : launch.exact + offset,
              launch.unrounded == nullptr ? nullptr : launch.unrounded + offset);
    if (threadIdx.x != 0) return;
    head.factors[query] = p.scale / factors.scale;
    if (launch.delta != nullptr) launch.delta[head.factors - launch.forward.factors + query] = factors.delta;
}

template <class T>
cudaError_t start_row_gradients(const RowGradientLaunch& launch, cudaStream_t stream) {
    constexpr int kBytes = 2 * kGradientKeysCached * static_cast<int>(sizeof(float));
    const ForwardParams& p = launch.forward.params;
    return start(row_gradient_kernel<T>, query_blocks(p), kSoftmaxThreads, kBytes, launch, stream);
}

}  // namespace tessera::cuda::standard
