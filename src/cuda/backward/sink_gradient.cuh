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
inline constexpr int kSinkPiece = 128;  ///< rows of a dense sequence that a warp takes at once; ragged: all

/// Writes dsink of head blockIdx.x. The warps take pieces in turn. Each lane adds its rows in order, then lanes and
/// warps are added in a fixed order, all in fp64. delta_of(batch, sequence, query): delta - dLSE of a row.
template <class DeltaOf>
__device__ __forceinline__ void sum_sink_gradient(const BackwardParams& params, const DeltaOf& delta_of) {
    const ForwardParams& p = params.forward;
    const int head = static_cast<int>(blockIdx.x);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const float sink = sink_of(p, head);
    const bool ragged = p.cu_seqlens_q != nullptr;
    const int of_sequence = ragged ? 1 : (p.len_q + kSinkPiece - 1) / kSinkPiece;
    const std::int64_t pieces = sink == -INFINITY ? 0 : p.batch * of_sequence;
    double sum = 0;
    for (std::int64_t piece = warp; piece < pieces; piece += kSinkWarps) {
        const int batch = static_cast<int>(piece / of_sequence);
        const Sequence sequence = sequence_of(p, batch);
        const int first = static_cast<int>(piece % of_sequence) * kSinkPiece;
        const int end = ragged ? sequence.len_q : min(first + kSinkPiece, sequence.len_q);
        const char* const lse = p.lse.data + head_offset(p.lse, batch, sequence.first_q, head, sizeof(float));
#pragma unroll 4
        for (int query = first + lane; query < end; query += 32) {
            const float of_row = reinterpret_cast<const float*>(lse)[query * p.lse.row];
            const float weight = ptx::exp2_approx((sink - of_row) * kLog2E);
            sum -= double{weight} * double{delta_of(batch, sequence, query)};
        }
    }
    sum = warp_sum(sum);
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
