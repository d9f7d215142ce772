// SPDX-License-Identifier: Apache-2.0
//
// The gradient of the sinks: minus the sum of exp(sink - LSE) * (delta - dLSE) over the rows of a head. A CTA has a
// head. It reads two numbers for each row, which other kernels of the backward have written or read before. Its code is
// short, since a call has it in no cache.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/sink.cuh"

namespace tessera::cuda {

inline constexpr int kSinkWarps = 32;
inline constexpr int kSinkPiece = 64;  ///< rows that a warp takes at once

/// Writes dsink of head blockIdx.x. Pieces of sequences go to the warps in turn. Each lane adds its rows in order, then
/// lanes and warps are added in a fixed order, all in fp64. delta_of(batch, sequence, query): delta - dLSE of a row.
template <class DeltaOf>
__device__ __forceinline__ void sum_sink_gradient(const BackwardParams& params, const DeltaOf& delta_of) {
    const ForwardParams& p = params.forward;
    const int head = static_cast<int>(blockIdx.x);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const float sink = sink_of(p, head);
    double sum = 0;
    int piece = 0;
    for (int batch = 0; batch < p.batch && sink != -INFINITY; ++batch) {
        const Sequence sequence = sequence_of(p, batch);
        const char* const lse = p.lse.data + head_offset(p.lse, batch, sequence.first_q, head, sizeof(float));
        for (int first = 0; first < sequence.len_q; first += kSinkPiece) {
            if (piece++ % kSinkWarps != warp) continue;
#pragma unroll
            for (int i = 0; i < kSinkPiece; i += 32) {
                const int query = first + i + lane;
                if (query >= sequence.len_q) continue;
                const float of_row = reinterpret_cast<const float*>(lse)[query * p.lse.row];
                const float weight = ptx::exp2_approx((sink - of_row) * kLog2E);
                sum -= double{weight} * double{delta_of(batch, sequence, query)};
            }
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    __shared__ double sums[kSinkWarps];
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int i = 1; i < kSinkWarps; ++i) sum += sums[i];
    const SinkGradient& to = params.dsinks;
    if (to.fp64) reinterpret_cast<double*>(to.data)[head * to.step] = sum;
    else reinterpret_cast<float*>(to.data)[head * to.step] = static_cast<float>(sum);
}

}  // namespace tessera::cuda
