// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa3/backward/kernels.hpp"

#include <algorithm>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/arena.hpp"
#include "cuda/device.hpp"
#include "cuda/fa3/backward/launch.hpp"
#include "cuda/fa3/host/backward_dispatch.hpp"
#include "cuda/shared/arguments.hpp"
#include "cuda/shared/tensor_map.hpp"

namespace tessera::cuda::fa3 {
namespace {

using backward::Launch;

constexpr int kStoredRows = 16;  // rows of a gradient that one warp stores by TMA

std::optional<std::string> refuse(const Problem& problem, const std::optional<Tile>& tile, const Device& device) {
    return refusal(Schedule::fa3, Pass::backward, problem, tile, limits(device));
}

struct Memory {
    backward::Workspace workspace;
    std::size_t cleared;  // bytes that are 0 before the first kernel that reads them
};

Memory lay_out(Arena& arena, const Problem& p) {
    const backward::Config& c = backward::config_of(p);
    const std::int64_t blocks = p.heads_q * backward::blocks_q(p);
    const std::int64_t accumulators = backward::dq_accumulators(p);
    const std::int64_t splits = backward::head_splits(p);
    backward::Workspace w{};
    w.state = arena.take<backward::CallState>(1);
    w.next_numbers = arena.take<unsigned>(backward::query_parts(p));
    if (p.dtype == DType::fp16) w.ds_bounds = arena.take<backward::DsBounds>(p.batch, p.heads_kv, splits);
    const std::size_t cleared = arena.used();
    if (p.ragged) {
        w.list = arena.take<ListedSequence>(backward::list_items(p));
        w.query_blocks = arena.take<backward::SequenceBlock>(backward::blocks_q(p));
    }
    w.stats = arena.take<backward::RowStats>(blocks, c.row_stats());
    w.dq_semaphores = arena.take<int>(accumulators, blocks, backward::Config::kConsumers);
    w.dq = arena.take<float>(accumulators, blocks, std::int64_t{c.block_q}, std::int64_t{c.head_dim});
    if (splits > 1 || backward::query_parts(p) > 1) {
        const std::int64_t keys = p.heads_kv * backward::blocks_kv(p) * c.block_kv;
        w.split_dk = arena.take<float>(splits, keys, std::int64_t{c.head_dim});
        w.split_dv = arena.take<float>(splits, keys, std::int64_t{c.head_dim_v});
    }
    return {w, cleared};
}

bool has_queries(const Problem& p) { return p.rows_q() > 0 && p.heads_q > 0; }
bool has_keys(const Problem& p) { return p.rows_kv() > 0 && p.heads_kv > 0; }

std::size_t workspace_bytes(const Plan& plan) {
    Arena arena;
    lay_out(arena, plan.problem);
    return arena.used();
}

/// Does the backward compute delta from O and its residual? In fp16 the bound of |dS| is then |dO| |V| / (1 - p), which
/// would be far too large for a dropout probability near 1.
bool uses_o_residual(const Problem& p) { return p.dropout.probability <= 0.9; }

void set_maps(Launch& launch, const Problem& p) {
    const TensorShapes shapes(p);
    const backward::Config& c = backward::config_of(p);
    const BackwardParams& params = launch.params;
    backward::TensorMaps& maps = launch.maps;
    backward::Outputs& gradients = launch.gradients;
    if (has_queries(p)) {
        maps.q = tensor_map(params.forward.q, shapes.q, p.dtype, c.block_q);
        maps.d_o = tensor_map(params.d_o, shapes.o, p.dtype, c.block_q);
    }
    if (has_keys(p)) {
        maps.k = tensor_map(params.forward.k, shapes.k, p.dtype, c.block_kv);
        maps.v = tensor_map(params.forward.v, shapes.v, p.dtype, c.block_kv);
        gradients.tma_dk = params.dk.data && !refuse_tma(params.dk, shapes.k);
        gradients.tma_dv = params.dv.data && !refuse_tma(params.dv, shapes.v);
        if (gradients.tma_dk) maps.dk = tensor_map(params.dk, shapes.k, p.dtype, kStoredRows);
        if (gradients.tma_dv) maps.dv = tensor_map(params.dv, shapes.v, p.dtype, kStoredRows);
    }
    if (c.splits_dv_dk() && has_queries(p) && params.dq.data) {
        gradients.tma_dq = !refuse_tma(params.dq, shapes.q);
        if (gradients.tma_dq) maps.dq = tensor_map(params.dq, shapes.q, p.dtype, kStoredRows);
    }
}

Launch make_launch(const BackwardCall& call, const Memory& memory) {
    const Problem& p = call.plan.problem;
    const backward::Config& c = backward::config_of(p);
    const auto head_dim = static_cast<int>(p.head_dim), head_dim_v = static_cast<int>(p.head_dim_v);
    Launch launch{};
    launch.params = backward_params(call);
    launch.workspace = memory.workspace;
    set_maps(launch, p);
    const BackwardParams& params = launch.params;
    if (uses_o_residual(p)) launch.output.residual = rows_of(call.args.o_residual);
    launch.output.by_vectors = takes_vectors(params.forward.o, head_dim_v) && takes_vectors(params.d_o, head_dim_v) &&
                               takes_byte_vectors(launch.output.residual, head_dim_v);
    backward::Outputs& gradients = launch.gradients;
    gradients.vector_dq = takes_vectors(params.dq, head_dim);
    gradients.vector_dk = takes_vectors(params.dk, head_dim);
    gradients.vector_dv = takes_vectors(params.dv, head_dim_v);
    gradients.only_dq = c.splits_dv_dk() && params.dk.data == nullptr && params.dv.data == nullptr;
    gradients.writes_dq =
        gradients.vector_dq && params.dq.data != nullptr && has_queries(p) && has_keys(p) && backward::writes_dq(p);
    launch.key_blocks = backward::key_block_numbering(p);
    launch.query_tiles = backward::query_tile_numbering(p);
    if (p.ragged) launch.list_items = static_cast<int>(backward::list_items(p));
    else
        launch.schedule =
            backward::ask_schedule(p, [](const auto& schedule) -> backward::SequenceSchedule { return schedule; });
    launch.part_queries = backward::part_queries(p);
    launch.parts = backward::query_parts(p);
    const bool scaled = c.scores == Scores::general || c.scores == Scores::bias;
    launch.scale_log2 = scaled ? kLog2E : params.forward.scale * kLog2E;
    launch.bias_by_pairs = takes_bias_pairs(params.forward.bias, params.forward.len_kv);
    launch.dbias_by_pairs = takes_bias_pairs(params.dbias, params.forward.len_kv) && params.dbias.row != 0;
    const auto has_own = [](std::int64_t stride, std::int64_t size) { return stride != 0 || size == 1; };
    launch.one_bias_a_tile = params.forward.bias.batch == 0 && has_own(params.dbias.head, p.heads_q) &&
                             has_own(params.dbias.row, p.len_q) && has_own(params.dbias.column, p.len_kv);
    if (c.scores == Scores::capped) launch.softcap = softcap_of(p.softcap, params.forward.scale);
    launch.dq_accumulators = backward::dq_accumulators(p);
    launch.blocks_q = static_cast<int>(backward::blocks_q(p));
    launch.blocks_kv = static_cast<int>(backward::blocks_kv(p));
    launch.multiprocessors = properties(call.plan.device).multiprocessors;
    return launch;
}

/// Launches the main kernel, once for each part of the queries, and sums up dK and dV.
template <class T, class Shape>
cudaError_t launch_main(const Launch& first, cudaStream_t stream) {
    Launch launch = first;
    cudaError_t status = cudaSuccess;
    for (launch.part = 0; launch.part < launch.parts && status == cudaSuccess; ++launch.part) {
        status = backward::launch_backward<T, Shape>(launch, stream);
    }
    if (status != cudaSuccess || (launch.key_blocks.splits == 1 && launch.parts == 1)) return status;
    launch.part = 0;
    return backward::launch_dkdv_reduce<T, typename backward::KernelsBeside<Shape>::Sums>(launch, stream);
}

/// Launches the kernels of a call. Without queries, dK and dV are still set to 0, and without keys dQ.
template <class T, class Shape>
cudaError_t launch_all(const Problem& p, const Launch& launch, cudaStream_t stream) {
    constexpr backward::Config kConfig = Shape::kConfig;
    using Delta = typename backward::KernelsBeside<Shape>::Delta;
    cudaError_t status =
        p.ragged ? backward::launch_list<kConfig.block_q, kConfig.block_kv>(launch, stream) : cudaSuccess;
    if (status == cudaSuccess && has_queries(p) && launch.output.residual.data != nullptr) {
        status = backward::launch_delta_from_output<T, Delta>(launch, stream);
    }
    if (status == cudaSuccess && has_queries(p)) status = backward::launch_delta<T, Delta>(launch, stream);
    if (status == cudaSuccess && launch.params.dsinks.data != nullptr)
        status = backward::launch_sink_gradient<kConfig.block_q>(launch, stream);
    if (status == cudaSuccess && has_keys(p) && !launch.gradients.only_dq) {
        status = launch_main<T, Shape>(launch, stream);
    }
    if constexpr (kConfig.takes_bias()) {
        if (status == cudaSuccess && launch.params.dbias.data != nullptr)
            status = backward::launch_bias_gradient<T, Shape>(launch, stream);
    }
    if (status != cudaSuccess || !has_queries(p) || launch.params.dq.data == nullptr) return status;
    if constexpr (kConfig.splits_dv_dk()) return backward::launch_dq_kernel<T, Shape>(launch, stream);
    else if (launch.gradients.writes_dq) return status;
    else return backward::launch_dq_convert<T, typename backward::KernelsBeside<Shape>::Sums>(launch, stream);
}

void run(const BackwardCall& call) {
    const Problem& p = call.plan.problem;
    const CurrentDevice current(call.plan.device);
    Arena arena(call.workspace);
    const Memory memory = lay_out(arena, p);
    const Launch launch = make_launch(call, memory);
    if (!p.ragged || p.dtype == DType::fp16) {
        check(cudaMemsetAsync(memory.workspace.state, 0, memory.cleared, stream_of(call)), "cudaMemsetAsync");
    }
    const cudaError_t status = backward::Shapes::call(*backward::shape_of(p), [&](auto shape) {
        using Shape = decltype(shape);
        return p.dtype == DType::fp16 ? launch_all<__half, Shape>(p, launch, stream_of(call))
                                      : launch_all<__nv_bfloat16, Shape>(p, launch, stream_of(call));
    });
    check(status, "cuda.fa3.backward");
}

/// Refuses rows that TMA cannot load; a Problem has no addresses and strides.
std::optional<TensorRefusal> refuse_tensors(const Problem& problem, const BackwardArgs& args) {
    const TensorShapes shapes(problem);
    const struct {
        const char* name;
        const TensorView* view;
        const RowsShape* shape;
    } inputs[] = {
        {"q", &args.q, &shapes.q}, {"k", &args.k, &shapes.k}, {"v", &args.v, &shapes.v}, {"do", &args.d_o, &shapes.o}};
    for (const auto& [name, view, shape] : inputs) {
        if (view->size() == 0) continue;
        if (auto reason = refuse_tma(rows_of(*view), *shape)) return TensorRefusal{name, *reason};
    }
    return std::nullopt;
}

}  // namespace

Kernel backward_kernel() {
    return {
        .info = {.name = "cuda.fa3.backward",
                 .backend = Backend::cuda,
                 .schedule = Schedule::fa3,
                 .pass = Pass::backward,
                 .dtypes = {DType::bf16, DType::fp16},
                 .summary = "K/V blocks outer, dQ added up in a fixed order (at most 4 % dearer) or by its own "
                            "kernel; memory O(len)",
                 .limits = "sm_90; bf16 and fp16; head_dim in multiples of 8, up to 128 with softcap, ALiBi, a bias, "
                           "dropout or a scale of 0 and less; 16-byte aligned rows"},
        .refuse = refuse,
        .default_tile = [](const Problem& p, const Device&) { return backward::tile_of(p); },
        .workspace_bytes = workspace_bytes,
        .target = target,
        .forward = nullptr,
        .backward = run,
        .refuse_backward_tensors = refuse_tensors,
        .uses_o_residual = uses_o_residual,
        .shapes = backward::Shapes::names(),
        .shape_of = [](const Problem& p) { return *backward::shape_of(p); }};
}

}  // namespace tessera::cuda::fa3
