// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/fa1/launch.hpp"
#include "cuda/tile/sequence.cuh"
#include "tessera/mask.hpp"

namespace tessera::cuda::fa1 {

/// The work of a CTA: a (batch, head), or a part of its query tiles.
struct Work {
    int batch;
    int head;
    int part;
    Sequence sequence;
    Band band;
    std::int64_t first_tile;  // the sequence's first tile in the workspace

    __device__ Work(const Launch& launch, unsigned index, int block_q)
        : batch(static_cast<int>(index / launch.parts / launch.params.heads_q)),
          head(static_cast<int>(index / launch.parts % launch.params.heads_q)),
          part(static_cast<int>(index % launch.parts)),
          sequence(sequence_of(launch.params, batch)),
          band(launch.params.mask.bind(sequence.len_q, sequence.len_kv)) {
        const bool ragged = launch.params.cu_seqlens_q != nullptr;
        const std::int64_t before =  // one more tile per sequence, since each may begin inside a tile
            ragged ? sequence.first_q / block_q + batch
                   : std::int64_t{batch} * ((launch.params.len_q + block_q - 1) / block_q);
        first_tile = head * launch.tiles + before;
    }
};

/// Query tiles of one group of warps, every stride-th of a range.
struct QueryTiles {
    int begin = 0;
    int end = 0;

    /// The tiles that hold one of queries [q_begin, q_end).
    __device__ QueryTiles(int q_begin, int q_end, int block_q, int own, int stride) {
        if (q_begin >= q_end) return;
        begin = q_begin / block_q;
        end = (q_end + block_q - 1) / block_q;
        begin += (own - begin % stride + stride) % stride;
    }
};

}  // namespace tessera::cuda::fa1
