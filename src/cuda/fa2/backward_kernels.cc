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

gradient::Extents extents_of(const Problem& p) {
    if (p.dtype == DType::fp32) {
        const gradient::ConfigFp32 c =
            BackwardShapesFp32::kConfigs[gradient::shape_index_by_dim<BackwardShapesFp32>(p)];
        return {c.head_dim, c.block_kv, c.shared_bytes(), true, false, true};
    }
    const gradient::Config c = backward_config_of(p);
    return {c.head_dim, c.block_kv(), c.shared_bytes(), c.general, true, true};
}

/// Names of the 16-bit shapes, then of the fp32 shapes.
std::vector<std::string> shape_names() {
    std::vector<std::string> names = BackwardShapes::names();
    for (std::string& name : BackwardShapesFp32::names()) names.push_back(std::move(name));
    return names;
}

std::size_t shape_index(const Problem& p) {
    if (p.dtype != DType::fp32) return gradient::shape_index<BackwardShapes>(p);
    return BackwardShapes::kConfigs.size() + gradient::shape_index_by_dim<BackwardShapesFp32>(p);
}

Tile backward_tile_of(const Problem& p) {
    const int query_tiles = p.dtype == DType::fp32 ? 1 : backward_config_of(p).query_tiles;
    return {query_tiles * gradient::kBlockQ, extents_of(p).block_kv};
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

void backward(const BackwardCall& call) {
    gradient::run(call, extents_of(call.plan.problem), start, "cuda.fa2.backward");
}

std::size_t workspace_bytes(const Plan& plan) {
    return gradient::workspace_bytes(plan.problem, extents_of(plan.problem));
}

}  // namespace

Kernel backward_kernel() {
    return {.info = {.name = "cuda.fa2.backward",
                     .backend = Backend::cuda,
                     .schedule = Schedule::fa2,
                     .pass = Pass::backward,
                     .dtypes = {DType::bf16, DType::fp16, DType::fp32},
                     .summary = "K/V blocks outer, dK and dV in registers, dQ added up in a fixed order; memory O(len)",
                     .limits = "sm_80 or later"},
            .refuse = refuse,
            .default_tile = backward_tile_of,
            .workspace_bytes = workspace_bytes,
            .target = target,
            .forward = nullptr,
            .backward = backward,
            .uses_o_residual = gradient::uses_o_residual,
            .shapes = shape_names(),
            .shape_of = shape_index};
}

}  // namespace tessera::cuda::fa2
