// SPDX-License-Identifier: Apache-2.0
//
// Calls on a CUDA device: the work is queued on PyTorch's current stream.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "call.hpp"

namespace tessera::torch_ops {

void set_place(PlanOptions& options, const Tensor& q) {
    if (!q.is_cuda()) invalid("q", "expected a tensor on a CUDA device, where another one is, got one in host memory");
    options.device = Device{DeviceType::cuda, q.get_device_index()};
}

Execution execution_of(const Tensor& q) {
    Execution how{.placed = true};  // a tensor of PyTorch's knows its device
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(q.get_device_index(), &how.stream));
    return how;
}

}  // namespace tessera::torch_ops
