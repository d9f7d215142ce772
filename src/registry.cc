// SPDX-License-Identifier: Apache-2.0
#include "registry.hpp"

#include <vector>

#include "cpu/backend.hpp"
#include "cpu/block/kernels.hpp"
#include "reference/backend.hpp"
#include "tessera/error.hpp"
#if defined(TESSERA_HAS_CUDA)
#include "cuda/backend.hpp"
#endif

namespace tessera {
namespace {

std::vector<Kernel> collect() {
    std::vector<Kernel> all = cpu::kernels();
#if defined(TESSERA_HAS_CUDA)
    for (Kernel& kernel : cuda::kernels()) all.push_back(std::move(kernel));
#endif
    for (Kernel& kernel : reference::kernels()) all.push_back(std::move(kernel));
    return all;
}

const std::vector<KernelInfo>& infos() {
    static const std::vector<KernelInfo> list = [] {
        std::vector<KernelInfo> result;
        for (const Kernel& kernel : registry()) result.push_back(kernel.info);
        return result;
    }();
    return list;
}

}  // namespace

std::span<const Kernel> registry() {
    static const std::vector<Kernel> list = collect();
    return list;
}

std::span<const KernelInfo> kernels() { return infos(); }

std::optional<std::string> unavailable(const Device& device) {
    if (device.type == DeviceType::cpu) return std::nullopt;
#if defined(TESSERA_HAS_CUDA)
    return cuda::unavailable(device);
#else
    return "this build has no CUDA kernels";
#endif
}

void append_on_cuda([[maybe_unused]] const AppendArgs& args, [[maybe_unused]] const AppendOptions& options,
                    [[maybe_unused]] void* stream) {
    if (const auto problem = unavailable(args.k.device)) throw Error(ErrorCode::device_unavailable, "device", *problem);
#if defined(TESSERA_HAS_CUDA)
    cuda::append(args, options, stream);
#endif
}

const DecodeBlockKernels* decode_block_kernels(const Device& device) {
    if (device.type == DeviceType::cpu) return &cpu::block::kernels();
#if defined(TESSERA_HAS_CUDA)
    return &cuda::block::kernels();
#else
    return nullptr;
#endif
}

std::unique_ptr<DeviceRows> rows_on_cuda(const Device& device) {
    if (const auto problem = unavailable(device)) throw Error(ErrorCode::device_unavailable, "device", *problem);
#if defined(TESSERA_HAS_CUDA)
    return cuda::device_rows(device);
#else
    return nullptr;
#endif
}

void add_rows_on_cuda([[maybe_unused]] const RowSums& sums, const Device& device, [[maybe_unused]] void* stream) {
    if (const auto problem = unavailable(device)) throw Error(ErrorCode::device_unavailable, "device", *problem);
#if defined(TESSERA_HAS_CUDA)
    cuda::add_rows(sums, device, stream);
#endif
}

void copy_rows_on_cuda([[maybe_unused]] const RowCopies& copies, const Device& device, [[maybe_unused]] void* stream) {
    if (const auto problem = unavailable(device)) throw Error(ErrorCode::device_unavailable, "device", *problem);
#if defined(TESSERA_HAS_CUDA)
    cuda::copy_rows(copies, device, stream);
#endif
}

const Kernel& kernel_of(const KernelInfo& info) { return registry()[static_cast<std::size_t>(&info - infos().data())]; }

}  // namespace tessera
