// SPDX-License-Identifier: Apache-2.0
#include "device/memory.hpp"

#include <fmt/format.h>

#include "tessera/error.hpp"

#if defined(TESSERA_HAS_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace tessera::device {

#if defined(TESSERA_HAS_CUDA)

namespace {

void expect_ok(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();
    throw Error(ErrorCode::internal, "", fmt::format("CUDA, {}: {}", what, cudaGetErrorString(status)));
}

/// Sets the device of the calling thread and restores the previous one on destruction.
class Current {
 public:
    explicit Current(const Device& device) {
        expect_ok(cudaGetDevice(&before_), "asking for the current device");
        expect_ok(cudaSetDevice(device.index), "choosing a device");
    }
    ~Current() { cudaSetDevice(before_); }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

 private:
    int before_ = 0;
};

}  // namespace

int count_devices() {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();
    return 0;
}

std::byte* allocate(const Device& device, std::size_t bytes) {
    if (device.index >= count_devices()) {
        throw Error(ErrorCode::device_unavailable, "device", fmt::format("no CUDA device {}", device.index));
    }
    const Current current(device);
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, bytes);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        throw Error(ErrorCode::out_of_memory, "",
                    fmt::format("could not allocate {} bytes on CUDA device {}", bytes, device.index));
    }
    expect_ok(status, "allocating memory");
    return static_cast<std::byte*>(memory);
}

void release(std::byte* memory) noexcept { cudaFree(memory); }

void fill(const Device& device, std::byte* memory, int byte, std::size_t bytes) {
    const Current current(device);
    expect_ok(cudaMemset(memory, byte, bytes), "filling memory");
}

void copy_in(std::byte* to_device, const std::byte* from_host, std::size_t bytes) {
    expect_ok(cudaMemcpy(to_device, from_host, bytes, cudaMemcpyHostToDevice), "copying to the device");
}

void copy_out(std::byte* to_host, const std::byte* from_device, std::size_t bytes) {
    expect_ok(cudaMemcpy(to_host, from_device, bytes, cudaMemcpyDeviceToHost), "copying from the device");
}

void wait_for(const Device& device) {
    const Current current(device);
    expect_ok(cudaDeviceSynchronize(), "waiting for the device");
}

#else

namespace {

[[noreturn]] void throw_not_built() {
    throw Error(ErrorCode::device_unavailable, "device", "this build has no CUDA kernels");
}

}  // namespace

int count_devices() { return 0; }
std::byte* allocate(const Device&, std::size_t) { throw_not_built(); }
void release(std::byte*) noexcept {}
void fill(const Device&, std::byte*, int, std::size_t) { throw_not_built(); }
void copy_in(std::byte*, const std::byte*, std::size_t) { throw_not_built(); }
void copy_out(std::byte*, const std::byte*, std::size_t) { throw_not_built(); }
void wait_for(const Device&) { throw_not_built(); }

#endif

}  // namespace tessera::device
