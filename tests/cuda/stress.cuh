// SPDX-License-Identifier: Apache-2.0
//
// Helpers for stress tests: calls on tensors that stay on the device, and comparisons of results there.
#pragma once

#include <functional>

#include "cuda/on_device.cuh"
#include "device/device_copy.hpp"
#include "kernels/support.hpp"

namespace tessera::cuda::test {

inline constexpr Device kDevice{DeviceType::cuda, 0};

class OnDevice : public testing::Test {
 protected:
    void SetUp() override {
        if (!device::cuda_available()) GTEST_SKIP() << "no CUDA device";
    }
};

/// A stream that waits for no other.
class Stream {
 public:
    Stream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
    ~Stream() { cudaStreamDestroy(stream_); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    operator cudaStream_t() const { return stream_; }

 private:
    cudaStream_t stream_ = nullptr;
};

/// Memory of the device without a copy on the host.
class Memory {
 public:
    explicit Memory(std::size_t bytes) : bytes_(bytes) {
        const cudaError_t status = cudaMalloc(&data_, bytes);
        EXPECT_EQ(status, cudaSuccess) << bytes << " bytes: " << cudaGetErrorString(status);
    }
    ~Memory() { cudaFree(data_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    void* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }

 private:
    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

/// The CUDA kernels of a pass that take a Problem, with their plans.
inline std::vector<Plan> plans_of(const Problem& problem, Pass pass = Pass::forward) {
    std::vector<Plan> plans;
    for (const KernelInfo& kernel : kernels()) {
        if (kernel.backend != Backend::cuda || kernel.pass != pass) continue;
        check::Ran refused;
        if (auto how = check::detail::plan_for(problem, kernel, {}, refused)) plans.push_back(*how);
    }
    return plans;
}

}  // namespace tessera::cuda::test
