// SPDX-License-Identifier: Apache-2.0
//
// Launches of kernels. Included where kernels are compiled.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera::cuda {

/// When a grid starts: after the previous grid of the stream, or while that still runs (programmatic dependent launch,
/// PDL). Then it waits for the writes of the previous grid by griddepcontrol.wait.
enum class Start { in_order, programmatic };

/// Starts `kernel` on `blocks` thread blocks with `shared_bytes` of dynamic shared memory, which may exceed the default
/// limit of 48 KiB.
template <class Launch>
cudaError_t start(void (*kernel)(Launch), std::int64_t blocks, int threads, int shared_bytes, const Launch& launch,
                  cudaStream_t stream, Start when = Start::in_order) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (status != cudaSuccess) return status;
    cudaLaunchAttribute programmatic{};
    programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    programmatic.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = &programmatic;
    config.numAttrs = when == Start::programmatic ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, launch);
}

}  // namespace tessera::cuda
