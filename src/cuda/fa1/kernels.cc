// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa1/kernels.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fmt/format.h>

#include <algorithm>

#include "core/arena.hpp"
#include "cuda/device.hpp"
#include "cuda/fa1/host/dispatch.hpp"
#include "cuda/fa1/launch.hpp"
#include "cuda/shared/arguments.hpp"

namespace tessera::cuda::fa1 {
namespace {

std::int64_t tiles_of(std::int64_t rows, const Config& c) { return (rows + c.block_q() - 1) / c.block_q(); }

/// O, m and l of every query between key blocks.
struct Workspace {
    std::int64_t tiles;  // query tiles of a head; ragged: one more for each sequence
    float* o;            // [heads_q, tiles, block_q, head_dim]
    float2* ml;          // [heads_q, tiles, block_q]

    Workspace(Arena& arena, const Problem& p)
        : tiles(p.ragged ? p.total_q / config_of(p).block_q() + p.batch : p.batch * tiles_of(p.len_q, config_of(p))),
          o(arena.take<float>(p.heads_q, tiles, config_of(p).block_q() * config_of(p).head_dim)),
          ml(arena.take<float2>(p.heads_q, tiles, config_of(p).block_q())) {}
};

std::optional<std::string> refuse(const Problem& problem, const std::optional<Tile>& tile, const Device& device) {
    return refusal(Schedule::fa1, Pass::forward, problem, tile, limits(device));
}

/// CTAs of a (batch, head): one, as in the paper, unless some multiprocessors would have none. Several CTAs then have
/// some of the query tiles each, as independent runs of the algorithm. No bit depends on it.
int parts_of(const Problem& p, const Config& c, int multiprocessors) {
    const std::int64_t most = std::max<std::int64_t>(tiles_of(p.len_q, c) / c.groups, 1);
    return static_cast<int>(std::clamp<std::int64_t>(multiprocessors / (p.batch * p.heads_q), 1, most));
}

void forward(const ForwardCall& call) {
    const Problem& p = call.plan.problem;
    const ForwardParams params = forward_params(call);
    if (p.rows_q() == 0 || p.heads_q == 0 || p.len_q == 0) return;
    const CurrentDevice current(call.plan.device);
    const Config c = config_of(p);
    Arena arena(call.workspace);
    const Workspace workspace(arena, p);
    const Launch launch{.params = params,
                        .o = workspace.o,
                        .ml = workspace.ml,
                        .tiles = workspace.tiles,
                        .parts = parts_of(p, c, properties(call.plan.device).multiprocessors),
                        .vector_q = takes_vectors(params.q, params.head_dim),
                        .vector_k = takes_vectors(params.k, params.head_dim),
                        .vector_v = takes_vectors(params.v, params.head_dim_v),
                        .vector_o = takes_vectors(params.o, params.head_dim_v)};
    const cudaError_t status = Shapes::call(shape_of(p), [&](auto shape) {
        using Shape = decltype(shape);
        if (p.dtype == DType::bf16) return start_forward<__nv_bfloat16, Shape>(launch, stream_of(call));
        return start_forward<__half, Shape>(launch, stream_of(call));
    });
    check(status, "cuda.fa1.forward");
}

std::size_t workspace_bytes(const Plan& plan) {
    Arena arena;
    Workspace(arena, plan.problem);
    return arena.used();
}

}  // namespace

std::vector<Kernel> kernels() {
    return {{.info = {.name = "cuda.fa1.forward",
                      .backend = Backend::cuda,
                      .schedule = Schedule::fa1,
                      .pass = Pass::forward,
                      .dtypes = {DType::bf16, DType::fp16},
                      .summary = "K/V blocks outer; O, m and l rewritten in memory for every block; memory O(len)",
                      .limits = "sm_80 or later, with 193 KiB of shared memory for head_dim over 128"},
             .refuse = refuse,
             .default_tile = [](const Problem& p, const Device&) { return tile_of(p); },
             .workspace_bytes = workspace_bytes,
             .target = target,
             .forward = forward,
             .backward = nullptr,
             .shapes = Shapes::names(),
             .shape_of = shape_of},
            backward_kernel()};
}

}  // namespace tessera::cuda::fa1
