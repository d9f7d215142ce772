// SPDX-License-Identifier: Apache-2.0
//
// The main loop of a consumer warpgroup: Algorithm 2 of the FlashAttention-3 paper, for its 64 rows of a tile of
// queries. consumer.cuh has the warpgroup's state, softmax.cuh the online softmax, tile_transition.cuh the transition
// from one tile to the next.
//
// The scores of block n run beside the softmax of block n + 1, since blocks run from the last to the first. Two
// warpgroups ping-pong: while one exponentiates, the tensor cores are the other one's.
//
//     tensor cores    | S(n)   O += P V(n + 1)  | the other one's       | S(n - 1)   O += P V(n)  |
//     this warpgroup  | waits | max S(n)        | P = exp2(S(n) - m)    | waits | max S(n - 1)    |
//     the other one   | P = exp2(S - m)         | S      O += P V       | P = exp2(S - m)         |
//
// Differences from Algorithm 2, whose line numbers stand in the code:
//   - O is rescaled conditionally, in few blocks. Those, a tile's first block and partial blocks are handled between
//     two runs of the loop (mask_and_rescale), so that the loop has no code for them.
//   - No GEMM of the warpgroup's own runs under its exponentials: arithmetic beside wgmma slows both.
//   - The stream of blocks crosses tiles: the last P V of one (line 18) runs beside the first S of the next (line 3).
#pragma once

#include "cuda/fa3/forward/tile_transition.cuh"

namespace tessera::cuda::fa3 {

/// All tiles of this thread block.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::run() {
    TileReader tiles{shared.tiles};
    if (warpgroup == 1) signal_other_warpgroup();  // warpgroup 0 begins
    int slot = next_tile(tiles);
    operands = prefetch_operands();
    bool has_rows = start_first_scores(tiles[slot], prefetch_next_tile(tiles));
    while (true) {
        gemms.wait_scores();  // lines 2, 3
        skip_v();
        if (has_rows) {
            release_k();  // line 4
            return_epilogue_stages();
            const int unseen = run_blocks(tiles[slot]);
            has_rows = tile_transition(tiles, slot, unseen);
        } else {
            if (!kConfig.skips_blocks() || !tiles[slot].exists) break;
            has_rows = skip_tile(tiles, slot);
        }
    }
    if (warpgroup == 0) wait_for_turn();
    output.finish(lane());
}

/// All blocks of a tile that this warpgroup's rows see, except for the P V of the last. The first block's scores are in
/// S. Returns how many blocks are left that the rows don't see.
template <class T, Config kConfig>
__device__ __forceinline__ int Consumer<T, kConfig>::run_blocks(const WorkTile& tile) {
    KeyBlockIterator blocks(kKeepsTile ? own.blocks : own_blocks(tile));
    const bool only = blocks.at_last();
    if (only) release_q();
    Mod score_mod(launch, tile, row_of_tile(tile), lane());
    score_mod.draw(blocks.n * kConfig.block_kv);
    score_mod.transform(gemms.s, blocks.n * kConfig.block_kv);
    rows = {};  // line 1
#pragma unroll
    for (float& element : gemms.o) element = 0;
    bool more = true;
#pragma unroll 1
    while (more) {
        mask_and_rescale(tile, blocks);
        more = run_until_rescale(tile, blocks, score_mod);
    }
    if (kOverlapsTiles && !only) release_q();
    return blocks.range.begin - tile.blocks.begin;
}

/// The rare work of a block: hidden scores become -inf, m and l are brought up to the block's scores, and O is
/// rescaled. Called for a tile's first block, for partial blocks, and for blocks whose scores exceed the rescale
/// threshold (softmax.cuh).
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::mask_and_rescale(const WorkTile& tile,
                                                                       const KeyBlockIterator& blocks) {
    if (blocks.partial) {
        const OwnTile seen = kKeepsTile ? own : OwnTile(tile);
        const int row = row_of_tile(tile);
        const int query[2] = {seen.q_begin + launch.pack.query(row), seen.q_begin + launch.pack.query(row + 8)};
        apply_mask(gemms.s, seen.band, query, blocks.n * kConfig.block_kv, lane());
    }
    float factor[2];
    rows.rescale(gemms.s, launch.scale_log2, launch.unscale, factor);  // lines 5, 12
    if (!kCountUnderGemm) count_near_max(tile, blocks);
    if (!kThresholdUnderGemm) rows.set_rescale_threshold(launch.unscale);
    if (kConfig.skips_blocks() || blocks.n != blocks.range.end - 1) {  // O is 0 before the first block
#pragma unroll
        for (int i = 0; i < kConfig.head_dim_v / 2; ++i) gemms.o[i] *= factor[row_of(i)];  // line 13
    }
}

/// The loop. It starts at a block whose scores are ready for the exponential, and ends at the next one that needs
/// mask_and_rescale() (returns true) or at the tile's last (false).
template <class T, Config kConfig>
__device__ __forceinline__ bool Consumer<T, kConfig>::run_until_rescale(const WorkTile& tile, KeyBlockIterator& blocks,
                                                                        Mod& score_mod) {
#pragma unroll 1
    while (true) {
        // Lines 5, 12: P = exp2(S - m) and its sum, beside the other warpgroup's GEMMs.
        wait_for_turn();
        exponentiate(gemms.s, gemms.p, rows, launch.scale_log2, order, score_mod,
                     [&] { operands = prefetch_operands(); });
        signal_other_warpgroup();
        if (blocks.at_last()) return false;

        // Lines 7 to 10: S of the next block and P V of this one, together.
        wait_for_operands();
        gemms.start_scores(whole_descriptor(operands.q), whole_descriptor(operands.k));
        gemms.start_output(whole_descriptor(operands.v));
        set_rescale_threshold_under_gemm(tile, blocks);
        score_mod.draw((blocks.n - 1) * kConfig.block_kv);

        // Lines 11, 14: wait for S, release K.
        gemms.wait_scores_beside_output();
        release_k();
        blocks.advance();
        if (!kOverlapsTiles && blocks.at_last()) release_q();

        // Lines 12 to 14: compute the maximum of S during P V, then wait for O and release V. The exit is placed before
        // the wait: ptxas moves a wait in front of arithmetic, but not out of its basic block.
        score_mod.transform(gemms.s, blocks.n * kConfig.block_kv);
        if (rows.needs_rescale(gemms.s) | blocks.partial) break;
        gemms.wait_output();
        release_v();
    }
    gemms.wait_output();
    release_v();
    return true;
}

}  // namespace tessera::cuda::fa3
