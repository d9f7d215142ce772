// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode/kernels.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/arena.hpp"
#include "core/batch.hpp"
#include "cuda/decode/host/dispatch.hpp"
#include "cuda/decode/launch.hpp"
#include "cuda/device.hpp"
#include "cuda/host/scores.hpp"
#include "cuda/shared/arguments.hpp"

namespace tessera::cuda::decode {
namespace {

constexpr const char* kName = "cuda.decode.forward";
constexpr std::int64_t kNoWindow = std::int64_t{1} << 30;  ///< more than any number of queries or keys

/// The partial results of all splits of a launch.
struct Workspace {
    float* o;
    float2* ml;

    Workspace(Arena& arena, const Problem& p)
        : o(arena.take<float>(queries_at_once(p), p.heads_q, max_splits(p), config_of(p).head_dim)),
          ml(arena.take<float2>(queries_at_once(p), p.heads_q, max_splits(p))) {}
};

std::optional<std::string> refuse(const Problem& problem, const std::optional<Tile>& tile, const Device& device) {
    return refusal(kernel_entry(kName), problem, tile, limits(device));
}

/// CTAs for the splits: as many as the device holds at once. Each goes on to other splits when it is done, so the
/// capacity of a cache does not decide the launch, and any number gives the same results.
std::int64_t blocks_of(const Problem& p, const Device& device) {
    return std::min(most_items(p), std::int64_t{properties(device).multiprocessors} * config_of(p).ctas);
}

void forward(const ForwardCall& call) {
    const Problem& p = call.plan.problem;
    const ForwardParams params = forward_params(call);
    if (p.batch == 0 || p.rows_q() == 0 || p.heads_q == 0 || p.len_q == 0) return;
    const CurrentDevice current(call.plan.device);
    Arena arena(call.workspace);
    const Workspace workspace(arena, p);
    Launch launch = launch_of(call, params);
    launch.o = workspace.o;
    launch.ml = workspace.ml;
    const std::int64_t blocks = p.len_kv == 0 ? 0 : blocks_of(p, call.plan.device), each = queries_at_once(p);
    for (std::int64_t first = 0; first < p.rows_q(); first += each) {
        launch.first_query = first;
        launch.end_query = std::min(first + each, p.rows_q());
        const cudaError_t status = Shapes::call(shape_of(p), [&](auto shape) {
            using Shape = decltype(shape);
            if (p.dtype == DType::bf16) return start_decode<__nv_bfloat16, Shape>(launch, blocks, stream_of(call));
            return start_decode<__half, Shape>(launch, blocks, stream_of(call));
        });
        check(status, kName);
    }
}

std::size_t workspace_bytes(const Plan& plan) {
    Arena arena;
    Workspace(arena, plan.problem);
    return arena.used();
}

}  // namespace

Launch launch_of(const ForwardCall& call, const ForwardParams& params) {
    const Problem& p = call.plan.problem;
    const ForwardArgs& a = call.args;
    return {
        .params = params,
        .cache = cache_of(p, a),
        .max_splits = max_splits(p),
        .groups = Divider(static_cast<int>((p.batch + kMostSequences - 1) / kMostSequences)),
        .items_per_sequence =
            Divider(std::max(items_of(p).tiles * items_of(p).splits * static_cast<int>(p.heads_kv), 1)),
        .items = items_of(p),
        .group = Divider(params.group),
        .heads_kv = Divider(std::max(params.heads_kv, 1)),
        .left = static_cast<int>(std::min(p.mask.window_left, kNoWindow)),
        .right = p.mask.causal == Causal::bottom_right ? 0 : static_cast<int>(std::min(p.mask.window_right, kNoWindow)),
        .top_left = p.mask.causal == Causal::top_left,
        .vector_q = takes_vectors(params.q, params.head_dim),
        .loaded = {{params.k, params.head_dim, takes_vectors(params.k, params.head_dim)},
                   {params.v, params.head_dim_v, takes_vectors(params.v, params.head_dim_v)}},
        .read_once = row_tiles(p) == 1,
        .natural = changes_scores(p) || !scale_can_wait(p),
        .overlaps = limits(call.plan.device).capability >= 90};
}

std::vector<Kernel> kernels() {
    return {
        {.info = {.name = kName,
                  .backend = Backend::cuda,
                  .schedule = Schedule::fa2,
                  .pass = Pass::forward,
                  .dtypes = {DType::bf16, DType::fp16},
                  .summary = "few queries and caches: the keys are split among thread blocks, partial results "
                             "are combined in a fixed order; memory O(len)",
                  .limits = "sm_80 or later, with 105 to 217 KiB of shared memory; up to 8 queries a sequence where "
                            "there is no cache; no bias, no dropout"},
         .refuse = refuse,
         .default_tile = [](const Problem& p, const Device&) { return tile_of(p); },
         .workspace_bytes = workspace_bytes,
         .target = target,
         .forward = forward,
         .backward = nullptr,
         .shapes = Shapes::names(),
         .shape_of = shape_of}};
}

}  // namespace tessera::cuda::decode
