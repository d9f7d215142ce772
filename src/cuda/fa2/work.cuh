// SPDX-License-Identifier: Apache-2.0
//
// The work of a CTA: a query tile of one head, and the key tiles that it sees.
#pragma once

#include "cuda/fa2/launch.hpp"
#include "cuda/host/block_range.hpp"
#include "cuda/tile/score.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::fa2 {

/// The steps [begin, end) of Mainloop::run_full(), numbered from 0 at tiles.begin. Their tiles are full: all pairs are
/// visible. The tile after each, if there is one, has no missing rows, and can be read 16 bytes at a time.
struct FullRun {
    int begin = 0;
    int end = 0;

    FullRun() = default;
    __device__ FullRun(const BlockRange& tiles, std::int64_t len_kv, int block_kv, bool vector) {
        const int count = tiles.end - tiles.begin;
        const int whole = static_cast<int>(len_kv / block_kv) - tiles.begin;
        begin = max(tiles.full_begin - tiles.begin, 0);
        end = min(tiles.full_end - tiles.begin, whole < count ? whole - 1 : count);
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
    Band32 band;
    BlockRange tiles;
    FullRun full_run;
    bool sanitizes = false;  // the second run: Inf and NaN of V are replaced by 0 in tiles that are not full

    /// `index` is the CTA's, under 2^31. Query tiles start from the last, since those are the longest under a causal
    /// mask. A tile of each of `heads_together` heads starts before their next one; heads of one kv head are
    /// neighbours.
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
        const auto number = static_cast<int>(q_blocks - 1 - in_group / heads);
        const QueryTile tile =
            ragged ? ragged_tile(p, number, block_q) : QueryTile{static_cast<int>(pair / heads_q), number};
        batch = tile.batch;
        head = static_cast<int>(pair % heads_q);
        q_begin = tile.block * block_q;
        sequence = sequence_of(p, batch);
        k = p.k.data + head_offset(p.k, batch, sequence.first_kv, head / p.group, element_bytes);
        v = p.v.data + head_offset(p.v, batch, sequence.first_kv, head / p.group, element_bytes);
        scores = ScoreInputs(p, batch, head);
        const Band bound = p.mask.bind(sequence.len_q, sequence.len_kv);
        band = Band32(bound);
        if (q_begin >= sequence.len_q) return;
        tiles = BlockRange(bound, q_begin, min(q_begin + block_q, sequence.len_q), block_kv);
        full_run = FullRun(tiles, sequence.len_kv, block_kv, launch.vector_k && launch.vector_v);
    }
};

}  // namespace tessera::cuda::fa2
