// SPDX-License-Identifier: Apache-2.0
//
// delta = sum of P dP, in fp32. dO . O is not used, since O in 16 bits is rounded too much
// (docs/decisions/delta-of-rounded-output.md). The kernel also computes the LSE again, from S itself.
#pragma once

#include <algorithm>
#include <new>

#include "cuda/gradient/before/query_tile.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sink.cuh"
#include "cuda/tile/softmax.cuh"

namespace tessera::cuda::gradient {

/// kOrdinaryLse in units of log2.
inline constexpr float kOrdinaryOffset = kOrdinaryLse * kLog2E;

/// m, l and the sum of P dP, for two rows of a thread.
template <class T>
struct DeltaSums {
    OnlineSoftmax<T> softmax;
    double sum_p_dp[2] = {0, 0};  // P as softmax has it; each tile is summed in fp32
    float largest[2] = {0, 0};    // |P dP| of one pair, in fp16
    static constexpr bool kFp16 = std::is_same_v<T, __half>;

    template <int kTiles>
    __device__ __forceinline__ void add(float (&s)[kTiles][4], const float (&dp)[kTiles][4], const Scale& scale) {
        float rescale[2];
        softmax.update(s, scale, rescale);
        float part[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) part[e / 2] = fmaf(s[j][e], dp[j][e], part[e / 2]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) sum_p_dp[r] = fma(sum_p_dp[r], double{rescale[r]}, double{part[r]});
        if constexpr (kFp16) {
#pragma unroll
            for (int r = 0; r < 2; ++r) largest[r] *= rescale[r];
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) largest[e / 2] = fmaxf(largest[e / 2], fabsf(s[j][e] * dp[j][e]));
            }
        }
    }

    /// Reduces over the quad.
    __device__ __forceinline__ void finish() {
        softmax.finish();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum_p_dp[r] = quad_sum(sum_p_dp[r]);
            if constexpr (kFp16) largest[r] = quad_max(largest[r]);
        }
    }

    /// A bound of |dS| of the row, after finish(); 0 if it is not finite.
    __device__ __forceinline__ float ds_bound(int r, float dlse) const {
        const float found = (largest[r] + fabsf(static_cast<float>(sum_p_dp[r]))) / softmax.sum[r] + fabsf(dlse);
        return found < INFINITY ? found : 0.0F;
    }

    /// `sink`: of the head; -inf: none. It has a part of the sum, and its dP is 0.
    __device__ __forceinline__ void store(RowTile& to, int row, int r, const Scale& scale, float dlse,
                                          float sink) const {
        to.norm[row] = 0;
        to.max[row] = 0;
        if (softmax.max[r] == -INFINITY && softmax.sum[r] == 0.0F) {  // no key, or only scores of -inf
            to.offset[row] = INFINITY;
            to.delta[row] = sink == -INFINITY ? 0.0F : -dlse;
            return;
        }
        const float offset_of_max = fmaf(softmax.max[r], scale.log2, kExponentOffset<T>);
        float sum = softmax.sum[r];
        // Only with a sink: in units of log2 the largest score may be -inf, and -inf beside it would be NaN.
        if (sink != -INFINITY) sum = __fadd_rn(sum, ptx::exp2_approx(fmaf(sink, kLog2E, -offset_of_max)));
        if (sum == INFINITY) {  // the sink is far above the scores: P is 0
            to.offset[row] = INFINITY;
            to.delta[row] = -dlse;
            return;
        }
        const float offset = offset_of_max + ptx::log2_approx(sum);
        to.offset[row] = offset;
        to.delta[row] = static_cast<float>(sum_p_dp[r]) / sum - dlse;
        if (fabsf(offset) < kOrdinaryOffset) return;
        to.max[row] = __fmul_rn(softmax.max[r], scale.natural);
        to.norm[row] = 1 / (sum * kExponentOffsetFactor<T>);
    }
};

/// Writes the row data of a warp's queries, and raises the bound of |dS| of the head.
template <class T, RowConfig kConfig>
__device__ __forceinline__ void store_rows(const RowGemms<T, kConfig>& gemms, DeltaSums<T>& sums, const Scale& scale) {
    const Launch& launch = gemms.launch;
    const RowWork& work = gemms.work;
    const Rows& dlse = launch.params.dlse;
    const char* const from = dlse.data + head_offset(dlse, work.batch, work.sequence.first_q, work.head, sizeof(float));
    float bound = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = gemms.query() + 8 * r;
        // Rows past the end are written as empty, up to the end of their tile.
        if (gemms.lane() % 4 != 0 || row >= (work.sequence.len_q + kBlockQ - 1) / kBlockQ * kBlockQ) continue;
        const bool exists = row < work.sequence.len_q;
        const float gradient =
            exists && dlse.data ? *reinterpret_cast<const float*>(from + row * dlse.row * std::int64_t{4}) : 0.0F;
        RowTile& to = launch.rows[first_tile(launch, work.sequence, work.batch, work.head) + row / kBlockQ];
        if (!exists) sums.softmax = {};
        // With o_residual the kernel of delta from O has done all rows but those marked kRowLeft.
        if (launch.o_residual.data != nullptr && to.norm[row % kBlockQ] != kRowLeft) continue;
        sums.store(to, row % kBlockQ, r, scale, gradient, sink_of(launch.params.forward, work.head));
        if (exists) bound = fmaxf(bound, sums.ds_bound(r, gradient));
    }
    if constexpr (DeltaSums<T>::kFp16) {
        const int most = __reduce_max_sync(kAllLanes, __float_as_int(bound));
        auto* const bounds = reinterpret_cast<int*>(launch.ds_scales);
        if (gemms.lane() == 0) atomicMax(bounds + work.batch * launch.params.forward.heads_q + work.head, most);
    }
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.blocks_per_sm)
    delta_kernel(const __grid_constant__ Launch launch) {
    constexpr RowConfig kConfig = Shape::kConfig;
    extern __shared__ __align__(128) char memory[];
    __shared__ alignas(RowWork) char work_memory[sizeof(RowWork)];
    const RowWork& work = *reinterpret_cast<const RowWork*>(work_memory);
    const ForwardParams& p = launch.params.forward;
    if (launch.o_residual.data != nullptr && launch.counters->rows_left == 0) return;
    const auto count = static_cast<unsigned>(tiles_of_heads(p, kConfig.block_q()));
    __shared__ unsigned number;  // in shared memory, since registers are few
    if (threadIdx.x == 0) number = blockIdx.x;
    for (;;) {
        __syncthreads();
        if (number >= count) return;
        if (threadIdx.x == 0) {
            // The longest of a causal mask first.
            const HeadTile of = head_tile_at<true>(p, number, kConfig.block_q());
            new (work_memory)
                RowWork(p, of.batch, of.head, of.tile * kConfig.block_q(), kConfig.block_q(), kConfig.block_kv);
        }
        __syncthreads();
        if (work.exists()) {
            const RowGemms<T, kConfig> gemms{launch, work, memory};
            const Scale scale = kConfig.general ? Scale{} : Scale{p.scale, p.scale * kLog2E};
            DeltaSums<T> sums;
            gemms.for_each_tile(0, work.tiles.end, [&](auto& s, const auto& dp, int) { sums.add(s[0], dp[0], scale); });
            sums.finish();
            store_rows(gemms, sums, scale);
        }
        if (gridDim.x == count) return;
        __syncthreads();
        if (threadIdx.x == 0) number += gridDim.x;
    }
}

template <class T, class Shape>
cudaError_t start_delta(const Launch& launch, cudaStream_t stream) {
    constexpr RowConfig kConfig = Shape::kConfig;
    // With o_residual few rows are left, if any, and a few CTAs see that none is left sooner than many.
    constexpr std::int64_t kFew = 512;
    const std::int64_t all = tiles_of_heads(launch.params.forward, kConfig.block_q());
    const std::int64_t blocks = launch.o_residual.data != nullptr ? std::min(all, kFew) : all;
    return start(delta_kernel<T, Shape>, blocks, kConfig.threads(), kConfig.shared_bytes(), launch, stream);
}

}  // namespace tessera::cuda::gradient
