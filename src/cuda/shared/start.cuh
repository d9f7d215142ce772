// SPDX-License-Identifier: Apache-2.0
//
// Launches of kernels. Included where kernels are compiled.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera::cuda {

/// When a grid starts: after the previous grid of the stream, or beside it (programmatic dependent launch). A grid that
/// starts beside another waits for the other's writes by griddepcontrol.wait.
enum class Start { behind, beside };

/// Starts `kernel` on `blocks` thread blocks with `shared_bytes` of dynamic shared memory, which may exceed the default
/// limit of 48 KiB.
template <class Launch>
cudaError_t start(void (*kernel)(Launch), std::int64_t blocks, int threads, int shared_bytes, const Launch& launch,
                  cudaStream_t stream, Start when = Start::behind) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (status != cudaSuccess) return status;
    cudaLaunchAttribute beside{};
    beside.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    beside.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = &beside;
    config.numAttrs = when == Start::beside ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, launch);
}

}  // namespace tessera::cuda
