// SPDX-License-Identifier: Apache-2.0
//
// Timing of kernels: between events on their stream, and in clocks of their multiprocessors.
#pragma once

#include <cuda_runtime.h>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/device.hpp"
#include "measure/statistics.hpp"
#include "micro/figures.hpp"

namespace tessera::micro {

/// Device memory; `T` is never constructed.
template <class T>
class Buffer {
 public:
    explicit Buffer(std::size_t count) : count_(count) {
        cuda::check(cudaMalloc(&data_, count * sizeof(T)), "cudaMalloc");
    }
    ~Buffer() { cudaFree(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    T* data() const { return data_; }
    std::size_t bytes() const { return count_ * sizeof(T); }

 private:
    T* data_ = nullptr;
    std::size_t count_ = 0;
};

/// Measures the clocks from construction until stop() for block blockIdx.x. All threads of the block call both.
class BlockClock {
 public:
    __device__ explicit BlockClock(long long* clocks) : clocks_(clocks) {
        __syncthreads();
        begin_ = clock64();
    }
    __device__ void stop() {
        __syncthreads();
        if (threadIdx.x == 0) clocks_[blockIdx.x] = clock64() - begin_;
    }

 private:
    long long* clocks_;
    long long begin_;
};

/// Fills in times and clocks of `figure`: launch(clocks) starts one kernel of up to `blocks` blocks.
template <class Launch>
Figure timed(Figure figure, int blocks, const Launch& launch) {
    constexpr int kRepeats = 7;
    const Buffer<long long> clocks(static_cast<std::size_t>(blocks));
    cuda::check(cudaMemset(clocks.data(), 0, clocks.bytes()), "cudaMemset");
    cudaEvent_t begin{}, end{};
    cuda::check(cudaEventCreate(&begin), "cudaEventCreate");
    cuda::check(cudaEventCreate(&end), "cudaEventCreate");
    launch(clocks.data());  // warms caches and pays for the first launch
    std::vector<double> times;
    for (int i = 0; i < kRepeats; ++i) {
        cuda::check(cudaEventRecord(begin), "cudaEventRecord");
        launch(clocks.data());
        cuda::check(cudaEventRecord(end), "cudaEventRecord");
        cuda::check(cudaEventSynchronize(end), (figure.name + ", " + figure.variant).c_str());
        float ms = 0;
        cuda::check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
        times.push_back(ms);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    const auto summary = measure::summarize(times);
    std::vector<long long> counted(static_cast<std::size_t>(blocks));
    cuda::check(cudaMemcpy(counted.data(), clocks.data(), clocks.bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    figure.ms = summary.median;
    figure.ms_spread = summary.spread;
    figure.cycles = static_cast<double>(std::accumulate(counted.begin(), counted.end(), 0LL)) / blocks;
    return figure;
}

/// Launches a kernel with `shared_bytes` of dynamic shared memory; throws if that fails.
template <class... Parameters, class... Args>
void launch(void (*kernel)(Parameters...), int blocks, int threads, std::size_t shared_bytes, const Args&... args) {
    cuda::check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        "cudaFuncSetAttribute");
    kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared_bytes>>>(args...);
    cuda::check(cudaGetLastError(), "launch");
}

/// Random operands with realistic bit toggling: bf16 in (-1, 1), two in a 32-bit word.
__device__ __forceinline__ std::uint32_t random_pair(std::uint32_t index) {
    std::uint32_t h = (index + 1) * 0x9E3779B1;
    h = (h ^ (h >> 15)) * 0x85EBCA77;
    h ^= h >> 13;
    constexpr std::uint32_t kSignAndMantissa = 0x807F807F;
    constexpr std::uint32_t kExponents = 0x3F003F00;  // 1/2 ... 1
    return (h & kSignAndMantissa) | kExponents;
}

}  // namespace tessera::micro
