// SPDX-License-Identifier: Apache-2.0
//
// The N x N matrix of a call, and host functions that both passes share.
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

/// S of all pairs, and a factor for each row of a GEMM with it.
struct Matrix {
    std::int64_t rows;   // rows of a head
    std::int64_t pitch;  // len_kv rounded up to whole tiles
    float* scores;       // [heads_q, rows, pitch]
    float* factors;      // [heads_q, rows]

    Matrix(Arena& arena, const Problem& p)
        : rows(p.rows_q()),
          pitch((p.len_kv + kBlockKv - 1) / kBlockKv * kBlockKv),
          scores(arena.take<float>(p.heads_q, rows, pitch)),
          factors(arena.take<float>(p.heads_q, rows)) {}
};

Launch make_launch(const Problem& problem, const ForwardParams& params, const Matrix& matrix);

/// Names such as "HeadDim64/HeadDim128": the shape of GEMMs over head_dim, then that over head_dim_v.
std::vector<std::string> shape_names();
std::size_t shape_index(const Problem& problem);

}  // namespace tessera::cuda::standard
