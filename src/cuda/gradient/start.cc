// SPDX-License-Identifier: Apache-2.0
#include "cuda/gradient/start.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fmt/format.h>

#include "cuda/device.hpp"
#include "cuda/gradient/host/dispatch.hpp"
#include "cuda/shared/arguments.hpp"

namespace tessera::cuda::gradient {
namespace {

template <class T>
cudaError_t delta(const Problem& p, const Launch& launch, bool general, cudaStream_t stream) {
    return RowShapes::call(shape_index<RowShapes>(p, general),
                           [&](auto shape) { return start_delta<T, decltype(shape)>(launch, stream); });
}

cudaError_t delta_fp32(const Problem& p, const Launch& launch, cudaStream_t stream) {
    return RowShapesFp32::call(shape_index_by_dim<RowShapesFp32>(p),
                               [&](auto shape) { return start_delta_fp32<decltype(shape)>(launch, stream); });
}

template <class T>
cudaError_t bias(const Problem& p, const Launch& launch, cudaStream_t stream) {
    return BiasShapes::call(shape_index_by_dim<BiasShapes>(p),
                            [&](auto shape) { return start_bias<T, decltype(shape)>(launch, stream); });
}

cudaError_t bias_fp32(const Problem& p, const Launch& launch, cudaStream_t stream) {
    return RowShapesFp32::call(shape_index_by_dim<RowShapesFp32>(p),
                               [&](auto shape) { return start_bias_fp32<decltype(shape)>(launch, stream); });
}

template <int kHeadDim>
cudaError_t dq(const Problem& p, const Launch& launch, cudaStream_t stream) {
    if (p.dtype == DType::fp32) return start_dq_fp32<kHeadDim>(launch, stream);
    if (p.dtype == DType::bf16) return start_dq<__nv_bfloat16, kHeadDim>(launch, stream);
    return start_dq<__half, kHeadDim>(launch, stream);
}

Launch make_launch(const BackwardCall& call, const Extents& extents) {
    const Problem& p = call.plan.problem;
    const Counts counts(p, extents.block_kv);
    Arena arena(call.workspace);
    const Workspace workspace(arena, p, counts, extents.head_dim, extents.splits_heads, extents.takes_blocks);
    Launch launch;
    launch.params = backward_params(call);
    const BackwardParams& params = launch.params;
    const ForwardParams& inputs = params.forward;
    launch.rows = workspace.rows;
    launch.dq = workspace.dq;
    launch.counters = workspace.counters;
    launch.dq_semaphores = workspace.dq_semaphores;
    launch.ds_scales = workspace.ds_scales;
    launch.do_squares = workspace.do_squares;
    launch.v_squares = workspace.v_squares;
    launch.tiles_of_head = counts.tiles_of_head;
    launch.q_tiles = counts.q_tiles;
    launch.key_blocks = counts.key_blocks;
    launch.partial = workspace.partial;
    launch.query_parts = workspace.query_parts;
    launch.max_terms = QueryParts::max_terms(p.dtype);
    launch.segments = most_segments(p.mask, inputs.group, launch.partial.max_splits * counts.key_blocks);
    launch.list = workspace.list;
    launch.list_items = static_cast<int>(workspace.list_items);
    launch.next_cta = launch.list != nullptr ? workspace.next_numbers : &workspace.counters->next_cta;
    launch.set_dividers();
    if (uses_o_residual(p)) launch.o_residual = rows_of(call.args.o_residual);
    launch.delta_from_output = p.dtype == DType::fp32 && p.dropout.probability == 0;
    launch.vector_residual = takes_vectors(inputs.o, inputs.head_dim_v) &&
                             takes_vectors(params.d_o, inputs.head_dim_v) &&
                             (p.dtype == DType::fp32 || takes_byte_vectors(launch.o_residual, inputs.head_dim_v));
    launch.vector_q = takes_vectors(inputs.q, inputs.head_dim);
    launch.vector_k = takes_vectors(inputs.k, inputs.head_dim);
    launch.vector_v = takes_vectors(inputs.v, inputs.head_dim_v);
    launch.vector_do = takes_vectors(params.d_o, inputs.head_dim_v);
    launch.vector_dq = takes_vectors(params.dq, inputs.head_dim);
    launch.vector_dk = takes_vectors(params.dk, inputs.head_dim);
    launch.vector_dv = takes_vectors(params.dv, inputs.head_dim_v);
    return launch;
}

/// True if there is a key block.
bool has_keys(const Problem& p) { return p.len_kv > 0 && p.batch > 0 && p.heads_kv > 0; }

/// Starts the kernels that run before the main kernel.
void start_before(const Problem& p, const Launch& launch, const Extents& extents, cudaStream_t stream) {
    const std::int64_t heads = launch.params.forward.batch * launch.params.forward.heads_q;
    const auto* const end = launch.v_squares + launch.params.forward.batch * launch.params.forward.heads_kv;
    const auto bytes =
        static_cast<std::size_t>(reinterpret_cast<const char*>(end) - reinterpret_cast<char*>(launch.counters));
    check(cudaMemsetAsync(launch.counters, 0, bytes, stream), "counters of the backward");
    if (launch.list != nullptr) check(start_list({launch, extents.block_kv}, stream), "the list of key blocks");
    if (launch.q_tiles == 0 || heads == 0) return;
    if (launch.o_residual.data != nullptr) {
        const bool bf16 = p.dtype == DType::bf16;
        const auto start = bf16 ? start_delta_from_output<__nv_bfloat16> : start_delta_from_output<__half>;
        check(start(launch, stream), "delta");
    }
    if (launch.delta_from_output) check(start_delta_from_output_fp32(launch, stream), "delta");
    if (p.dtype == DType::fp32) check(delta_fp32(p, launch, stream), "delta");
    else if (p.dtype == DType::bf16) check(delta<__nv_bfloat16>(p, launch, extents.general, stream), "delta");
    else check(delta<__half>(p, launch, extents.general, stream), "delta");
    if (p.dtype == DType::fp16) check(start_fp16_scale<__half>(launch, stream), "fp16 scales of dS");
}

void start_dkdv_reduce(const Problem& p, const Launch& launch, cudaStream_t stream) {
    if (launch.partial.data == nullptr) return;
    const DkdvReduceLaunch sums{
        .params = launch.params,
        .partial = launch.partial,
        .splits_heads = launch.partial.max_splits > 1,
        .max_terms = launch.max_terms,
        .tiles = static_cast<int>(p.ragged ? p.total_kv / DkdvReduceLaunch::kKeys + p.batch
                                           : (p.len_kv + DkdvReduceLaunch::kKeys - 1) / DkdvReduceLaunch::kKeys),
        .vector_dk = launch.vector_dk,
        .vector_dv = launch.vector_dv};
    const auto start =
        p.dtype == DType::bf16 ? gradient::start_dkdv_reduce<__nv_bfloat16> : gradient::start_dkdv_reduce<__half>;
    check(start(sums, stream), "dK and dV of split heads or parts of queries");
}

/// Starts the kernels that run after the main kernel, except dkdv_reduce_kernel.
void start_after(const Problem& p, const Launch& launch, const Extents& extents, cudaStream_t stream) {
    if (launch.q_tiles > 0 && p.batch > 0 && p.heads_q > 0) {
        const int dim = extents.head_dim;
        const auto start = dim == 64 ? dq<64> : dim == 128 ? dq<128> : dq<256>;
        check(start(p, launch, stream), "dQ");
    }
    if (launch.params.dsinks.data != nullptr) check(start_sink_gradient(launch, stream), "dsinks");
    if (!p.bias_gradient) return;
    if (p.dtype == DType::fp32) check(bias_fp32(p, launch, stream), "dbias");
    else if (p.dtype == DType::bf16) check(bias<__nv_bfloat16>(p, launch, stream), "dbias");
    else check(bias<__half>(p, launch, stream), "dbias");
}

}  // namespace

bool uses_o_residual(const Problem& p) { return p.dtype != DType::fp32 && p.dropout.probability == 0; }

std::size_t workspace_bytes(const Problem& problem, const Extents& extents) {
    Arena arena;
    Workspace(arena, problem, Counts(problem, extents.block_kv), extents.head_dim, extents.splits_heads,
              extents.takes_blocks);
    return arena.used();
}

void run(const BackwardCall& call, const Extents& extents,
         cudaError_t (*start)(const Problem&, const Launch&, cudaStream_t), const char* name) {
    const Problem& p = call.plan.problem;
    Launch launch = make_launch(call, extents);
    const CurrentDevice current(call.plan.device);
    const cudaStream_t stream = stream_of(call);
    start_before(p, launch, extents, stream);
    if (has_keys(p)) {
        for (; launch.part < launch.query_parts; ++launch.part) {
            if (launch.part > 0 && launch.list != nullptr) ++launch.next_cta;
            else if (launch.part > 0) {
                check(cudaMemsetAsync(launch.next_cta, 0, sizeof(int), stream), "counters of the backward");
            }
            check(start(p, launch, stream), name);
        }
        start_dkdv_reduce(p, launch, stream);
    }
    start_after(p, launch, extents, stream);
}

}  // namespace tessera::cuda::gradient
