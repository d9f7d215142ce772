// SPDX-License-Identifier: Apache-2.0
//
// Tiles of 16-bit elements in shared memory, as TMA writes and wgmma reads them: panels of 64 columns, [rows][128
// bytes], whose 16-byte chunks are permuted so that neither rows nor columns have bank conflicts
// ("128-byte swizzle": chunk c of row r lies at c ^ (r % 8)). A panel begins at a multiple of 1024 bytes.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.cuh"

namespace tessera::cuda {

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = 128;

/// Byte offset of 16-byte chunk `chunk` (0..7) of a row within its panel.
__device__ __forceinline__ int swizzled(int row, int chunk) {
    return row * kPanelRowBytes + ((chunk ^ (row & 7)) << 4);
}

/// Matrix descriptor of wgmma (PTX manual, "Matrix Descriptor Format"): address, leading and stride offsets in units of
/// 16 bytes, 128-byte swizzle. Adding n moves it by 16 * n bytes.
__device__ __forceinline__ std::uint64_t descriptor(const void* shared, int leading_bytes) {
    constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
    constexpr std::uint64_t kEightRows = std::uint64_t{1024 >> 4} << 32;
    return kSwizzle128 | kEightRows | (static_cast<std::uint64_t>(leading_bytes >> 4) << 16) |
           ((ptx::shared_address(shared) & 0x3FFFF) >> 4);
}

/// Descriptor of a tile whose inner dimension is contiguous (Q and K of Q K^T). Adding kStepColumns moves it by 16
/// columns, adding rows * 128 / 16 by a panel.
__device__ __forceinline__ std::uint64_t row_descriptor(const void* shared) { return descriptor(shared, 16); }
inline constexpr int kStepColumns = 32 >> 4;

/// Descriptor of a tile whose outer dimension is contiguous (V of P V). Adding kStepRows moves it by 16 rows.
__device__ __forceinline__ std::uint64_t column_descriptor(const void* shared, int rows) {
    return descriptor(shared, rows * kPanelRowBytes);
}
inline constexpr int kStepRows = 16 * kPanelRowBytes >> 4;

}  // namespace tessera::cuda
