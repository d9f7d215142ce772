// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa3/forward/launch.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::fa3 {

__global__ void reset_kernel(unsigned* tile_counter) {
    ptx::griddepcontrol_launch_dependents();
    *tile_counter = 0;
}

cudaError_t start_counter_reset(unsigned* tile_counter, cudaStream_t stream) {
    return start(reset_kernel, 1, 1, 0, tile_counter, stream);
}

}  // namespace tessera::cuda::fa3
