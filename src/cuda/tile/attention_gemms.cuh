// SPDX-License-Identifier: Apache-2.0
//
// The two GEMMs of attention on Hopper's tensor cores, S = Q K^T and O += P V, asynchronous: one warpgroup starts them,
// works beside them, and waits for them.
#pragma once

#include <cstdint>

#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/swizzle_panel.cuh"

namespace tessera::cuda {

/// 64 queries of a warpgroup and their operands in registers, in wgmma's layout (ptx/wgmma.cuh). GEMMs run in the order
/// in which they are started. From the start of a GEMM to the wait for it, no other code may touch its registers: S of
/// the scores, O and P of the output.
///
/// kRowsQ: rows of Q in shared memory. With fewer than 64, the other rows of S and O are those of whatever lies after
/// it.
template <class T, int kBlockKv, int kHeadDim, int kHeadDimV, int kRowsQ = 64>
struct AttentionGemms {
    float s[kBlockKv / 2];              ///< scores, then probabilities: [64][kBlockKv] of the warpgroup
    std::uint32_t p[kBlockKv / 16][4];  ///< probabilities in 16 bits: [64][kBlockKv]
    float o[kHeadDimV / 2];             ///< [64][kHeadDimV]

    /// Starts S = Q K^T. `q`, `k`: [kRowsQ][kHeadDim] and [kBlockKv][kHeadDim] in panels (row_descriptor).
    __device__ __forceinline__ void start_scores(std::uint64_t q, std::uint64_t k) {
        constexpr int kQPanel = kRowsQ * kPanelRowBytes >> 4;
        constexpr int kKPanel = kBlockKv * kPanelRowBytes >> 4;
        ptx::warpgroup_fence_operand(s);
        ptx::wgmma_fence();
#pragma unroll
        for (int column = 0; column < kHeadDim; column += 16) {
            const int panel = column / kPanelColumns;
            const int step = column % kPanelColumns / 16 * kStepColumns;
            ptx::wgmma_ss<kBlockKv, T>(s, q + panel * kQPanel + step, k + panel * kKPanel + step, column > 0);
        }
        ptx::wgmma_commit();
    }
    /// Starts O += P V. `v`: [kBlockKv][kHeadDimV] in panels (column_descriptor).
    __device__ __forceinline__ void start_output(std::uint64_t v) {
        ptx::warpgroup_fence_operand(o);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kBlockKv / 16; ++step) {
            ptx::wgmma_rs<kHeadDimV, T>(o, p[step], v + step * kStepRows, true);
        }
        ptx::wgmma_commit();
    }

    /// Waits for S. No GEMM runs afterwards.
    __device__ __forceinline__ void wait_scores() {
        ptx::wgmma_wait<0>();
        ptx::warpgroup_fence_operand(s);
    }
    /// Waits for S. The output GEMM, started after it, runs on.
    __device__ __forceinline__ void wait_scores_beside_output() {
        ptx::wgmma_wait<1>();
        ptx::warpgroup_fence_operand(s);
    }
    /// Waits for O; P is then free, and no GEMM runs.
    __device__ __forceinline__ void wait_output() {
        ptx::wgmma_wait<0>();
        ptx::warpgroup_fence_operand(o);
        ptx::warpgroup_fence_operand(p);
    }
    /// Waits for O; P is then free. The scores GEMM, started after it, runs on.
    __device__ __forceinline__ void wait_output_beside_scores() {
        ptx::wgmma_wait<1>();
        ptx::warpgroup_fence_operand(o);
        ptx::warpgroup_fence_operand(p);
    }
};

}  // namespace tessera::cuda
