// SPDX-License-Identifier: Apache-2.0
//
// Calls on a CUDA device: kernels are launched on PyTorch's current stream.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "call.hpp"

namespace tessera::torch_ops {

void set_device_and_threads(PlanOptions& options, TensorRef q) {
    if (!q.is_cuda())
        invalid("q", "expected a tensor on a CUDA device, as another argument is, got one in host memory");
    options.device = Device{DeviceType::cuda, q.device_index()};
}

Execution execution_of(TensorRef q) {
    // PyTorch states the device of each tensor, so the CUDA driver is not asked for it.
    Execution how{.skip_memory_check = true};
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(q.device_index(), &how.stream));
    return how;
}

}  // namespace tessera::torch_ops
