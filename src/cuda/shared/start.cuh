// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera::cuda {

/// Starts `kernel` on `blocks` thread blocks with so much dynamic shared memory, which may be more than the 48 KiB that
/// a kernel has without asking. Included where kernels are compiled.
template <class Launch>
cudaError_t start(void (*kernel)(Launch), std::int64_t blocks, int threads, int shared_bytes, const Launch& launch,
                  cudaStream_t stream) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (status != cudaSuccess) return status;
    kernel<<<static_cast<unsigned>(blocks), threads, static_cast<unsigned>(shared_bytes), stream>>>(launch);
    return cudaGetLastError();
}

}  // namespace tessera::cuda
