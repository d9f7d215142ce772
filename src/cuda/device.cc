// SPDX-License-Identifier: Apache-2.0
#include "cuda/device.hpp"

#include <fmt/format.h>

#include <vector>

#include "tessera/error.hpp"

namespace tessera::cuda {
namespace {

DeviceProperties read_properties(int index) {
    cudaDeviceProp read{};
    check(cudaGetDeviceProperties(&read, index), "properties of a CUDA device");
    return {.name = read.name,
            .major = read.major,
            .minor = read.minor,
            .multiprocessors = read.multiProcessorCount,
            .shared_bytes = static_cast<int>(read.sharedMemPerBlockOptin),
            .l2_bytes = read.l2CacheSize,
            .memory_bytes = static_cast<std::int64_t>(read.totalGlobalMem)};
}

/// The driver's devices, or why there are none.
struct Devices {
    std::vector<DeviceProperties> list;
    std::string problem;

    Devices() {
        int count = 0;
        const cudaError_t status = cudaGetDeviceCount(&count);
        if (status != cudaSuccess) {
            problem = cudaGetErrorString(status);
            cudaGetLastError();  // clears the error, which the next call would report again
            return;
        }
        if (count == 0) problem = "the driver lists none";
        for (int i = 0; i < count; ++i) list.push_back(read_properties(i));
    }
};

const Devices& devices() {
    static const Devices all;
    return all;
}

std::string memory_text(const cudaPointerAttributes& memory) {
    if (memory.type == cudaMemoryTypeDevice) return fmt::format("memory of CUDA device {}", memory.device);
    return "host memory";
}

}  // namespace

std::optional<std::string> unavailable(const Device& device) {
    const Devices& all = devices();
    if (all.list.empty()) return "no CUDA device: " + all.problem;
    const auto count = all.list.size();
    if (device.index < 0 || static_cast<std::size_t>(device.index) >= count) {
        return fmt::format("no CUDA device {}: the driver lists {}", device.index, count);
    }
    return std::nullopt;
}

const DeviceProperties& properties(const Device& device) {
    if (const auto problem = unavailable(device)) throw Error(ErrorCode::device_unavailable, "device", *problem);
    return devices().list[static_cast<std::size_t>(device.index)];
}

Limits limits(const Device& device) {
    const DeviceProperties& p = properties(device);
    return {.who = fmt::format("device {}", device.index),
            .capability = capability(p),
            .shared_bytes = p.shared_bytes,
            .memory_bytes = p.memory_bytes};
}

std::string target(const Device& device) {
    const DeviceProperties& p = properties(device);
    return fmt::format("sm_{} ({})", capability(p), p.name);
}

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();
    ErrorCode code = ErrorCode::internal;
    if (status == cudaErrorMemoryAllocation) code = ErrorCode::out_of_memory;
    if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver || status == cudaErrorDevicesUnavailable) {
        code = ErrorCode::device_unavailable;
    }
    throw Error(code, "", fmt::format("CUDA, {}: {}", what, cudaGetErrorString(status)));
}

void expect_device_memory(const char* name, const void* data, const Device& device) {
    cudaPointerAttributes memory{};
    check(cudaPointerGetAttributes(&memory, data), "attributes of an address");
    if (memory.type == cudaMemoryTypeManaged) return;
    if (memory.type == cudaMemoryTypeDevice && memory.device == device.index) return;
    throw Error(
        ErrorCode::invalid_argument, name,
        fmt::format("expected memory of CUDA device {}, got {} at {}", device.index, memory_text(memory), data));
}

void expect_device_memory(const char* name, const TensorView& tensor, const Device& device) {
    if (tensor.given() && tensor.size() > 0) expect_device_memory(name, tensor.data, device);
}

CurrentDevice::CurrentDevice(const Device& device) : chosen_(device.index) {
    check(cudaGetDevice(&before_), "asking for the current device");
    // Set even if it is current already: that binds the device's context to a thread that has none.
    check(cudaSetDevice(chosen_), "choosing a device");
}

CurrentDevice::~CurrentDevice() {
    if (before_ != chosen_) cudaSetDevice(before_);
}

}  // namespace tessera::cuda
