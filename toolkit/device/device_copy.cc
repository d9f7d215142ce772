// SPDX-License-Identifier: Apache-2.0
#include "device/device_copy.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "core/arguments.hpp"
#include "core/extent.hpp"
#include "device/memory.hpp"

namespace tessera::device {
namespace {

constexpr std::size_t kBand = 256;  // bytes; a multiple of cudaMalloc's alignment
constexpr int kPoison = 0xFF;
constexpr std::size_t kMoreThanCaches = std::size_t{256} << 20;  // second-level caches of 2026 hold up to 126 MB

/// True if `outer` contains `inner`. Addresses of different arrays are ordered only by std::less and its like.
bool contains(std::span<const std::byte> outer, std::span<const std::byte> inner) {
    const std::less_equal<> at_most;
    return at_most(outer.data(), inner.data()) && at_most(inner.data() + inner.size(), outer.data() + outer.size());
}

/// Merges overlapping ranges into one, such as views of a packed buffer whose elements interleave.
std::vector<std::span<std::byte>> merged(std::vector<std::span<std::byte>> ranges) {
    std::sort(ranges.begin(), ranges.end(),
              [](const auto& a, const auto& b) { return std::less<>()(a.data(), b.data()); });
    std::vector<std::span<std::byte>> result;
    for (const auto& range : ranges) {
        if (result.empty() || std::less_equal<>()(result.back().data() + result.back().size(), range.data())) {
            result.push_back(range);
            continue;
        }
        std::span<std::byte>& last = result.back();
        const auto offset = static_cast<std::size_t>(range.data() - last.data());
        last = {last.data(), std::max(last.size(), offset + range.size())};
    }
    return result;
}

DeviceMemory allocated(const Device& device, std::size_t bytes) { return DeviceMemory(allocate(device, bytes)); }

bool poisoned(const std::byte* on_device) {
    std::array<std::byte, kBand> band{};
    copy_out(band.data(), on_device, band.size());
    return std::all_of(band.begin(), band.end(), [](std::byte b) { return b == std::byte{kPoison}; });
}

}  // namespace

bool cuda_available() { return count_devices() > 0; }

void synchronize(const Device& device) {
    if (device.type == DeviceType::cuda) wait_for(device);
}

void FreeDeviceMemory::operator()(std::byte* p) const noexcept { release(p); }

DeviceCopy::DeviceCopy(const Device& device) : device_(device) {}

const DeviceCopy::Mirror* DeviceCopy::find(std::span<const std::byte> memory) const {
    const auto found = std::find_if(mirrors_.begin(), mirrors_.end(),
                                    [&](const Mirror& mirror) { return contains(mirror.host, memory); });
    return found == mirrors_.end() ? nullptr : &*found;
}

void DeviceCopy::add_memory(std::span<std::byte> memory) {
    if (memory.empty() || find(memory) != nullptr) return;
    DeviceMemory copy = allocated(device_, memory.size());
    copy_in(copy.get(), memory.data(), memory.size());
    mirrors_.push_back({memory, std::move(copy)});
}

TensorView DeviceCopy::add(const TensorView& host) {
    TensorView view = host;
    view.device = device_;
    const std::span<std::byte> bytes = extent(host);
    if (bytes.empty()) {
        view.data = nullptr;
        return view;
    }
    add_memory(bytes);
    const Mirror& mirror = *find(bytes);
    view.data = mirror.memory.get() + (static_cast<std::byte*>(host.data) - mirror.host.data());
    return view;
}

template <class Args>
Args DeviceCopy::add_all(const Args& host) {
    std::vector<std::span<std::byte>> ranges;
    for (const TensorArgument<Args>& argument : kTensors<Args>) {
        const std::span<std::byte> bytes = extent(host.*argument.view);
        if (!bytes.empty()) ranges.push_back(bytes);
    }
    for (const std::span<std::byte>& range : merged(std::move(ranges))) add_memory(range);
    Args result = host;
    for (const TensorArgument<Args>& argument : kTensors<Args>) result.*argument.view = add(host.*argument.view);
    return result;
}

ForwardArgs DeviceCopy::add(const ForwardArgs& host) { return add_all(host); }
BackwardArgs DeviceCopy::add(const BackwardArgs& host) { return add_all(host); }

std::span<std::byte> DeviceCopy::workspace(std::size_t bytes) {
    workspace_ = allocated(device_, bytes + 2 * kBand);
    workspace_bytes_ = bytes;
    fill(device_, workspace_.get(), kPoison, bytes + 2 * kBand);
    return {workspace_.get() + kBand, bytes};
}

bool DeviceCopy::workspace_bands_unchanged() const {
    return workspace_ == nullptr ||
           (poisoned(workspace_.get()) && poisoned(workspace_.get() + kBand + workspace_bytes_));
}

void DeviceCopy::copy_back() const {
    synchronize(device_);
    for (const Mirror& mirror : mirrors_) copy_out(mirror.host.data(), mirror.memory.get(), mirror.host.size());
}

CacheEviction::CacheEviction(const Device& device) : device_(device), memory_(allocated(device, kMoreThanCaches)) {}

void CacheEviction::operator()() const {
    fill(device_, memory_.get(), 0, kMoreThanCaches);
    synchronize(device_);
}

}  // namespace tessera::device
