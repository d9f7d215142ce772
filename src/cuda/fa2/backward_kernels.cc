// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device.hpp"
#include "cuda/fa2/backward.hpp"
#include "cuda/fa2/host/config.h"
#include "cuda/fa2/host/dispatch.hpp"
#include "cuda/fa2/kernels.hpp"
#include "cuda/gradient/start.hpp"

namespace tessera::cuda::fa2 {
namespace {

/// `tile`: that of the plan, which tells the shapes of fp32 apart.
gradient::Extents extents_of(const Problem& p, const Tile& tile) {
    if (p.dtype == DType::fp32) {
        const BackwardExtentsFp32 fp32 = backward_extents_fp32(p, tile).value();
        return {fp32.head_dim, fp32.block_kv, fp32.shared_bytes, true, false, true};
    }
    const gradient::Config c = backward_config_of(p);
    return {c.head_dim, c.block_kv(), c.shared_bytes(), c.general, true, true};
}

/// Names of the 16-bit shapes, then of fp32 by parts and by multiply-adds. By parts a head_dim has one name, since the
/// device decides which of its tiles runs.
std::vector<std::string> shape_names() {
    std::vector<std::string> names = BackwardShapes::names();
    for (const char* name : {"BackwardHeadDim64Fp32", "BackwardHeadDim128Fp32"}) names.emplace_back(name);
    for (std::string& name : BackwardShapesFp32::names()) names.push_back(std::move(name));
    return names;
}

std::size_t shape_index(const Problem& p) {
    if (p.dtype != DType::fp32) return gradient::shape_index<BackwardShapes>(p);
    const std::size_t fp32 = BackwardShapes::kConfigs.size();
    if (!backward_by_parts(p)) return fp32 + 2 + gradient::shape_index_by_dim<BackwardShapesFp32>(p);
    return fp32 + (gradient::padded_dim<BackwardShapesParts>(p) > 64 ? 1 : 0);
}

std::optional<std::string> refuse(const Problem& p, const std::optional<Tile>& tile, const Device& device) {
    return refusal(Schedule::fa2, Pass::backward, p, tile, limits(device));
}

cudaError_t start(const Problem& p, const gradient::Launch& launch, cudaStream_t stream) {
    if (p.dtype == DType::fp32) {
        return BackwardShapesFp32::call(gradient::shape_index_by_dim<BackwardShapesFp32>(p), [&](auto shape) {
            return start_backward_fp32<decltype(shape)>(launch, stream);
        });
    }
    return BackwardShapes::call(gradient::shape_index<BackwardShapes>(p), [&](auto shape) {
        using Shape = decltype(shape);
        if (p.dtype == DType::bf16) return start_backward<__nv_bfloat16, Shape>(launch, stream);
        return start_backward<__half, Shape>(launch, stream);
    });
}

template <class Shape>
cudaError_t start_parts(const Problem&, const gradient::Launch& launch, cudaStream_t stream) {
    return start_backward_parts<Shape>(launch, stream);
}

void backward(const BackwardCall& call) {
    const Problem& p = call.plan.problem;
    auto* starts = start;
    if (p.dtype == DType::fp32 && backward_by_parts(p)) {
        starts = BackwardShapesParts::call(parts_shape_of(p, call.plan.tile.block_kv).value(),
                                           [](auto shape) { return start_parts<decltype(shape)>; });
    }
    gradient::run(call, extents_of(p, call.plan.tile), starts, "cuda.fa2.backward");
}

std::size_t workspace_bytes(const Plan& plan) {
    return gradient::workspace_bytes(plan.problem, extents_of(plan.problem, plan.tile));
}

}  // namespace

Kernel backward_kernel() {
    return {.info = {.name = "cuda.fa2.backward",
                     .backend = Backend::cuda,
                     .schedule = Schedule::fa2,
                     .pass = Pass::backward,
                     .dtypes = {DType::bf16, DType::fp16, DType::fp32},
                     .summary = "K/V blocks outer, dK and dV in registers, dQ added up in a fixed order; memory O(len)",
                     .limits = "sm_80 or later, with 120 to 224 KiB of shared memory a thread block"},
            .refuse = refuse,
            .default_tile =
                [](const Problem& p, const Device& device) {
                    return backward_tile_of(p, p.dtype == DType::fp32 ? limits(device).shared_bytes : 0);
                },
            .workspace_bytes = workspace_bytes,
            .target = target,
            .forward = nullptr,
            .backward = backward,
            .uses_o_residual = gradient::uses_o_residual,
            .shapes = shape_names(),
            .shape_of = shape_index};
}

}  // namespace tessera::cuda::fa2
