// SPDX-License-Identifier: Apache-2.0
//
// What one thread block works on: a tile of queries of one head, and the tiles of keys that it sees.
#pragma once

#include "cuda/fa2/launch.hpp"
#include "cuda/tile/key_tiles.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::fa2 {

/// Steps of the work, numbered from 0 as the tiles of keys are from tiles.first: in [begin, end) the tile is full, and
/// the next one, if there is one, is all there and can be read 16 bytes at a time.
struct Run {
    int begin = 0;
    int end = 0;

    Run() = default;
    __device__ Run(const KeyTiles& tiles, std::int64_t len_kv, int block_kv, bool vector) {
        const int count = tiles.end - tiles.first;
        const int whole = static_cast<int>(len_kv / block_kv) - tiles.first;
        begin = max(tiles.full_begin - tiles.first, 0);
        end = min(tiles.full_end - tiles.first, whole < count ? whole - 1 : count);
        if (!vector || end < begin) end = begin;
    }
};

struct Work {
    Sequence sequence;
    std::int64_t batch = 0;
    int head = 0;
    int q_begin = 0;
    const char* k = nullptr;  // row 0 of the head
    const char* v = nullptr;
    ScoreInputs scores;
    Visible visible;
    KeyTiles tiles;
    Run run;
    bool guarded = false;  // Inf and NaN of V are taken out of tiles that not every query sees whole

    /// `index`: of the thread block; there are less than 2^31.
    /// Tiles of queries go from last to first: the longest of a causal mask come first. Inside a group of heads, all
    /// heads come before the next tile; heads of one kv head are neighbours.
    __device__ Work(const Launch& launch, unsigned index, int block_q, int block_kv, int element_bytes) {
        const ForwardParams& p = launch.params;
        const auto heads_q = static_cast<unsigned>(p.heads_q);
        const bool ragged = p.cu_seqlens_q != nullptr;
        const unsigned pairs = (ragged ? 1 : static_cast<unsigned>(p.batch)) * heads_q;
        const auto together = static_cast<unsigned>(launch.heads_together);
        const auto q_blocks = static_cast<unsigned>(launch.q_blocks);
        const unsigned first_pair = index / (together * q_blocks) * together;
        const unsigned in_group = index - first_pair * q_blocks;
        const unsigned heads = min(pairs - first_pair, together);
        const unsigned pair = first_pair + in_group % heads;
        const auto place = static_cast<int>(q_blocks - 1 - in_group / heads);
        const QueryTile tile =
            ragged ? ragged_tile(p, place, block_q) : QueryTile{static_cast<int>(pair / heads_q), place};
        batch = tile.batch;
        head = static_cast<int>(pair % heads_q);
        q_begin = tile.block * block_q;
        sequence = sequence_of(p, batch);
        k = p.k.data + head_offset(p.k, batch, sequence.first_kv, head / p.group, element_bytes);
        v = p.v.data + head_offset(p.v, batch, sequence.first_kv, head / p.group, element_bytes);
        scores = ScoreInputs(p, batch, head);
        const Band band = p.mask.bind(sequence.len_q, sequence.len_kv);
        visible = Visible(band);
        if (q_begin >= sequence.len_q) return;
        tiles = KeyTiles(band, q_begin, min(q_begin + block_q, sequence.len_q), block_kv);
        run = Run(tiles, sequence.len_kv, block_kv, launch.vector_k && launch.vector_v);
    }
};

}  // namespace tessera::cuda::fa2
