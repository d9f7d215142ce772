// SPDX-License-Identifier: Apache-2.0
//
// Calls on a CUDA device: the work is queued on PyTorch's current stream.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "node.hpp"

namespace tessera::torch_ops {
namespace {

// PyTorch's flash kernel for the CPU: on CUDA it has another one.
std::tuple<Tensor, Tensor> flash_op(const Tensor q, const Tensor k, const Tensor v, double code, bool is_causal,
                                    const OptionalTensor mask, std::optional<double> scale) {
    return with_torch_errors([&] {
        if (is_causal || mask.has_value()) refuse_other_settings();
        return node_forward({q, k, v}, code, scale);
    });
}

std::tuple<Tensor, Tensor, Tensor> flash_backward_op(const Tensor d_o, const Tensor q, const Tensor k, const Tensor v,
                                                     const Tensor o, const Tensor kept, double code, bool /*is_causal*/,
                                                     const OptionalTensor /*mask*/, std::optional<double> scale) {
    return with_torch_errors([&] { return node_backward(d_o, {q, k, v}, o, kept, code, scale); });
}

}  // namespace

void set_place(PlanOptions& options, TensorRef q) {
    if (!q.is_cuda()) invalid("q", "expected a tensor on a CUDA device, where another one is, got one in host memory");
    options.device = Device{DeviceType::cuda, q.device_index()};
}

Execution execution_of(TensorRef q) {
    Execution how{.skip_memory_check = true};  // a tensor of PyTorch's knows its device
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(q.device_index(), &how.stream));
    return how;
}

}  // namespace tessera::torch_ops

STABLE_TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("_scaled_dot_product_flash_attention_for_cpu", TORCH_BOX(&tessera::torch_ops::flash_op));
    m.impl("_scaled_dot_product_flash_attention_for_cpu_backward", TORCH_BOX(&tessera::torch_ops::flash_backward_op));
}
