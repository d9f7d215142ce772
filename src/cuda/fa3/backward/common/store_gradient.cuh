// SPDX-License-Identifier: Apache-2.0
//
// Stores rows of a gradient to its tensor: from a warp's accumulators by TMA, or from a tile in shared memory.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/params.hpp"
#include "cuda/tile/swizzle_panel.cuh"

namespace tessera::cuda::fa3::backward {

/// fmaf(x, f, 0) turns -0 into +0, so the sign cannot reveal how many masked products were added.
__device__ __forceinline__ float scaled(float x, float factor) { return fmaf(x, factor, 0.0F); }
/// Factor 1. The sums started at 0, so none is -0.
struct Unscaled {};
__device__ __forceinline__ float scaled(float x, Unscaled /*unused*/) { return x; }

/// The destination of a warp's 16 rows of a gradient.
struct GradientRows {
    const Rows& rows;
    const CUtensorMap& map;
    bool by_tma;
    int batch, head;
    int row;    ///< first row in the tensor (varlen: counted over all sequences)
    int count;  ///< how many of the 16 rows exist in the tensor or the sequence; may be 0 or less
    int columns;
};

/// 16 rows of a panel in shared memory, for one warp.
using PanelRows = std::uint16_t (*)[kPanelColumns];

/// Sets the PanelRows of consecutive panels, from row `first` on.
template <class Panel, int kPanels>
__device__ __forceinline__ void set_rows(PanelRows (&rows)[kPanels], Panel (&panels)[kPanels], int first) {
#pragma unroll
    for (int i = 0; i < kPanels; ++i) rows[i] = &panels[i][first];
}

/// Stores the rows of a warp that TMA cannot store: in part past the end of a sequence, or not aligned. They lie in
/// `panels`. A loop over shared memory, since few warps come here and the same over registers would be most of a
/// kernel.
template <class T, int kPanels>
__device__ __forceinline__ void store_rows_of_panels(const GradientRows& to, const PanelRows (&panels)[kPanels],
                                                     int lane) {
    constexpr int kChunks = kPanels * kPanelColumns / 8;  // of 16 bytes in a row
    const auto* const first = reinterpret_cast<const char*>(panels[0]);
    const auto step = kPanels > 1 ? reinterpret_cast<const char*>(panels[1]) - first : 0;  // from panel to panel
    T* const out =
        reinterpret_cast<T*>(to.rows.data) + to.batch * to.rows.batch + to.head * to.rows.head + to.row * to.rows.row;
#pragma unroll 1
    for (int i = lane; i < min(to.count, 16) * kChunks; i += 32) {
        const int row = i / kChunks;
        const int chunk = i % kChunks;
        if (8 * chunk >= to.columns) continue;
        const auto* const from = first + chunk / 8 * step + swizzled(row, chunk % 8);
        T* at = out + row * to.rows.row + 8 * chunk * to.rows.column;
        if (to.by_tma) {
            *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(from);
            continue;
        }
#pragma unroll 1
        for (int e = 0; e < min(8, to.columns - 8 * chunk); ++e, at += to.rows.column)
            *at = reinterpret_cast<const T*>(from)[e];
    }
}

/// Stores a warp's accumulators times `factor`, [16][kDim], through `panels`, which no other warp uses.
template <class T, int kDim, class Factor, int kPanels>
__device__ __forceinline__ void store_gradient(const float (&gradient)[kDim / 2], Factor factor, const GradientRows& to,
                                               const PanelRows (&panels)[kPanels], int lane) {
    if (to.rows.data == nullptr || to.count <= 0) return;
    const int matrix_row = lane % 8 + lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < kDim / 8; j += 2) {  // 16 columns at a time
        std::uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            packed[i] =
                ptx::pack<T>(scaled(gradient[4 * j + 2 * i], factor), scaled(gradient[4 * j + 2 * i + 1], factor));
        }
        ptx::stmatrix_x4(ptx::shared_address(*panels[j / 8]) + swizzled(matrix_row, j % 8 + lane / 16), packed[0],
                         packed[1], packed[2], packed[3]);
    }
    if (!to.by_tma || to.count < 16) {
        __syncwarp();
        return store_rows_of_panels<T>(to, panels, lane);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane != 0) return;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
        ptx::tma_store_4d(panels[panel], to.map, panel * kPanelColumns, to.row, to.head, to.batch);
    }
    ptx::tma_store_commit();
}

/// Copies rows of a tile in shared memory, which is padded by 8 columns, to rows of a tensor from `out` on.
template <int kThreads, class T, int kRows, int kStride>
__device__ __forceinline__ void store_rows(const T (&tile)[kRows][kStride], const Rows& to, T* out, int rows,
                                           int columns, bool by_vectors) {
    constexpr int kChunks = kStride / 8 - 1;  // chunks of 16 bytes in a row
    for (int i = static_cast<int>(threadIdx.x); i < rows * kChunks; i += kThreads) {
        const int row = i / kChunks;
        const int column = i % kChunks * 8;
        T* chunk = out + row * to.row + column * to.column;
        if (by_vectors && column + 8 <= columns) {
            *reinterpret_cast<uint4*>(chunk) = *reinterpret_cast<const uint4*>(&tile[row][column]);
        } else {
            for (int e = 0; e < 8 && column + e < columns; ++e) chunk[e * to.column] = tile[row][column + e];
        }
    }
}

}  // namespace tessera::cuda::fa3::backward
