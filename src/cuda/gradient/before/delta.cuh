// SPDX-License-Identifier: Apache-2.0
//
// What is subtracted from dP, delta = sum of P dP, summed exactly: O in 16 bits is too rounded for dO.O
// (docs/decisions/delta-of-rounded-output.md). And the LSE as the kernels after it want it, from S itself.
#pragma once

#include <algorithm>
#include <new>

#include "cuda/gradient/rows.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/tile/softmax.cuh"

namespace tessera::cuda::gradient {

/// |LSE| up to which an fp32 number holds it well enough (docs/numerics.md), in units of log2.
inline constexpr float kOrdinaryLse = 256 * kLog2E;

/// RowTile::norm of a row that the kernel that makes delta of O has left to the one that sums it.
inline constexpr float kLeft = -1;

/// m, l and the sum of P dP of two rows of a thread.
template <class T>
struct DeltaSums {
    OnlineSoftmax<T> softmax;
    float products[2] = {0, 0};  // of weights as softmax has them
    float largest[2] = {0, 0};   // of |products|, one by one, in fp16
    static constexpr bool kLimits = std::is_same_v<T, __half>;

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
        for (int r = 0; r < 2; ++r) products[r] = __fadd_rn(__fmul_rn(products[r], rescale[r]), part[r]);
        if constexpr (kLimits) {
#pragma unroll
            for (int r = 0; r < 2; ++r) largest[r] *= rescale[r];
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) largest[e / 2] = fmaxf(largest[e / 2], fabsf(s[j][e] * dp[j][e]));
            }
        }
    }

    /// Over the quad.
    __device__ __forceinline__ void finish() {
        softmax.finish();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            products[r] += __shfl_xor_sync(0xFFFFFFFF, products[r], 1);
            products[r] += __shfl_xor_sync(0xFFFFFFFF, products[r], 2);
            if constexpr (!kLimits) continue;
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xFFFFFFFF, largest[r], 1));
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xFFFFFFFF, largest[r], 2));
        }
    }

    /// After finish(): over every |dS| of the row; 0 where that is not finite.
    __device__ __forceinline__ float limit(int r, float dlse) const {
        const float found = (largest[r] + fabsf(products[r])) / softmax.sum[r] + fabsf(dlse);
        return found < INFINITY ? found : 0.0F;
    }

    __device__ __forceinline__ void store(RowTile& to, int row, int r, const Scale& scale, float dlse) const {
        const float sum = softmax.sum[r];
        to.norm[row] = 0;
        to.max[row] = 0;
        if (softmax.max[r] == -INFINITY && sum == 0.0F) {  // no key, or only scores of -inf
            to.offset[row] = INFINITY;
            to.delta[row] = 0;
            return;
        }
        const float offset = fmaf(softmax.max[r], scale.log2, kExponentOffset<T>) + ptx::log2_approx(sum);
        to.offset[row] = offset;
        to.delta[row] = products[r] / sum - dlse;
        if (fabsf(offset) < kOrdinaryLse) return;
        to.max[row] = __fmul_rn(softmax.max[r], scale.natural);
        to.norm[row] = 1 / (sum * kExponentOffsetFactor<T>);
    }
};

/// Row data of a warp's queries, and the limit of the head.
template <class T, RowConfig kConfig>
__device__ __forceinline__ void store_rows(const RowProducts<T, kConfig>& products, DeltaSums<T>& sums,
                                           const Scale& scale) {
    const Launch& launch = products.launch;
    const RowWork& work = products.work;
    const Rows& dlse = launch.params.dlse;
    const char* const from = dlse.data + head_offset(dlse, work.batch, work.sequence.first_q, work.head, sizeof(float));
    float limit = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = products.query() + 8 * r;
        // Rows past the last one fill up its tile: they are empty.
        if (products.lane() % 4 != 0 || row >= (work.sequence.len_q + kBlockQ - 1) / kBlockQ * kBlockQ) continue;
        const bool exists = row < work.sequence.len_q;
        const float gradient =
            exists && dlse.data ? *reinterpret_cast<const float*>(from + row * dlse.row * std::int64_t{4}) : 0.0F;
        RowTile& to = launch.rows[first_tile(launch, work.sequence, work.batch, work.head) + row / kBlockQ];
        if (!exists) sums.softmax = {};
        // With the residual of O, only what was left is done here.
        if (launch.o_residual.data != nullptr && to.norm[row % kBlockQ] != kLeft) continue;
        sums.store(to, row % kBlockQ, r, scale, gradient);
        if (exists) limit = fmaxf(limit, sums.limit(r, gradient));
    }
    if constexpr (DeltaSums<T>::kLimits) {
        const int most = __reduce_max_sync(0xFFFFFFFF, __float_as_int(limit));
        auto* const limits = reinterpret_cast<int*>(launch.limits);
        if (products.lane() == 0) atomicMax(limits + work.batch * launch.params.forward.heads_q + work.head, most);
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
    if (launch.o_residual.data != nullptr && launch.progress->some_left == 0) return;
    const auto tiles = static_cast<unsigned>((p.len_q + kConfig.block_q() - 1) / kConfig.block_q());
    const unsigned count = static_cast<unsigned>(p.batch) * static_cast<unsigned>(p.heads_q) * tiles;
    __shared__ unsigned number;  // no register is kept for it
    if (threadIdx.x == 0) number = blockIdx.x;
    for (;;) {
        __syncthreads();
        if (number >= count) return;
        if (threadIdx.x == 0) {
            const unsigned pair = number / tiles;
            const auto tile = static_cast<int>(tiles - 1 - number % tiles);  // the longest of a causal mask first
            const std::int64_t batch = pair / static_cast<unsigned>(p.heads_q);
            new (work_memory) RowWork(p, batch, static_cast<int>(pair % static_cast<unsigned>(p.heads_q)),
                                      tile * kConfig.block_q(), kConfig.block_q(), kConfig.block_kv);
            if (falls(p, batch)) launch.progress->broken = 1;
        }
        __syncthreads();
        if (work.exists()) {
            const RowProducts<T, kConfig> products{launch, work, memory};
            const Scale scale = kConfig.general ? Scale{} : Scale{p.scale, p.scale * kLog2E};
            DeltaSums<T> sums;
            products.for_each_tile(0, work.tiles.end,
                                   [&](auto& s, const auto& dp, int) { sums.add(s[0], dp[0], scale); });
            sums.finish();
            store_rows(products, sums, scale);
        }
        if (gridDim.x == count) return;
        __syncthreads();
        if (threadIdx.x == 0) number += gridDim.x;
    }
}

template <class T, class Shape>
cudaError_t start_delta(const Launch& launch, cudaStream_t stream) {
    constexpr RowConfig kConfig = Shape::kConfig;
    const ForwardParams& p = launch.params.forward;
    const std::int64_t tiles = (p.len_q + kConfig.block_q() - 1) / kConfig.block_q();
    // With the residual of O there is seldom anything to do: few thread blocks find that out sooner than many.
    constexpr std::int64_t kFew = 512;
    const std::int64_t all = p.batch * p.heads_q * tiles;
    const std::int64_t blocks = launch.o_residual.data != nullptr ? std::min(all, kFew) : all;
    return start(delta_kernel<T, Shape>, blocks, kConfig.threads(), kConfig.shared_bytes(), launch, stream);
}

}  // namespace tessera::cuda::gradient
