// SPDX-License-Identifier: Apache-2.0
//
// dV and dK of a split step's warps (split_loop.cuh) on their way out.
#pragma once

#include "cuda/gradient/split_products.cuh"
#include "cuda/tile/output.cuh"

namespace tessera::cuda::gradient {

template <class T, Config kConfig>
struct SplitOutput : SplitProducts<T, kConfig> {
    using Base = SplitProducts<T, kConfig>;
    using Base::first_sum_chunk;
    using Base::first_sum_row;
    using Base::inputs;
    using Base::kColumns;
    using Base::kHeadDim;
    using Base::kSumTiles;
    using Base::lane;
    using Base::warp;
    using Base::work;
    using typename Base::Sums;

    /// Of two warps with the same keys the first has dV in the end, the other dK.
    __device__ static __forceinline__ bool keeps_dv() { return Base::query_part() == 0; }
    /// The sums of two warps with the same keys become one, by way of the stages: `dv` is then what the warp has.
    __device__ __forceinline__ void exchange_sums(Sums& dv, const Sums& dk) const {
        auto* const places = reinterpret_cast<float4*>(inputs.q_tile(0)) + inputs.thread();
        const bool keeps = keeps_dv();
#pragma unroll
        for (int i = 0; i < kSumTiles * kColumns; ++i) {
            float(&v)[4] = dv[i / kColumns][i % kColumns];
            const float(&k)[4] = dk[i / kColumns][i % kColumns];
            float given[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                given[e] = keeps ? k[e] : v[e];
                if (!keeps) v[e] = k[e];
            }
            places[i * kConfig.threads()] = make_float4(given[0], given[1], given[2], given[3]);
        }
        __syncthreads();
        const float4* const of_other = keeps ? places + kConfig.threads() / 2 : places - kConfig.threads() / 2;
#pragma unroll
        for (int i = 0; i < kSumTiles * kColumns; ++i) {
            const float4 x = of_other[i * kConfig.threads()];
            float(&sum)[4] = dv[i / kColumns][i % kColumns];
            sum[0] += x.x;
            sum[1] += x.y;
            sum[2] += x.z;
            sum[3] += x.w;
        }
    }

    /// The warp's sums to the workspace, as those of a share.
    __device__ __forceinline__ void put_share(bool dv, const Sums& sums, float factor) const {
        const int row = first_sum_row() + lane() / 4;
        float* const to = this->share_row(dv, row) + 8 * first_sum_chunk() + lane() % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2 * kSumTiles; ++i) {
            if (work.first_key + row + 8 * i >= work.sequence.len_kv) continue;
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
                Base::put_two(to + 8 * i * kHeadDim + 8 * n, sums[i / 2][n], i % 2, factor);
            }
        }
    }

    /// The warp's sums, rounded, into a tile of the block's keys in shared memory.
    __device__ __forceinline__ void stage_sums(char* tile, const Sums& sums, float factor) const {
        const int at = chunk_offset<kHeadDim>(first_sum_row() + lane() / 4, first_sum_chunk()) + lane() % 4 * 4;
#pragma unroll
        for (int i = 0; i < 2 * kSumTiles; ++i) {
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
                // + 0: whether -0 met further products of weight 0 must not show.
                const float low = fmaf(sums[i / 2][n][i % 2 * 2], factor, 0.0F);
                const float high = fmaf(sums[i / 2][n][i % 2 * 2 + 1], factor, 0.0F);
                char* to = tile + (at ^ 16 * n) + 8 * i * kHeadDim * 2;
                *reinterpret_cast<std::uint32_t*>(to) = ptx::pack<T>(low, high);
            }
        }
    }
    __device__ __forceinline__ void put_sums(const char* tile, const Rows& rows, int dim, bool vector) const {
        const std::int64_t offset = head_offset(rows, work.batch, work.sequence.first_kv, work.kv_head, sizeof(T));
        const Target target = target_of<T>(rows, offset, work.sequence.len_kv, dim, vector);
        constexpr int kRows = kConfig.block_kv() / (kConfig.threads() / 32);
        cuda::store<kHeadDim, kRows>(tile, target, work.first_key, warp() * kRows, lane());
    }
};

}  // namespace tessera::cuda::gradient
