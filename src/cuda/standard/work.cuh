// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/host/block_range.hpp"
#include "cuda/host/query_tiles.hpp"
#include "cuda/standard/launch.hpp"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::standard {

/// One head of one sequence, and where its rows lie in the workspace.
struct Head {
    std::int64_t batch = 0;
    int head = 0;
    Sequence sequence;
    Band band;
    float* scores = nullptr;   // [len_q, pitch]
    float* factors = nullptr;  // [len_q]

    __device__ Head(const Launch& launch, std::int64_t pair)
        : batch(pair / launch.params.heads_q),
          head(static_cast<int>(pair % launch.params.heads_q)),
          sequence(sequence_of(launch.params, batch)),
          band(launch.params.mask.bind(sequence.len_q, sequence.len_kv)) {
        const bool ragged = launch.params.cu_seqlens_q != nullptr;
        const std::int64_t first = ragged ? sequence.first_q : batch * launch.params.len_q;
        const std::int64_t row = head * launch.rows + first;
        scores = launch.scores + row * launch.pitch;
        factors = launch.factors + row;
    }

    /// The key tiles for which S and P of a query tile are written.
    __device__ __forceinline__ BlockRange tiles(int q_begin) const {
        return {band, q_begin, min(q_begin + kBlockQ, sequence.len_q), kBlockKv};
    }
};

/// CTAs of one head in kernels with a CTA for each query. Ragged sequences are numbered one after the other as tiles
/// of one query (cuda/host/query_tiles.hpp), so the number grows with their rows, not with the bound on their lengths.
__host__ __device__ inline std::int64_t ctas_of_head(const ForwardParams& p) {
    return p.cu_seqlens_q != nullptr ? p.total_q + p.batch : p.len_q;
}
inline std::int64_t query_blocks(const ForwardParams& p) {
    return (p.cu_seqlens_q != nullptr ? p.heads_q : p.batch * p.heads_q) * ctas_of_head(p);
}

/// The query of this CTA and its (batch, head). A query past the end of its sequence is no work.
struct QueryWork {
    std::int64_t pair;
    int query;

    __device__ __forceinline__ explicit QueryWork(const ForwardParams& p) {
        const auto ctas = static_cast<unsigned>(ctas_of_head(p));
        const int number = static_cast<int>(blockIdx.x % ctas);
        const bool ragged = p.cu_seqlens_q != nullptr;
        const QueryTile tile = ragged ? ragged_tile(p, number, 1) : QueryTile{0, number};
        pair = std::int64_t{tile.batch} * p.heads_q + blockIdx.x / ctas;
        query = tile.block;
    }
};

}  // namespace tessera::cuda::standard
