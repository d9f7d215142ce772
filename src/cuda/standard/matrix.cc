// SPDX-License-Identifier: Apache-2.0
#include "cuda/standard/matrix.hpp"

#include "cuda/shared/arguments.hpp"
#include "cuda/standard/host/dispatch.hpp"

namespace tessera::cuda::standard {

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

std::size_t shape_index(const Problem& p) {
    return shape_of(p.head_dim) * Shapes::kConfigs.size() + shape_of(p.head_dim_v);
}

}  // namespace tessera::cuda::standard
