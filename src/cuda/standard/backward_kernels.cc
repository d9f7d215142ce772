// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fmt/format.h>

#include <algorithm>

#include "core/arena.hpp"
#include "cuda/device.hpp"
#include "cuda/shared/arguments.hpp"
#include "cuda/standard/host/dispatch.hpp"
#include "cuda/standard/kernels.hpp"
#include "cuda/standard/launch.hpp"
#include "cuda/standard/matrix.hpp"

namespace tessera::cuda::standard {
namespace {

/// S and dP of all pairs, which P and dS overwrite.
struct Workspace {
    Matrix matrix;
    float* dp;         // [heads_q, rows, pitch]
    float* exact;      // [heads_q, rows, pitch] dS in fp32, in fp16; else null
    float* unrounded;  // [heads_q, rows, pitch] for dbias; null when that is not wanted
    float* delta;      // [heads_q, rows] for dsinks; null without sinks

    Workspace(Arena& arena, const Problem& p)
        : matrix(arena, p),
          dp(arena.take<float>(p.heads_q, matrix.rows, matrix.pitch)),
          exact(p.dtype == DType::fp16 ? arena.take<float>(p.heads_q, matrix.rows, matrix.pitch) : nullptr),
          unrounded(p.bias_gradient ? arena.take<float>(p.heads_q, matrix.rows, matrix.pitch) : nullptr),
          delta(p.sinks ? arena.take<float>(p.heads_q, matrix.rows) : nullptr) {}
};

std::size_t workspace_bytes(const Problem& problem) {
    Arena arena;
    Workspace(arena, problem);
    return arena.used();
}

std::optional<std::string> refuse(const Problem& problem, const std::optional<Tile>& tile, const Device& device) {
    return refusal(Schedule::standard, Pass::backward, problem, tile, limits(device));
}

/// The GEMM of `q` and `k`, which have `dim` columns, into a matrix.
Launch gemm_launch(const Launch& forward, const Rows& q, const Rows& k, int dim, float* to) {
    Launch launch = forward;
    launch.params.q = q;
    launch.params.k = k;
    launch.params.head_dim = dim;
    launch.scores = to;
    launch.vector_q = takes_vectors(q, dim);
    launch.vector_k = takes_vectors(k, dim);
    return launch;
}

/// The launch of dQ = dS K, which is O = P V with other tensors.
Launch dq_launch(const Launch& forward, const BackwardParams& params, float* ds) {
    Launch launch = forward;
    launch.params.v = forward.params.k;
    launch.params.head_dim_v = forward.params.head_dim;
    launch.params.o = params.dq;
    launch.scores = ds;
    launch.vector_v = forward.vector_k;
    launch.vector_o = takes_vectors(params.dq, forward.params.head_dim);
    return launch;
}

KeyGemmLaunch key_launch(const Launch& forward, float* matrix, const Rows& rows, const Rows& to, int dim, float factor,
                         const float* exact) {
    KeyGemmLaunch launch{.forward = forward,
                         .rows = rows,
                         .to = to,
                         .dim = dim,
                         .key_blocks = (forward.params.len_kv + kKeysOfBlock - 1) / kKeysOfBlock,
                         .factor = factor,
                         .exact = exact,
                         .vector_rows = takes_vectors(rows, dim),
                         .vector_to = takes_vectors(to, dim)};
    launch.forward.scores = matrix;
    return launch;
}

template <class T>
cudaError_t key_gemm(const KeyGemmLaunch& launch, cudaStream_t stream) {
    return Shapes::call(shape_of(launch.dim),
                        [&](auto shape) { return start_key_gemm<T, decltype(shape)>(launch, stream); });
}

template <class T>
cudaError_t gemm(const Launch& launch, cudaStream_t stream) {
    return Shapes::call(shape_of(launch.params.head_dim),
                        [&](auto shape) { return start_gemm<T, decltype(shape)>(launch, stream); });
}

/// Starts the kernels whose CTAs own queries: P and dS of all pairs, and dQ.
template <class T>
void start_of_queries(const Launch& forward, const BackwardParams& params, const Workspace& workspace,
                      cudaStream_t stream) {
    const ForwardParams& p = params.forward;
    check(gemm<T>(gemm_launch(forward, p.q, p.k, p.head_dim, forward.scores), stream), "S of the backward");
    check(gemm<T>(gemm_launch(forward, params.d_o, p.v, p.head_dim_v, workspace.dp), stream), "dP");
    const RowGradientLaunch of_rows{.forward = forward,
                                    .dp = workspace.dp,
                                    .exact = workspace.exact,
                                    .unrounded = workspace.unrounded,
                                    .delta = params.dsinks.data ? workspace.delta : nullptr,
                                    .dlse = params.dlse};
    check(start_row_gradients<T>(of_rows, stream), "P and dS");
    if (params.dq.data != nullptr) {
        const Launch of_dq = dq_launch(forward, params, workspace.dp);
        check(
            Shapes::call(shape_of(p.head_dim), [&](auto shape) { return start_dq<T, decltype(shape)>(of_dq, stream); }),
            "dQ");
    }
}

template <class T>
void start(const Problem& problem, const BackwardParams& params, const Workspace& workspace, cudaStream_t stream) {
    const ForwardParams& p = params.forward;
    const Launch forward = make_launch(problem, p, workspace.matrix);
    if (problem.rows_q() > 0 && p.heads_q > 0 && p.len_q > 0) start_of_queries<T>(forward, params, workspace, stream);
    if (p.batch > 0 && p.heads_kv > 0 && p.len_kv > 0) {
        if (params.dv.data != nullptr) {
            check(key_gemm<T>(
                      key_launch(forward, forward.scores, params.d_o, params.dv, p.head_dim_v, p.keep_scale, nullptr),
                      stream),
                  "dV");
        }
        if (params.dk.data != nullptr) {
            check(key_gemm<T>(key_launch(forward, workspace.dp, p.q, params.dk, p.head_dim, p.scale, workspace.exact),
                              stream),
                  "dK");
        }
    }
    if (params.dsinks.data != nullptr)
        check(start_sink_gradient({params, workspace.delta, forward.rows}, stream), "dsinks");
    if (!problem.bias_gradient) return;
    BiasGradientLaunch of_bias{.forward = forward, .dbias = params.dbias};
    of_bias.forward.scores = workspace.unrounded;
    check(start_bias_gradient<T>(of_bias, stream), "dbias");
}

void backward(const BackwardCall& call) {
    const Problem& p = call.plan.problem;
    const BackwardParams params = backward_params(call);
    const CurrentDevice current(call.plan.device);
    Arena arena(call.workspace);
    const Workspace workspace(arena, p);
    const auto start_of = p.dtype == DType::bf16 ? start<__nv_bfloat16> : start<__half>;
    start_of(p, params, workspace, stream_of(call));
}

}  // namespace

Kernel backward_kernel() {
    return {.info = {.name = "cuda.standard.backward",
                     .backend = Backend::cuda,
                     .schedule = Schedule::standard,
                     .pass = Pass::backward,
                     .dtypes = {DType::bf16, DType::fp16},
                     .summary = "P and dS of all pairs in memory, a kernel for each product; memory O(len^2)",
                     .limits = "sm_80 or later; S and dP of all pairs fit the device"},
            .refuse = refuse,
            .default_tile = [](const Problem& p, const Device&) { return tile_of(p); },
            .workspace_bytes = [](const Plan& plan) { return workspace_bytes(plan.problem); },
            .target = target,
            .forward = nullptr,
            .backward = backward,
            .shapes = shape_names(),
            .shape_of = shape_index};
}

}  // namespace tessera::cuda::standard
