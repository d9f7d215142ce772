// SPDX-License-Identifier: Apache-2.0
//
// The GEMMs of a step, as one warpgroup issues them. Each function starts one as a wgmma group; the caller waits.
// With the outer loop over keys S and dP are transposed: rows are keys, so P^T and dS^T are A operands in the registers
// they are computed in.
#pragma once

#include "cuda/fa3/host/backward_config.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/swizzle_panel.cuh"

namespace tessera::cuda::fa3::backward {

/// S^T = K Q^T or dP^T = V dO^T: [64 keys][kQueries] = [64 keys][kDim] [kQueries][kDim]^T.
template <class T, Config kConfig, int kDim, int kQueries = kConfig.block_q>
__device__ __forceinline__ void start_scores(float (&s)[kQueries / 2], std::uint64_t keys, std::uint64_t queries) {
    constexpr int kKeyPanel = kConfig.block_kv * kPanelRowBytes >> 4;
    constexpr int kQueryPanel = kConfig.block_q * kPanelRowBytes >> 4;
    ptx::warpgroup_fence_operand(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int column = 0; column < kDim; column += 16) {
        const int panel = column / kPanelColumns;
        const int step = column % kPanelColumns / 16 * kStepColumns;
        ptx::wgmma_ss<kQueries, T>(s, keys + panel * kKeyPanel + step, queries + panel * kQueryPanel + step,
                                   column > 0);
    }
    ptx::wgmma_commit();
}

/// S^T = K Q^T with K in registers.
template <class T, int kDim>
__device__ __forceinline__ void start_scores_of_registers(float (&s)[32], const std::uint32_t (&keys)[kDim / 16][4],
                                                          std::uint64_t queries) {
    ptx::warpgroup_fence_operand(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int column = 0; column < kDim; column += 16) {
        ptx::wgmma_rs_rows<64, T>(s, keys[column / 16], queries + column / 16 * kStepColumns, column > 0);
    }
    ptx::wgmma_commit();
}

/// S = Q K^T or dP = dO V^T, with the outer loop over queries: [64 queries][kKeys].
template <class T, Config kConfig, int kDim, int kKeys = kConfig.block_kv>
__device__ __forceinline__ void start_query_scores(float (&s)[kKeys / 2], std::uint64_t queries, std::uint64_t keys) {
    constexpr int kQueryPanel = kConfig.block_q * kPanelRowBytes >> 4;
    constexpr int kKeyPanel = kConfig.block_kv * kPanelRowBytes >> 4;
    ptx::warpgroup_fence_operand(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int column = 0; column < kDim; column += 16) {
        const int panel = column / kPanelColumns;
        const int step = column % kPanelColumns / 16 * kStepColumns;
        ptx::wgmma_ss<kKeys, T>(s, queries + panel * kQueryPanel + step, keys + panel * kKeyPanel + step, column > 0);
    }
    ptx::wgmma_commit();
}

/// Loads 64 rows of a panel as an A operand: [64][64 columns].
template <class Panel>
__device__ __forceinline__ void load_rows(std::uint32_t (&a)[4][4], const Panel& panel, int first_row) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = first_row + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        ptx::ldmatrix_x4(a[step], ptx::shared_address(panel) + swizzled(row, 2 * step + lane / 16));
    }
}

/// dV += P^T dO or dK += dS^T Q: [64 keys][kDim] += [64 keys][kBlockQ] [kBlockQ][kDim]. With the outer loop over
/// queries: dQ += dS K.
template <class T, int kDim, int kBlockQ>
__device__ __forceinline__ void start_gradient(float (&gradient)[kDim / 2], const std::uint32_t (&a)[kBlockQ / 16][4],
                                               std::uint64_t b) {
    ptx::warpgroup_fence_operand(gradient);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockQ / 16; ++step) {
        ptx::wgmma_rs<kDim, T>(gradient, a[step], b + step * kStepRows, true);
    }
    ptx::wgmma_commit();
}

/// Columns of dQ = dS K with dS in shared memory: [64 queries][kColumns] = [64][kBlockKv] [kBlockKv][kColumns].
template <class T, Config kConfig, int kColumns>
__device__ __forceinline__ void start_dq(float (&dq)[kColumns / 2], std::uint64_t ds, std::uint64_t keys) {
    constexpr int kDsPanel = kConfig.block_q * kPanelRowBytes >> 4;
    ptx::warpgroup_fence_operand(dq);
    ptx::wgmma_fence();
#pragma unroll
    for (int key = 0; key < kConfig.block_kv; key += 16) {
        const int panel = key / kPanelColumns;
        const int step = key % kPanelColumns / 16 * kStepColumns;
        ptx::wgmma_ss_columns<kColumns, T>(dq, ds + panel * kDsPanel + step, keys + key / 16 * kStepRows, key > 0);
    }
    ptx::wgmma_commit();
}

}  // namespace tessera::cuda::fa3::backward
