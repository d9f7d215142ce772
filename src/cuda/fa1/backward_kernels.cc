// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device.hpp"
#include "cuda/fa1/backward.hpp"
#include "cuda/fa1/host/config.h"
#include "cuda/fa1/kernels.hpp"
#include "cuda/gradient/host/dispatch.hpp"
#include "cuda/gradient/start.hpp"

namespace tessera::cuda::fa1 {
namespace {

std::size_t shape_index(const Problem& p) { return gradient::shape_index_by_dim<BackwardShapes>(p); }

gradient::Extents extents_of(const Problem& p) {
    const gradient::Config c = BackwardShapes::kConfigs[shape_index(p)];
    return {c.head_dim, c.block_kv(), c.shared_bytes(), c.general};
}

Tile tile_of(const Problem& p) { return {gradient::kBlockQ, extents_of(p).block_kv}; }

std::optional<std::string> refuse(const Problem& p, const std::optional<Tile>& tile, const Device& device) {
    return refusal(Schedule::fa1, Pass::backward, p, tile, limits(device));
}

cudaError_t start(const Problem& p, const gradient::Launch& launch, cudaStream_t stream) {
    return BackwardShapes::call(shape_index(p), [&](auto shape) {
        using Shape = decltype(shape);
        if (p.dtype == DType::bf16) return start_backward<__nv_bfloat16, Shape>(launch, stream);
        return start_backward<__half, Shape>(launch, stream);
    });
}

void backward(const BackwardCall& call) {
    gradient::run(call, extents_of(call.plan.problem), start, "cuda.fa1.backward");
}

std::size_t workspace_bytes(const Plan& plan) {
    return gradient::workspace_bytes(plan.problem, extents_of(plan.problem));
}

}  // namespace

Kernel backward_kernel() {
    return {.info = {.name = "cuda.fa1.backward",
                     .backend = Backend::cuda,
                     .schedule = Schedule::fa1,
                     .pass = Pass::backward,
                     .dtypes = {DType::bf16, DType::fp16},
                     .summary = "K/V blocks outer, one thread block a head; dQ rewritten in memory; memory O(len)",
                     .limits = "sm_80 or later, with 219 KiB of shared memory for head_dim over 128"},
            .refuse = refuse,
            .default_tile = [](const Problem& p, const Device&) { return tile_of(p); },
            .workspace_bytes = workspace_bytes,
            .target = target,
            .forward = nullptr,
            .backward = backward,
            .uses_o_residual = gradient::uses_o_residual,
            .shapes = BackwardShapes::names(),
            .shape_of = shape_index};
}

}  // namespace tessera::cuda::fa1
