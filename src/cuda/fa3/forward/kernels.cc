// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa3/forward/kernels.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fmt/format.h>

#include <algorithm>

#include "cuda/device.hpp"
#include "cuda/fa3/backward/kernels.hpp"
#include "cuda/fa3/forward/launch.hpp"
#include "cuda/fa3/host/forward_dispatch.hpp"
#include "cuda/fa3/host/pack_gqa.hpp"
#include "cuda/shared/arguments.hpp"
#include "cuda/shared/tensor_map.hpp"
#include "tessera/error.hpp"

namespace tessera::cuda::fa3 {
namespace {

constexpr std::int64_t kL2Share = std::int64_t{32} << 20;  // bytes of a 50 MB L2 that K and V may fill

std::optional<std::string> refuse(const Problem& problem, const std::optional<Tile>& tile, const Device& device) {
    return refusal(Schedule::fa3, Pass::forward, problem, tile, limits(device));
}

bool dynamic_scheduling(const Plan& plan) {
    return fa3::dynamic_scheduling(plan.problem, properties(plan.device).multiprocessors);
}

/// The workspace of a call with a dynamic tile scheduler.
struct Workspace {
    TileQueue* queue = nullptr;
    ListedSequence* list = nullptr;

    Workspace(Arena& arena, const Plan& plan) {
        if (!dynamic_scheduling(plan)) return;
        queue = arena.take<TileQueue>(1);
        if (has_list(plan.problem)) list = arena.take<ListedSequence>(tiles_of_head(plan.problem));
    }
};

std::size_t workspace_bytes(const Plan& plan) {
    Arena arena;
    Workspace(arena, plan);
    return arena.used();
}

Launch make_launch(const Plan& plan, const ForwardParams& params, const Rows& o_residual, const Cache& cache) {
    const Problem& p = plan.problem;
    const Config c = config_of(p);
    const TensorShapes shapes(p, cache.count);
    Launch launch{};
    launch.params = params;
    launch.cache = cache;
    launch.page_rows = page_rows(p, c);
    if (p.kv_lengths && cache.count == 0) launch.params.len_kv = 0;  // no slots or pages: there are no keys
    // ScoreMod scales:
    const bool scaled = c.scores == Scores::alibi || c.scores == Scores::bias || c.scores == Scores::general;
    launch.bias_by_pairs = takes_bias_pairs(params.bias, params.len_kv);
    launch.scale_log2 = scaled ? kLog2E : params.scale * kLog2E;
    launch.unscale = 1 / launch.scale_log2;
    if (c.scores == Scores::capped) launch.softcap = softcap_of(p.softcap, params.scale);
    launch.o_residual = o_residual;
    launch.pack = pack_gqa_of(p);
    const int packed = launch.pack.heads();
    launch.q = tensor_map_of_heads(params.q, shapes.q, p.dtype, packed, 64 / packed);
    if (launch.params.len_kv > 0 && shapes.k.len > 0) {
        const int rows = p.page_size > 0 ? launch.page_rows : c.block_kv;
        launch.k = tensor_map(params.k, shapes.k, p.dtype, rows);
        launch.v = tensor_map(params.v, shapes.v, p.dtype, rows);
    }
    launch.store_by_tma = !refuse_tma(params.o, shapes.o);
    if (launch.store_by_tma) launch.o = tensor_map_of_heads(params.o, shapes.o, p.dtype, packed, 16 / packed);
    launch.tile_queries = Divider(c.block_q() / packed);
    launch.order = TileOrder(static_cast<int>(query_heads(p)) / packed, static_cast<int>(tiles_of_head(p)),
                             std::max(heads_together(p, kL2Share) / packed, 1));
    launch.packed_heads = Divider(params.heads_q / packed);
    launch.group = Divider(params.group);
    const Band band = p.mask.bind(p.len_q, p.len_kv);
    launch.low = static_cast<int>(band.low);
    launch.high = static_cast<int>(band.high);
    return launch;
}

/// The shape of a call: a bias in fp32 takes the general one, which has the same tiles.
std::size_t shape_of_call(const Problem& p, const ForwardParams& params) {
    const std::size_t own = *shape_of(p);
    return Shapes::kConfigs[own].scores == Scores::bias && params.bias.fp32 ? *shape_of(p, Scores::general) : own;
}

void forward(const ForwardCall& call) {
    const Problem& p = call.plan.problem;
    const ForwardParams params = forward_params(call);
    if (p.rows_q() == 0 || p.heads_q == 0) return;
    const CurrentDevice current(call.plan.device);
    Launch launch = make_launch(call.plan, params, rows_of(call.args.o_residual), cache_of(p, call.args));
    launch.residual_by_vectors = takes_byte_vectors(launch.o_residual, params.head_dim_v);
    Arena arena(call.workspace);
    const Workspace workspace(arena, call.plan);
    launch.queue = workspace.queue;
    launch.list = workspace.list;
    if (launch.queue != nullptr) check(start_queue(launch, stream_of(call)), "cuda.fa3.forward, tile queue");
    const int multiprocessors = properties(call.plan.device).multiprocessors;
    const int blocks =
        std::min(Shapes::kConfigs[shape_of_call(p, params)].ctas * multiprocessors, launch.order.tiles());
    const cudaError_t status = Shapes::call(shape_of_call(p, params), [&](auto shape) {
        using Shape = decltype(shape);
        if (p.dtype == DType::bf16) return start_forward<__nv_bfloat16, Shape>(launch, blocks, stream_of(call));
        return start_forward<__half, Shape>(launch, blocks, stream_of(call));
    });
    check(status, "cuda.fa3.forward");
}

/// TMA needs aligned rows, which only a call shows.
std::optional<TensorRefusal> refuse_tensors(const Problem& problem, const ForwardArgs& args) {
    const TensorShapes shapes(problem, args.k.shape[0]);
    const struct {
        const char* name;
        const TensorView* view;
        const RowsShape* shape;
    } inputs[] = {{"q", &args.q, &shapes.q}, {"k", &args.k, &shapes.k}, {"v", &args.v, &shapes.v}};
    for (const auto& [name, view, shape] : inputs) {
        if (view->size() == 0) continue;
        if (auto reason = refuse_tma(rows_of(*view), *shape)) return TensorRefusal{name, *reason};
    }
    return std::nullopt;
}

}  // namespace

std::vector<Kernel> kernels() {
    return {{.info = {.name = "cuda.fa3.forward",
                      .backend = Backend::cuda,
                      .schedule = Schedule::fa3,
                      .pass = Pass::forward,
                      .dtypes = {DType::bf16, DType::fp16},
                      .summary = "warp-specialized: a TMA producer, ping-pong consumer warpgroups; memory O(len)",
                      .limits = "sm_90; head_dim in multiples of 8, over 128 scale and mask only; "
                                "16-byte aligned rows; on a cache scale and mask only, pages in multiples of 8 keys"},
             .refuse = refuse,
             .default_tile = [](const Problem& p, const Device&) { return tile_of(p); },
             .workspace_bytes = workspace_bytes,
             .target = target,
             .forward = forward,
             .backward = nullptr,
             .refuse_tensors = refuse_tensors,
             .uses_o_residual = [](const Problem&) { return true; },
             .shapes = Shapes::names(),
             .shape_of = [](const Problem& p) { return *shape_of(p); }},
            backward_kernel()};
}

}  // namespace tessera::cuda::fa3
