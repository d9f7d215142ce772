// SPDX-License-Identifier: Apache-2.0
//
// The sum over the splits of a row, in a fixed order, and O and LSE from it. This kernel starts beside split_kernel and
// waits for it (programmatic dependent launch).
#pragma once

#include "cuda/decode/launch.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/output.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/softmax.cuh"

namespace tessera::cuda::decode {

inline constexpr int kSegments = 32;  ///< runs of neighbouring splits that are summed at the same time, by a warp each
inline constexpr int kCombineWarps = 16;

/// The factor of sums relative to maximum `before` when the maximum becomes `after`: that of OnlineSoftmax.
template <class T>
__device__ __forceinline__ float rescale_of(float before, float after, const Scale& scale) {
    OnlineSoftmax<T> row;
    row.max[0] = row.max[1] = before;
    Rescaling rescaling = row.update_max({after, after}, scale);
    float none[1][4] = {};
    if (rescaling.large(0)) row.subtract(none, scale, rescaling);
    return rescaling.rescale[0];
}

template <class T, class Shape>
__global__ void __launch_bounds__(32 * kCombineWarps) combine_kernel(const __grid_constant__ Launch launch) {
    constexpr int kHeadDim = Shape::kConfig.head_dim;
    constexpr int kColumns = kHeadDim / 32;  // of a lane: neighbours
    __shared__ float sums[kSegments][kHeadDim];
    __shared__ float sums_of_p[kSegments];
    const ForwardParams& p = launch.params;
    const auto heads_q = static_cast<unsigned>(p.heads_q);
    const auto len_q = static_cast<unsigned>(p.len_q);
    const int head = static_cast<int>(blockIdx.x % heads_q);
    const int query = static_cast<int>(blockIdx.x / heads_q % len_q);
    const int batch = static_cast<int>(blockIdx.x / heads_q / len_q);
    const Sequence sequence = sequence_of(p, batch);
    if (query >= sequence.len_q) return;
    const Splits splits(p.mask.bind(sequence.len_q, sequence.len_kv).kv_range(0, sequence.len_q));
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::int64_t first = launch.partial(launch.row(batch, query, head), 0);
    const Scale scale{p.scale, p.scale * kLog2E};
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_wait();
#endif

    float maximum = -INFINITY;
    for (int i = lane; i < splits.count; i += 32) maximum = fmaxf(maximum, launch.ml[first + i].x);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, step));

    const int of_segment = (splits.count + kSegments - 1) / kSegments;
    for (int segment = warp; segment < kSegments; segment += kCombineWarps) {
        float sum[kColumns] = {};
        float sum_of_p = 0;
        const int end = min((segment + 1) * of_segment, splits.count);
#pragma unroll 4
        for (int i = segment * of_segment; i < end; ++i) {
            const float2 ml = launch.ml[first + i];
            const float factor = rescale_of<T>(ml.x, maximum, scale);
            const float* from = launch.o + (first + i) * kHeadDim + lane * kColumns;
#pragma unroll
            for (int c = 0; c < kColumns; c += 2) {
                const float2 pair = *reinterpret_cast<const float2*>(from + c);
                sum[c] = fmaf(pair.x, factor, sum[c]);
                sum[c + 1] = fmaf(pair.y, factor, sum[c + 1]);
            }
            sum_of_p = fmaf(ml.y, factor, sum_of_p);
        }
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sums[segment][lane * kColumns + c] = sum[c];
        if (lane == 0) sums_of_p[segment] = sum_of_p;
    }
    __syncthreads();

    const auto column = static_cast<int>(threadIdx.x);
    if (column >= kHeadDim) return;
    OnlineSoftmax<T> row;
    row.max[0] = maximum;
    float sum = 0;
#pragma unroll 8
    for (int segment = 0; segment < kSegments; ++segment) {
        sum += sums[segment][column];
        row.sum[0] += sums_of_p[segment];
    }
    if (column == 0 && p.lse.data != nullptr) {
        char* to = p.lse.data + head_offset(p.lse, batch, sequence.first_q + query, head, sizeof(float));
        *reinterpret_cast<float*>(to) = row.lse(0, scale);
    }
    if (column >= p.head_dim_v) return;
    char* to = p.o.data + head_offset(p.o, batch, sequence.first_q + query, head, sizeof(T)) +
               column * p.o.column * std::int64_t{sizeof(T)};
    *reinterpret_cast<T*>(to) = T(fmaf(sum, row.inverse_sum(0), 0.0F));
}

}  // namespace tessera::cuda::decode
