// SPDX-License-Identifier: Apache-2.0
//
// The main loop of a consumer warpgroup: Algorithm 2 of the FlashAttention-3 paper, for its 64 rows of a tile of
// queries. Said before: consumer.cuh, what the warpgroup holds. Called from here: tile_ends.cuh, from one tile to the
// next, and softmax.cuh.
//
// Block n of the keys is multiplied beside the softmax of block n + 1, since blocks are taken from the last to the
// first. While one warpgroup exponentiates, the tensor cores are the other one's:
//
//     tensor cores    | S(n)   O += P V(n + 1)  | the other one's       | S(n - 1)   O += P V(n)  |
//     this warpgroup  | waits | max S(n)        | P = exp2(S(n) - m)    | waits | max S(n - 1)    |
//     the other one   | P = exp2(S - m)         | S      O += P V       | P = exp2(S - m)         |
//
// Beside Algorithm 2 (its line numbers stand in the code):
//   - O is rescaled in few blocks only. Those, a tile's first block and those with hidden pairs are done between two
//     runs of the loop (mask_and_rescale), so that the loop has no code for them.
//   - No product of its own runs under the exponentials: arithmetic beside wgmma slows both.
//   - Tiles don't stop the stream: the last P V of one (line 18) runs beside the first S of the next (line 3).
#pragma once

#include "cuda/fa3/forward/tile_transition.cuh"

namespace tessera::cuda::fa3 {

/// All tiles of this thread block.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::run() {
    TileReader tiles{shared.tiles};
    if (warpgroup == 1) give_turn();  // the first one begins
    int place = next_tile(tiles);
    operands = look_up_operands();
    bool has_rows = start_first_scores(tiles[place], look_ahead(tiles));
    while (true) {
        products.wait_scores();  // lines 2, 3
        skip_v();
        if (has_rows) {
            release_k();  // line 4
            return_lent_stages();
            const int unseen = multiply_blocks(tiles[place]);
            has_rows = change_tiles(tiles, place, unseen);
        } else {
            if (!kConfig.skips_blocks() || !tiles[place].exists) break;
            has_rows = skip_tile(tiles, place);
        }
    }
    if (warpgroup == 0) await_turn();
    output.finish(lane());
}

/// All blocks of a tile that this warpgroup's rows see, but for the P V of the last. The first one's scores are in S.
/// Returns how many are left that they don't see.
template <class T, Config kConfig>
__device__ __forceinline__ int Consumer<T, kConfig>::multiply_blocks(const WorkTile& tile) {
    KeyBlocks blocks(kKeepsTile ? own.blocks : blocks_of_slice(tile));
    const bool only = blocks.at_last();
    if (only) release_q();
    Extra extra(launch, tile, row_of_tile(tile), lane());
    extra.draw(blocks.n * kConfig.block_kv);
    extra.transform(products.s, blocks.n * kConfig.block_kv);
    rows = {};  // line 1
#pragma unroll
    for (float& element : products.o) element = 0;
    bool more = true;
#pragma unroll 1
    while (more) {
        mask_and_rescale(tile, blocks);
        more = multiply_until_rescale(tile, blocks, extra);
    }
    if (kAcrossTiles && !only) release_q();
    return blocks.range.begin - tile.blocks.begin;
}

/// What is out of the way of the loop: hidden scores become -inf, m and l are brought up to a block's scores, and O is
/// rescaled. Of the first block of a tile, those with hidden pairs, and those that exceed m by much (softmax.cuh).
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::mask_and_rescale(const WorkTile& tile, const KeyBlocks& blocks) {
    if (blocks.partial) {
        const OwnTile seen = kKeepsTile ? own : OwnTile(tile);
        const int row = row_of_tile(tile);
        const int query[2] = {seen.q_begin + launch.stack.query(row), seen.q_begin + launch.stack.query(row + 8)};
        apply_mask(products.s, seen.visible, query, blocks.n * kConfig.block_kv, lane());
    }
    float factor[2];
    rows.rescale(products.s, launch.scale_log2, launch.unscale, factor);  // lines 5, 12
    if (!kCountUnderProducts) count_near(tile, blocks);
    if (!kLimitsUnderProducts) rows.set_limits(launch.unscale);
    if (kConfig.skips_blocks() || blocks.n != blocks.range.end - 1) {  // O is 0 before the first one
#pragma unroll
        for (int i = 0; i < kConfig.head_dim_v / 2; ++i) products.o[i] *= factor[row_of(i)];  // line 13
    }
}

/// The loop: from a block whose scores are ready for the exponential to the next one that mask_and_rescale() is for
/// (true), or to the tile's last (false).
template <class T, Config kConfig>
__device__ __forceinline__ bool Consumer<T, kConfig>::multiply_until_rescale(const WorkTile& tile, KeyBlocks& blocks,
                                                                             Extra& extra) {
#pragma unroll 1
    while (true) {
        // Lines 5, 12: P = exp2(S - m) and its sum, beside the other warpgroup's products.
        await_turn();
        exponentiate(products.s, products.p, rows, launch.scale_log2, order, extra,
                     [&] { operands = look_up_operands(); });
        give_turn();
        if (blocks.at_last()) return false;

        // Lines 7 to 10: S of the next block and P V of this one, together.
        wait_for_operands();
        products.start_scores(whole_descriptor(operands.q), whole_descriptor(operands.k));
        products.start_output(whole_descriptor(operands.v));
        set_limits_under_products(tile, blocks);
        extra.draw((blocks.n - 1) * kConfig.block_kv);

        // Lines 11, 14: S is there, K goes back.
        products.wait_scores_beside_output();
        release_k();
        blocks.advance();
        if (!kAcrossTiles && blocks.at_last()) release_q();

        // Lines 12 to 14: the maximum of S, beside P V; then O is there, V goes back. The way out stands before the
        // wait, or ptxas would wait first: it moves a wait in front of arithmetic, but not out of its basic
        // block.
        extra.transform(products.s, blocks.n * kConfig.block_kv);
        if (rows.needs_rescale(products.s) | blocks.partial) break;
        products.wait_output();
        release_v();
    }
    products.wait_output();
    release_v();
    return true;
}

}  // namespace tessera::cuda::fa3
