// SPDX-License-Identifier: Apache-2.0
//
// The backward between its products: a row of S becomes P, a row of dP becomes dS = P (dP - delta), both in 16 bits
// over the first half of what they were made of. A thread block has one row, each thread four keys in every 512, as in
// the forward's softmax. delta is the sum of P dP, of fp32 numbers: O in 16 bits is too rounded for dO.O
// (docs/decisions/delta-of-rounded-output.md).
#pragma once

#include "cuda/gradient/key_thread.cuh"
#include "cuda/gradient/main/transposed_scores.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/standard/softmax.cuh"

namespace tessera::cuda::standard {

/// The power of two that dS of a row is held times, `limit` being over every |dS|: fp16 has neither large numbers nor
/// small ones. Of a row that is not finite: 1.
template <class T>
__device__ __forceinline__ float gradient_unit(float limit) {
    if constexpr (!std::is_same_v<T, __half>) return 1;
    constexpr int kMost = 60;
    if (!(limit < INFINITY)) return 1;
    const int exponent = __float_as_int(limit) >> 23;
    return __int_as_float((127 + min(max(14 + 127 - exponent, -kMost), kMost)) << 23);
}

/// One query of a head, and its keys.
template <class T>
struct GradientRow {
    using Row = ScoreRow<kGradientKeysHeld>;
    const ForwardParams& params;
    const Head& head;
    const int query;
    const Row products;  // Q K^T
    const Row dp;        // dO V^T
    const Visible visible;
    const gradient::TransposedScores<T> transforms;

    /// Four keys from `key` on, those that the query sees.
    struct Keys {
        bool seen[kKeysPerThread];
        float score[kKeysPerThread];
        float slope[kKeysPerThread];  // of the softcap
    };

    __device__ __forceinline__ Keys keys(int key) const {
        const float4 x = products.read(key);
        const float product[kKeysPerThread] = {x.x, x.y, x.z, x.w};
        Keys out;
#pragma unroll
        for (int i = 0; i < kKeysPerThread; ++i) {
            out.seen[i] = visible.sees(query, key + i);
            gradient::Scored scored{-INFINITY, 0};
            if (out.seen[i]) scored = transforms.transform(product[i], query, key + i);
            out.score[i] = scored.score;
            out.slope[i] = scored.slope;
        }
        return out;
    }

    /// The gradient of dropped P, times what the dropout makes of it; 0 of pairs that are hidden or dropped. `kept`:
    /// bit i of key + i.
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
            out[i] = of.seen[i] && (kept >> i & 1) != 0 ? from[i] * params.keep_scale : 0.0F;
        }
    }

    __device__ __forceinline__ float maximum() const {
        float m = -INFINITY;
        products.for_each([&](int key, bool wanted) {
            if (!wanted) return;
            const Keys of = keys(key);
#pragma unroll
            for (const float score : of.score) m = fmaxf(m, score);
        });
        return m;
    }
};

/// Sums over a row, a thread's share of them; weights are exp(S - m).
struct RowSums {
    float weights = 0;
    float products = 0;  // of weights and dP
    float largest = 0;   // of |products|, one by one
};

template <class T>
__device__ __forceinline__ RowSums sums_of(const GradientRow<T>& row, float m) {
    RowSums sums;
    row.products.for_each([&](int key, bool wanted) {
        if (!wanted) return;
        const typename GradientRow<T>::Keys of = row.keys(key);
        float dp[kKeysPerThread];
        unsigned kept;
        row.gradients(key, of, dp, kept);
#pragma unroll
        for (int i = 0; i < kKeysPerThread; ++i) {
            const float p = of.seen[i] ? ptx::exp2_approx((of.score[i] - m) * kLog2E) : 0.0F;
            sums.weights += p;
            sums.products = fmaf(p, dp[i], sums.products);
            sums.largest = fmaxf(sums.largest, fabsf(p * dp[i]));
        }
    });
    return sums;
}

/// What P and dS of a row are made with.
struct RowFactors {
    float m;
    float norm;  // 1 / l
    float delta;
    float unit;
};

/// P, dS and, where it is wanted, dS before the softcap and before it is rounded.
template <class T>
__device__ __forceinline__ void write_row(const GradientRow<T>& row, const RowFactors& f, T* p_row, T* ds_row,
                                          float* exact, float* unrounded) {
    row.products.for_each([&](int key, bool wanted) {
        float p[kKeysPerThread] = {};
        float ds[kKeysPerThread] = {};
        if (wanted) {
            const typename GradientRow<T>::Keys of = row.keys(key);
            float dp[kKeysPerThread];
            unsigned kept;
            row.gradients(key, of, dp, kept);
            float plain[kKeysPerThread] = {};
#pragma unroll
            for (int i = 0; i < kKeysPerThread; ++i) {
                if (!of.seen[i]) continue;
                const float weight = ptx::exp2_approx((of.score[i] - f.m) * kLog2E) * f.norm;
                plain[i] = weight * (dp[i] - f.delta);
                p[i] = (kept >> i & 1) != 0 ? weight * gradient::kWeightUnit<T> : 0.0F;
                ds[i] = plain[i] * of.slope[i];
            }
            if (exact != nullptr) *reinterpret_cast<float4*>(exact + key) = make_float4(ds[0], ds[1], ds[2], ds[3]);
            if (unrounded != nullptr) {
                *reinterpret_cast<float4*>(unrounded + key) = make_float4(plain[0], plain[1], plain[2], plain[3]);
            }
        }
        if (!row.products.is_held(key)) __syncthreads();  // what is written over has been read
        if (!wanted) return;
        *reinterpret_cast<uint2*>(p_row + key) = {ptx::pack<T>(p[0], p[1]), ptx::pack<T>(p[2], p[3])};
        *reinterpret_cast<uint2*>(ds_row + key) = {ptx::pack<T>(ds[0] * f.unit, ds[1] * f.unit),
                                                   ptx::pack<T>(ds[2] * f.unit, ds[3] * f.unit)};
    });
}

template <class T>
__global__ void __launch_bounds__(kSoftmaxThreads)
    row_gradient_kernel(const __grid_constant__ RowGradientLaunch launch) {
    extern __shared__ __align__(16) float held[];
    __shared__ float parts[4][kSoftmaxThreads / 32];
    const ForwardParams& p = launch.forward.params;
    const QueryWork work(p);
    const Head head(launch.forward, work.pair);
    const int query = work.query;
    if (query >= head.sequence.len_q) return;
    const KeyTiles tiles = head.tiles(query / kBlockQ * kBlockQ);
    const int begin = tiles.first * kBlockKv;
    const int first = begin / kKeysAtOnce * kKeysAtOnce;
    const std::int64_t at = query * launch.forward.pitch;
    float* const s_row = head.scores + at;
    float* const dp_row = launch.dp + (s_row - launch.forward.scores);
    using Row = typename GradientRow<T>::Row;
    const GradientRow<T> row{p,
                             head,
                             query,
                             Row{s_row, held, first, begin, tiles.end * kBlockKv},
                             Row{dp_row, held + kGradientKeysHeld, first, begin, tiles.end * kBlockKv},
                             Visible(head.band),
                             {p, ScoreInputs(p, head.batch, head.head), head.sequence.len_kv - head.sequence.len_q,
                              static_cast<std::uint32_t>(head.batch), static_cast<std::uint32_t>(head.head)}};
    row.products.hold();
    row.dp.hold();

    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    const auto sum = [](float a, float b) { return a + b; };
    float m = block_reduce(row.maximum(), parts[0], larger);
    if (m == -INFINITY) m = 0;  // nothing visible: exp(-inf - 0) is the 0 that is wanted
    const RowSums sums = sums_of(row, m);
    const float l = block_reduce(sums.weights, parts[1], sum);
    const float products = block_reduce(sums.products, parts[2], sum);
    const float largest = std::is_same_v<T, __half> ? block_reduce(sums.largest, parts[3], larger) : 0.0F;
    float dlse = 0;
    if (launch.dlse.data != nullptr) {
        const Rows& rows = launch.dlse;
        const std::int64_t offset = head_offset(rows, head.batch, head.sequence.first_q, head.head, sizeof(float));
        dlse = reinterpret_cast<const float*>(rows.data + offset)[query * rows.row];
    }
    RowFactors factors{m, 0, 0, 1};
    if (l != 0) {
        factors.norm = 1 / l;
        factors.delta = products / l - dlse;
        factors.unit = gradient_unit<T>((largest + fabsf(products)) / l + fabsf(dlse));
    }
    const std::int64_t place = s_row - launch.forward.scores;
    write_row(row, factors, reinterpret_cast<T*>(s_row), reinterpret_cast<T*>(dp_row),
              launch.exact == nullptr ? nullptr : launch.exact + place,
              launch.unrounded == nullptr ? nullptr : launch.unrounded + place);
    if (threadIdx.x == 0) head.factors[query] = p.scale / factors.unit;
}

template <class T>
cudaError_t start_row_gradients(const RowGradientLaunch& launch, cudaStream_t stream) {
    constexpr int kBytes = 2 * kGradientKeysHeld * static_cast<int>(sizeof(float));
    const ForwardParams& p = launch.forward.params;
    return start(row_gradient_kernel<T>, query_blocks(p), kSoftmaxThreads, kBytes, launch, stream);
}

}  // namespace tessera::cuda::standard
