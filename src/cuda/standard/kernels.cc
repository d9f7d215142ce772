// SPDX-License-Identifier: Apache-2.0
#include "cuda/standard/kernels.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <utility>

#include "core/arena.hpp"
#include "cuda/device.hpp"
#include "cuda/shared/arguments.hpp"
#include "cuda/standard/host/dispatch.hpp"
#include "cuda/standard/matrix.hpp"

namespace tessera::cuda::standard {
namespace {

std::size_t workspace_bytes(const Problem& problem) {
    Arena arena;
    Matrix(arena, problem);
    return arena.used();
}

std::optional<std::string> refuse(const Problem& problem, const std::optional<Tile>& tile, const Device& device) {
    return refusal(Schedule::standard, Pass::forward, problem, tile, limits(device));
}

template <class T>
cudaError_t scores(const Launch& launch, cudaStream_t stream) {
    return Shapes::call(shape_of(launch.params.head_dim),
                        [&](auto shape) { return start_scores<T, decltype(shape)>(launch, stream); });
}

template <class T>
cudaError_t values(const Launch& launch, cudaStream_t stream) {
    return Shapes::call(shape_of(launch.params.head_dim_v),
                        [&](auto shape) { return start_values<T, decltype(shape)>(launch, stream); });
}

template <class T>
void start(const Launch& launch, cudaStream_t stream) {
    check(scores<T>(launch, stream), "cuda.standard.forward, S");
    check(start_softmax<T>(launch, stream), "cuda.standard.forward, P");
    check(values<T>(launch, stream), "cuda.standard.forward, O");
}

void forward(const ForwardCall& call) {
    const Problem& p = call.plan.problem;
    const ForwardParams params = forward_params(call);
    if (p.rows_q() == 0 || p.heads_q == 0 || p.len_q == 0) return;
    const CurrentDevice current(call.plan.device);
    Arena arena(call.workspace);
    const Launch launch = make_launch(p, params, Matrix(arena, p));
    const auto start_of = p.dtype == DType::bf16 ? start<__nv_bfloat16> : start<__half>;
    start_of(launch, stream_of(call));
}

}  // namespace

std::vector<Kernel> kernels() {
    Kernel forward_kernel{.info = {.name = "cuda.standard.forward",
                                   .backend = Backend::cuda,
                                   .schedule = Schedule::standard,
                                   .pass = Pass::forward,
                                   .dtypes = {DType::bf16, DType::fp16},
                                   .summary = "S and P of all pairs in memory, three kernels; memory O(len^2)",
                                   .limits = "sm_80 or later; scores of all pairs that fit the device"},
                          .refuse = refuse,
                          .default_tile = [](const Problem& p, const Device&) { return tile_of(p); },
                          .workspace_bytes = [](const Plan& plan) { return workspace_bytes(plan.problem); },
                          .target = target,
                          .forward = forward,
                          .backward = nullptr,
                          .shapes = shape_names(),
                          .shape_of = shape_index};
    return {std::move(forward_kernel), backward_kernel()};
}

}  // namespace tessera::cuda::standard
