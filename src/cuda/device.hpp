// SPDX-License-Identifier: Apache-2.0
//
// The CUDA devices of this machine and the errors of the CUDA runtime, for the backend's host code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <string>

#include "cuda/host/kernel_table.hpp"
#include "kernel/kernel.hpp"

namespace tessera::cuda {

struct DeviceProperties {
    std::string name;  ///< "NVIDIA H200"
    int major = 0;     ///< compute capability
    int minor = 0;
    int multiprocessors = 0;
    int shared_bytes = 0;  ///< shared memory that one thread block can have (opt-in)
    std::int64_t l2_bytes = 0;
    std::int64_t memory_bytes = 0;
};

/// The driver's message if there is no such device; empty if there is one. The call creates no context.
std::optional<std::string> unavailable(const Device& device);

/// Properties of a device, cached. Throws Error(device_unavailable) when there is no such device.
const DeviceProperties& properties(const Device& device);

/// Compute capability, two digits in one number: 90 for 9.0.
inline int capability(const DeviceProperties& p) { return p.major * 10 + p.minor; }

/// The properties that kernels' refusals read.
Limits limits(const Device& device);

/// Kernel::target of the device: "sm_90 (NVIDIA H200)".
std::string target(const Device& device);

/// Throws an Error "CUDA, `what`: the runtime's words" unless `status` is cudaSuccess.
void check(cudaError_t status, const char* what);

/// Expects memory of the device: on other memory a kernel would fault, and so would every later CUDA call of the
/// process. Throws Error(invalid_argument) naming the tensor.
void expect_device_memory(const char* name, const void* data, const Device& device);
void expect_device_memory(const char* name, const TensorView& tensor, const Device& device);

/// Sets the calling thread's device for the lifetime of this object, and restores the previous one.
class CurrentDevice {
 public:
    explicit CurrentDevice(const Device& device);
    ~CurrentDevice();
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
    int chosen_;
    int before_ = 0;
};

template <class Args>
cudaStream_t stream_of(const Call<Args>& call) {
    return static_cast<cudaStream_t>(call.stream);
}

}  // namespace tessera::cuda
