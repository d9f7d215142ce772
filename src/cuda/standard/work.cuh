// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/standard/launch.hpp"
#include "cuda/tile/key_tiles.cuh"
#include "cuda/tile/member.cuh"

namespace tessera::cuda::standard {

/// One head of one batch member, and where its rows lie in the workspace.
struct Head {
    std::int64_t batch = 0;
    int head = 0;
    Member member;
    Band band;
    float* scores = nullptr;   // [len_q, pitch]
    float* factors = nullptr;  // [len_q]

    __device__ Head(const Launch& launch, std::int64_t pair)
        : batch(pair / launch.params.heads_q),
          head(static_cast<int>(pair % launch.params.heads_q)),
          member(member_of(launch.params, batch)),
          band(launch.params.mask.bind(member.len_q, member.len_kv)) {
        const bool ragged = launch.params.cu_seqlens_q != nullptr;
        const std::int64_t first = ragged ? member.first_q : batch * launch.params.len_q;
        const std::int64_t row = head * launch.rows + first;
        scores = launch.scores + row * launch.pitch;
        factors = launch.factors + row;
    }

    /// The keys for which S and P of a tile of queries are written: whole tiles.
    __device__ __forceinline__ KeyTiles tiles(int q_begin) const {
        return {band, q_begin, min(q_begin + kBlockQ, member.len_q), kBlockKv};
    }
};

}  // namespace tessera::cuda::standard
