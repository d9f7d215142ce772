// SPDX-License-Identifier: Apache-2.0
//
// The N x N matrix of a call, and what both passes do with it on the host.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "core/arena.hpp"
#include "cuda/standard/launch.hpp"
#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"
#include "tessera/tensor.hpp"

namespace tessera::cuda::standard {

/// S of all pairs, and what a row of a product with it is multiplied by at the end.
struct Matrix {
    std::int64_t rows;   // of a head
    std::int64_t pitch;  // whole tiles of keys
    float* scores;       // [heads_q, rows, pitch]
    float* factors;      // [heads_q, rows]

    Matrix(Arena& arena, const Problem& p)
        : rows(p.rows_q()),
          pitch((p.len_kv + kBlockKv - 1) / kBlockKv * kBlockKv),
          scores(arena.take<float>(p.heads_q, rows, pitch)),
          factors(arena.take<float>(p.heads_q, rows)) {}
};

Launch make_launch(const Problem& problem, const ForwardParams& params, const Matrix& matrix);

/// "HeadDim64/HeadDim128": the products over head_dim by the first, those over head_dim_v by the second.
std::vector<std::string> shape_names();
std::size_t shape_index(const Problem& problem);

}  // namespace tessera::cuda::standard
