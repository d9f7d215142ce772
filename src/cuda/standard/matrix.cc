// SPDX-License-Identifier: Apache-2.0
#include "cuda/standard/matrix.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/device.hpp"
#include "cuda/shared/arguments.hpp"
#include "cuda/standard/shapes.hpp"

namespace tessera::cuda::standard {
namespace {

constexpr int kLeastCapability = 80;  // bf16 products and cp.async

}  // namespace

std::optional<std::string> refuse_matrices(const Problem& problem, const std::optional<Tile>& tile,
                                           const Device& device, int shared_bytes, std::size_t workspace_bytes) {
    if (auto reason = refuse_below(device, kLeastCapability)) return reason;
    if (auto reason = refuse_sizes(problem)) return reason;
    const std::int64_t rows = saturating_product(saturating_product(problem.batch, problem.heads_q), problem.len_q);
    const std::int64_t longest = std::max({problem.len_q, problem.len_kv, problem.total_q, problem.total_kv});
    if (longest >= kMaxIndex || rows >= kMaxIndex) {
        return fmt::format("counts rows up to {}, got {} and {}", kMaxIndex, longest, rows);
    }
    if (const int has = properties(device).shared_bytes; shared_bytes > has) {
        return fmt::format("needs {} bytes of shared memory, the device has {}", shared_bytes, has);
    }
    const auto memory = static_cast<double>(properties(device).memory_bytes);
    const auto needed = static_cast<double>(workspace_bytes);
    if (needed > memory) {
        return fmt::format("needs {:.1f} GiB for the scores of all pairs, the device has {:.1f} GiB",
                           needed / (1 << 30), memory / (1 << 30));
    }
    if (tile && *tile != tile_of(problem)) {
        return fmt::format("is compiled for tiles of {} x {}", kBlockQ, kBlockKv);
    }
    return std::nullopt;
}

Launch make_launch(const Problem& p, const ForwardParams& params, const Matrix& matrix) {
    return {.params = params,
            .scores = matrix.scores,
            .factors = matrix.factors,
            .rows = matrix.rows,
            .pitch = matrix.pitch,
            .q_blocks = static_cast<int>((p.len_q + kBlockQ - 1) / kBlockQ),
            .vector_q = takes_vectors(params.q, params.head_dim),
            .vector_k = takes_vectors(params.k, params.head_dim),
            .vector_v = takes_vectors(params.v, params.head_dim_v),
            .vector_o = takes_vectors(params.o, params.head_dim_v)};
}

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

}  // namespace tessera::cuda::standard
