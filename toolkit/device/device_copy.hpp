// SPDX-License-Identifier: Apache-2.0
//
// Mirrors host tensors in CUDA memory, so that the tools, whose data is in host memory, can run CUDA kernels. In a
// build without CUDA everything here throws Error(device_unavailable).
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "core/checks.hpp"
#include "tessera/attention.hpp"
#include "tessera/plan.hpp"
#include "tessera/tensor.hpp"

namespace tessera::device {

/// True if there is a CUDA device that this build can use.
bool cuda_available();

/// Waits for all work on the device; does nothing for host memory. Throws Error(internal) if a kernel failed.
void synchronize(const Device& device);

struct FreeDeviceMemory {
    void operator()(std::byte* p) const noexcept;
};
using DeviceMemory = std::unique_ptr<std::byte, FreeDeviceMemory>;

class DeviceCopy {
 public:
    explicit DeviceCopy(const Device& device);

    /// Copies this host memory to the device. Views within it that are added later are views of the copy. So tensors
    /// that share memory still share it, and guard bands stay around them.
    void add_memory(std::span<std::byte> memory);

    /// Returns the view's mirror: in memory that was added, else in a copy of the bytes that its elements span. Starts
    /// of memory are aligned to 256 bytes. An absent tensor stays absent.
    TensorView add(const TensorView& host);
    TensorView add(const TensorView& host, std::span<std::byte> memory) {
        add_memory(memory);
        return add(host);
    }
    /// Adds every tensor; those that share memory on the host share it on the device.
    ForwardArgs add(const ForwardArgs& host);
    BackwardArgs add(const BackwardArgs& host);

    /// Returns poisoned memory (bytes 0xFF) with guard bands around it.
    std::span<std::byte> workspace(std::size_t bytes);
    bool workspace_bands_unchanged() const;

    /// Waits for the device, then copies everything back to its source.
    void copy_back() const;

 private:
    struct Mirror {
        std::span<std::byte> host;
        DeviceMemory memory;
    };

    template <class Args>
    Args add_all(const Args& host);
    const Mirror* find(std::span<const std::byte> memory) const;

    Device device_;
    std::vector<Mirror> mirrors_;
    DeviceMemory workspace_;
    std::size_t workspace_bytes_ = 0;
};

/// Evicts everything from a device's caches by writing over more memory than they hold.
class CacheEviction {
 public:
    explicit CacheEviction(const Device& device);
    void operator()() const;

 private:
    Device device_;
    DeviceMemory memory_;
};

/// Calls run(tensors, workspace) with tensors on the plan's device: the caller's own for host memory, else mirrors that
/// are copied back after the work is done. Mirrored tensors are checked first, as calls check those of the host.
template <class Args, class Run>
void run_on_host_tensors(const Plan& plan, const Args& host, const Run& run) {
    if (plan.device.type == DeviceType::cpu) {
        const Workspace workspace(plan);
        run(host, workspace.span());
        return;
    }
    check_tensors(plan.problem, host, Device{});
    DeviceCopy copy(plan.device);
    const Args mirrored = copy.add(host);
    run(mirrored, copy.workspace(plan.workspace_bytes));
    copy.copy_back();
}

}  // namespace tessera::device
