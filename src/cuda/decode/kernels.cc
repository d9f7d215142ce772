// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode/kernels.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/arena.hpp"
#include "cuda/decode/host/dispatch.hpp"
#include "cuda/decode/launch.hpp"
#include "cuda/device.hpp"
#include "cuda/shared/arguments.hpp"

namespace tessera::cuda::decode {
namespace {

constexpr const char* kName = "cuda.decode.forward";

/// The partial results of all splits.
struct Workspace {
    float* o;
    float2* ml;

    Workspace(Arena& arena, const Problem& p)
        : o(arena.take<float>(p.batch * p.len_q, p.heads_q, max_splits(p), Shapes::kConfigs[shape_of(p)].head_dim)),
          ml(arena.take<float2>(p.batch * p.len_q, p.heads_q, max_splits(p))) {}
};

std::optional<std::string> refuse(const Problem& problem, const std::optional<Tile>& tile, const Device& device) {
    return refusal(kernel_entry(kName), problem, tile, limits(device));
}

void forward(const ForwardCall& call) {
    const Problem& p = call.plan.problem;
    const ForwardParams params = forward_params(call);
    if (p.rows_q() == 0 || p.heads_q == 0 || p.len_q == 0) return;
    const CurrentDevice current(call.plan.device);
    Arena arena(call.workspace);
    const Workspace workspace(arena, p);
    const Launch launch{.params = params,
                        .o = workspace.o,
                        .ml = workspace.ml,
                        .max_splits = static_cast<int>(max_splits(p)),
                        .head_tiles = static_cast<int>(head_tiles(p)),
                        .vector_q = takes_vectors(params.q, params.head_dim),
                        .vector_k = takes_vectors(params.k, params.head_dim),
                        .vector_v = takes_vectors(params.v, params.head_dim_v),
                        .overlaps = limits(call.plan.device).capability >= 90};
    const cudaError_t status = Shapes::call(shape_of(p), [&](auto shape) {
        using Shape = decltype(shape);
        if (p.dtype == DType::bf16) return start_decode<__nv_bfloat16, Shape>(launch, stream_of(call));
        return start_decode<__half, Shape>(launch, stream_of(call));
    });
    check(status, kName);
}

std::size_t workspace_bytes(const Plan& plan) {
    Arena arena;
    Workspace(arena, plan.problem);
    return arena.used();
}

}  // namespace

std::vector<Kernel> kernels() {
    return {
        {.info = {.name = kName,
                  .backend = Backend::cuda,
                  .schedule = Schedule::fa2,
                  .pass = Pass::forward,
                  .dtypes = {DType::bf16, DType::fp16},
                  .summary = "few queries: the keys are split among thread blocks, partial results are combined in a "
                             "fixed order; memory O(len)",
                  .limits = "sm_80 or later; up to 8 queries a sequence, scores that are scaled only"},
         .refuse = refuse,
         .default_tile = tile_of,
         .workspace_bytes = workspace_bytes,
         .target = target,
         .forward = forward,
         .backward = nullptr,
         .shapes = Shapes::names(),
         .shape_of = shape_of}};
}

}  // namespace tessera::cuda::decode
