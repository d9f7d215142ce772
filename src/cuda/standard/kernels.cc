// SPDX-License-Identifier: Apache-2.0
#include "cuda/standard/kernels.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fmt/format.h>

#include <algorithm>

#include "core/arena.hpp"
#include "cuda/device.hpp"
#include "cuda/shared/arguments.hpp"
#include "cuda/standard/launch.hpp"
#include "cuda/standard/shapes.hpp"

namespace tessera::cuda::standard {
namespace {

constexpr int kLeastCapability = 80;  // bf16 products and cp.async

/// The N x N matrix, and what a row of O is multiplied by at the end.
struct Workspace {
    std::int64_t rows;   // of a head
    std::int64_t pitch;  // whole tiles of keys
    float* scores;       // [heads_q, rows, pitch]
    float* factors;      // [heads_q, rows]

    Workspace(Arena& arena, const Problem& p)
        : rows(p.rows_q()),
          pitch((p.len_kv + kBlockKv - 1) / kBlockKv * kBlockKv),
          scores(arena.take<float>(p.heads_q, rows, pitch)),
          factors(arena.take<float>(p.heads_q, rows)) {}
};

std::size_t workspace_bytes(const Problem& problem) {
    Arena arena;
    Workspace(arena, problem);
    return arena.used();
}

/// Of the larger one of the two products.
int shared_bytes(const Problem& p) {
    return std::max(Shapes::kConfigs[shape_of(p.head_dim)].score_shared_bytes(),
                    Shapes::kConfigs[shape_of(p.head_dim_v)].value_shared_bytes());
}

std::optional<std::string> refuse(const Problem& problem, const std::optional<Tile>& tile, const Device& device) {
    if (auto reason = refuse_below(device, kLeastCapability)) return reason;
    if (auto reason = refuse_sizes(problem)) return reason;
    const std::int64_t rows = saturating_product(saturating_product(problem.batch, problem.heads_q), problem.len_q);
    const std::int64_t longest = std::max({problem.len_q, problem.len_kv, problem.total_q, problem.total_kv});
    if (longest >= kMaxIndex || rows >= kMaxIndex) {
        return fmt::format("counts rows up to {}, got {} and {}", kMaxIndex, longest, rows);
    }
    if (const int has = properties(device).shared_bytes; shared_bytes(problem) > has) {
        return fmt::format("needs {} bytes of shared memory, the device has {}", shared_bytes(problem), has);
    }
    const auto memory = static_cast<double>(properties(device).memory_bytes);
    const auto needed = static_cast<double>(workspace_bytes(problem));
    if (needed > memory) {
        return fmt::format("needs {:.1f} GiB for the scores of all pairs, the device has {:.1f} GiB",
                           needed / (1 << 30), memory / (1 << 30));
    }
    if (tile && *tile != tile_of(problem)) {
        return fmt::format("is compiled for tiles of {} x {}", kBlockQ, kBlockKv);
    }
    return std::nullopt;
}

Launch make_launch(const Problem& p, const ForwardParams& params, const Workspace& workspace) {
    return {.params = params,
            .scores = workspace.scores,
            .factors = workspace.factors,
            .rows = workspace.rows,
            .pitch = workspace.pitch,
            .q_blocks = static_cast<int>((p.len_q + kBlockQ - 1) / kBlockQ),
            .vector_q = takes_vectors(params.q, params.head_dim),
            .vector_k = takes_vectors(params.k, params.head_dim),
            .vector_v = takes_vectors(params.v, params.head_dim_v),
            .vector_o = takes_vectors(params.o, params.head_dim_v)};
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
    const Launch launch = make_launch(p, params, Workspace(arena, p));
    const auto start_of = p.dtype == DType::bf16 ? start<__nv_bfloat16> : start<__half>;
    start_of(launch, stream_of(call));
}

/// "HeadDim64/HeadDim128": S by the first, O by the second.
std::vector<std::string> shape_names() {
    std::vector<std::string> names;
    for (const std::string& of_scores : Shapes::names()) {
        for (const std::string& of_values : Shapes::names()) names.push_back(of_scores + "/" + of_values);
    }
    return names;
}

std::size_t place_of(const Problem& p) {
    return shape_of(p.head_dim) * Shapes::kConfigs.size() + shape_of(p.head_dim_v);
}

}  // namespace

std::vector<Kernel> kernels() {
    return {{.info = {.name = "cuda.standard.forward",
                      .backend = Backend::cuda,
                      .schedule = Schedule::standard,
                      .pass = Pass::forward,
                      .dtypes = {DType::bf16, DType::fp16},
                      .summary = "S and P of all pairs in memory, three kernels; memory O(len^2)",
                      .limits = "sm_80 or later; scores of all pairs that fit the device"},
             .refuse = refuse,
             .default_tile = tile_of,
             .workspace_bytes = [](const Plan& plan) { return workspace_bytes(plan.problem); },
             .target = target,
             .forward = forward,
             .backward = nullptr,
             .shapes = shape_names(),
             .shape_of = place_of}};
}

}  // namespace tessera::cuda::standard
