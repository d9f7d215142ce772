// SPDX-License-Identifier: Apache-2.0
//
// Sums of rows in an order that a table gives: a thread adds a few neighbouring elements of one row, in fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/rows/launch.hpp"

namespace tessera::cuda::rows {

/// Elements of one thread: 16 bytes where rows are multiples of that.
template <class T, int kElements>
struct alignas(kElements * sizeof(T)) Chunk {
    T element[kElements];
};

template <class T, int kElements>
__global__ void add_kernel(const __grid_constant__ RowSums sums) {
    const std::int64_t width = sums.widths[0] + sums.widths[1];
    const std::int64_t chunks = width / kElements;
    const std::int64_t index = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const std::int64_t row = index / chunks, column = index % chunks * kElements;
    if (row >= sums.rows) return;
    float total[kElements] = {};
    const std::int64_t end = sums.first[row + 1];
    for (std::int64_t i = sums.first[row]; i < end; ++i) {
        const auto part = *reinterpret_cast<const Chunk<T, kElements>*>(static_cast<const T*>(sums.parts) +
                                                                        sums.sources[i] * width + column);
#pragma unroll
        for (int c = 0; c < kElements; ++c) total[c] += static_cast<float>(part.element[c]);
    }
    const int half = column < sums.widths[0] ? 0 : 1;
    auto* to = reinterpret_cast<T*>(static_cast<char*>(sums.to[half].data) + row * sums.to[half].pitch);
    Chunk<T, kElements> rounded;
#pragma unroll
    for (int c = 0; c < kElements; ++c) rounded.element[c] = static_cast<T>(total[c]);
    *reinterpret_cast<Chunk<T, kElements>*>(to + column - (half == 0 ? 0 : sums.widths[0])) = rounded;
}

template <class T, int kElements>
cudaError_t launch_add(const RowSums& sums, cudaStream_t stream) {
    constexpr int kThreads = 256;
    const std::int64_t threads = sums.rows * ((sums.widths[0] + sums.widths[1]) / kElements);
    const std::int64_t blocks = (threads + kThreads - 1) / kThreads;
    if (blocks == 0) return cudaSuccess;
    add_kernel<T, kElements><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(sums);
    return cudaGetLastError();
}

template <class T>
cudaError_t start_add(const RowSums& sums, cudaStream_t stream) {
    constexpr int kElements = 16 / sizeof(T);
    const auto fits = [](const void* data, std::size_t bytes) {
        return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && bytes % 16 == 0;
    };
    const bool aligned = sums.widths[0] % kElements == 0 && sums.widths[1] % kElements == 0 && fits(sums.parts, 0) &&
                         fits(sums.to[0].data, sums.to[0].pitch) && fits(sums.to[1].data, sums.to[1].pitch);
    return aligned ? launch_add<T, kElements>(sums, stream) : launch_add<T, 1>(sums, stream);
}

}  // namespace tessera::cuda::rows
