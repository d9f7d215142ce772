// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa3/forward/launch.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::fa3 {

__global__ void reset_kernel(unsigned* next_tile) {
    ptx::griddepcontrol_launch_dependents();
    *next_tile = 0;
}

cudaError_t start_reset(unsigned* next_tile, cudaStream_t stream) {
    return start(reset_kernel, 1, 1, 0, next_tile, stream);
}

}  // namespace tessera::cuda::fa3
