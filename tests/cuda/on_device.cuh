// SPDX-License-Identifier: Apache-2.0
//
// Helpers for tests of device code: memory on host and device, values whose GEMMs are exact, skipping without a GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "check/generate.hpp"

namespace tessera::cuda::test {

/// Tests of instructions that exist on compute capability 9.0.
class OnHopper : public testing::Test {
 protected:
    void SetUp() override {
        int devices = 0;
        if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no CUDA device";
        cudaDeviceProp properties{};
        ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
        if (properties.major != 9 || properties.minor != 0) GTEST_SKIP() << "needs compute capability 9.0";
    }
};

/// An array on the host and its copy on the device.
template <class T>
class Mirror {
 public:
    explicit Mirror(std::vector<T> values) : host(std::move(values)) {
        EXPECT_EQ(cudaMalloc(&device_, host.size() * sizeof(T)), cudaSuccess);
        EXPECT_EQ(cudaMemcpy(device_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
    }
    explicit Mirror(std::size_t count, T value = T{}) : Mirror(std::vector<T>(count, value)) {}
    ~Mirror() { cudaFree(device_); }
    Mirror(const Mirror&) = delete;
    Mirror& operator=(const Mirror&) = delete;

    T* device() const { return device_; }
    /// Waits for the device, and fetches what kernels have written.
    const std::vector<T>& fetch() {
        const cudaError_t status = cudaMemcpy(host.data(), device_, host.size() * sizeof(T), cudaMemcpyDeviceToHost);
        EXPECT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
        return host;
    }

    std::vector<T> host;

 private:
    T* device_ = nullptr;
};

/// Runs a kernel on one block with this much dynamic shared memory, and waits for it.
template <class Kernel, class... Args>
void run_block(Kernel kernel, int threads, std::size_t shared_bytes, Args... args) {
    ASSERT_EQ(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
              cudaSuccess);
    kernel<<<1, threads, shared_bytes>>>(args...);
    ASSERT_EQ(cudaGetLastError(), cudaSuccess);
    const cudaError_t status = cudaDeviceSynchronize();
    ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
}

/// Random integers in [-8, 8]. They are exact in 16 bits, and so are their products and sums in fp32: a GEMM of such
/// matrices has one right result, whatever the order of the sums.
template <class T>
std::vector<T> small_integers(std::size_t count, std::uint64_t seed) {
    const check::Random random(seed);
    std::vector<T> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = T(static_cast<float>(random.bits(i) % 17) - 8.0F);
    return values;
}

template <class T>
double as_double(T value) {
    return static_cast<double>(static_cast<float>(value));
}

/// Calls f(T{}) for both 16-bit types.
template <class F>
void for_both_types(F&& f) {
    {
        SCOPED_TRACE("bf16");
        f(__nv_bfloat16{});
    }
    SCOPED_TRACE("fp16");
    f(__half{});
}

}  // namespace tessera::cuda::test
