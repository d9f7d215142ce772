// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa2/kernels.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cuda/device.hpp"
#include "cuda/fa2/host/dispatch.hpp"
#include "cuda/fa2/launch.hpp"
#include "cuda/shared/arguments.hpp"

namespace tessera::cuda::fa2 {
namespace {

std::optional<std::string> refuse(const Problem& problem, const std::optional<Tile>& tile, const Device& device) {
    return refusal(Schedule::fa2, Pass::forward, problem, tile, limits(device));
}

Launch make_launch(const Problem& p, const ForwardParams& params, const Rows& o_residual, std::int64_t l2_bytes) {
    return {.params = params,
            .blocks = query_heads(p) * query_tiles(p, tile_of(p).block_q),
            .q_blocks = static_cast<int>(query_tiles(p, tile_of(p).block_q)),
            .heads_together = heads_together(p, l2_bytes * 3 / 5),
            .vector_q = takes_vectors(params.q, params.head_dim),
            .vector_k = takes_vectors(params.k, params.head_dim),
            .vector_v = takes_vectors(params.v, params.head_dim_v),
            .vector_o = takes_vectors(params.o, params.head_dim_v),
            .o_residual = o_residual,
            .vector_residual = takes_byte_vectors(o_residual, params.head_dim_v)};
}

cudaError_t start(const Problem& p, const Launch& launch, std::int64_t shared_bytes, cudaStream_t stream) {
    if (p.dtype == DType::fp32) {
        return ShapesFp32::call(shape_of_fp32(p), [&](auto shape) {  //
            return start_forward_fp32<decltype(shape)>(launch, stream);
        });
    }
    return Shapes::call(shape_of(p, shared_bytes), [&](auto shape) {
        using Shape = decltype(shape);
        if (p.dtype == DType::bf16) return start_forward<__nv_bfloat16, Shape>(launch, stream);
        return start_forward<__half, Shape>(launch, stream);
    });
}

void forward(const ForwardCall& call) {
    const Problem& p = call.plan.problem;
    const ForwardParams params = forward_params(call);
    if (p.rows_q() == 0 || p.heads_q == 0 || p.len_q == 0) return;
    const CurrentDevice current(call.plan.device);
    const DeviceProperties& device = properties(call.plan.device);
    const Launch launch = make_launch(p, params, rows_of(call.args.o_residual), device.l2_bytes);
    check(start(p, launch, device.shared_bytes, stream_of(call)), "cuda.fa2.forward");
}

/// Names of the 16-bit shapes, then of the fp32 shapes.
std::vector<std::string> shape_names() {
    std::vector<std::string> names = Shapes::names();
    for (std::string& name : ShapesFp32::names()) names.push_back(std::move(name));
    return names;
}

std::size_t shape_index(const Problem& p) {
    return p.dtype == DType::fp32 ? Shapes::kConfigs.size() + shape_of_fp32(p) : shape_of(p);
}

}  // namespace

std::vector<Kernel> kernels() {
    return {{.info = {.name = "cuda.fa2.forward",
                      .backend = Backend::cuda,
                      .schedule = Schedule::fa2,
                      .pass = Pass::forward,
                      .dtypes = {DType::bf16, DType::fp16, DType::fp32},
                      .summary = "Q blocks outer, O in registers until it is done; memory O(len)",
                      .limits = "sm_80 or later, with 49 to 193 KiB of shared memory a thread block"},
             .refuse = refuse,
             .default_tile = [](const Problem& p, const Device&) { return tile_of(p); },
             .workspace_bytes = [](const Plan&) { return std::size_t{0}; },
             .target = target,
             .forward = forward,
             .backward = nullptr,
             .uses_o_residual = [](const Problem&) { return true; },
             .shapes = shape_names(),
             .shape_of = shape_index},
            backward_kernel()};
}

}  // namespace tessera::cuda::fa2
