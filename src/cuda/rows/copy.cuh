// SPDX-License-Identifier: Apache-2.0
//
// Copies of rows of two tensors side by side.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/rows/launch.hpp"

namespace tessera::cuda::rows {

inline constexpr int kCopiesOfBlock = 8;

/// The elements that a lane copies at once: 16 bytes where rows are multiples of that, else one element of 16 bits.
template <int kBytes>
using CopyChunk = std::conditional_t<kBytes == 16, uint4, unsigned short>;

/// A warp for each copy.
template <int kBytes>
__global__ void copy_kernel(const __grid_constant__ RowCopies copies) {
    const std::int64_t copy = std::int64_t{blockIdx.x} * kCopiesOfBlock + threadIdx.y;
    if (copy >= copies.count) return;
    const std::int64_t from = copies.from[copy], to = copies.to[copy];
    const int which = to < copies.split ? 0 : 1;
    char* target = static_cast<char*>(copies.target[which].data) +
                   (to - (which == 0 ? 0 : copies.split)) * copies.target[which].pitch;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const char* source = static_cast<const char*>(copies.source[half].data) + from * copies.source[half].pitch;
        const int chunks = static_cast<int>(copies.bytes[half] / kBytes);
        for (int c = static_cast<int>(threadIdx.x); c < chunks; c += 32)
            reinterpret_cast<CopyChunk<kBytes>*>(target)[c] = reinterpret_cast<const CopyChunk<kBytes>*>(source)[c];
        target += copies.bytes[half];
    }
}

template <int kBytes>
cudaError_t launch_copy(const RowCopies& copies, cudaStream_t stream) {
    const std::int64_t blocks = (copies.count + kCopiesOfBlock - 1) / kCopiesOfBlock;
    if (blocks == 0) return cudaSuccess;
    copy_kernel<kBytes><<<static_cast<unsigned>(blocks), dim3(32, kCopiesOfBlock), 0, stream>>>(copies);
    return cudaGetLastError();
}

inline cudaError_t start_copy_of(const RowCopies& copies, cudaStream_t stream) {
    bool aligned = copies.bytes[0] % sizeof(uint4) == 0 && copies.bytes[1] % sizeof(uint4) == 0;
    for (const RowsAt& rows : {copies.source[0], copies.source[1], copies.target[0], copies.target[1]})
        aligned = aligned && reinterpret_cast<std::uintptr_t>(rows.data) % sizeof(uint4) == 0 &&
                  rows.pitch % sizeof(uint4) == 0;
    return aligned ? launch_copy<16>(copies, stream) : launch_copy<2>(copies, stream);
}

}  // namespace tessera::cuda::rows
