// SPDX-License-Identifier: Apache-2.0
//
// The main loop of a consumer warpgroup: S = Q K^T, online softmax, O += P V over the blocks of keys of its tiles, in
// the order in which they overlap (FlashAttention-3 paper, Algorithm 2):
//
//     tensor cores    | S(n)   O += P V(n + 1)  | the other one's       | S(n - 1)   O += P V(n)  |
//     this warpgroup  | waits | max S(n)        | P = exp2(S(n) - m)    | waits | max S(n - 1)    |
//     the other one   | P = exp2(S - m)         | S      O += P V       | P = exp2(S - m)         |
#pragma once

#include "cuda/fa3/consumer.cuh"

namespace tessera::cuda::fa3 {

/// All tiles of this thread block. Their blocks of keys are one stream: a tile's last P V runs while the next tile is
/// looked up, and the next tile's first scores are multiplied while this one's O leaves.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::run() {
    TileReader tiles{shared.tiles};
    if (warpgroup == 1) give_turn();
    int tile = next_tile(tiles);
    next = look_up_operands();
    Upcoming upcoming = look_up_upcoming(tiles);
    bool takes_part = start_first_scores(tiles[tile], upcoming);
    while (true) {
        products.wait_scores();
        pass_v();
        if (!takes_part) {
            if (!kConfig.own_blocks() || !tiles[tile].exists) break;
            tile = leave_out(tiles, tile);
            takes_part = start_first_scores(tiles[tile], upcoming);
            continue;
        }
        release_k();
        if (!kConfig.own_o() && lent) return_output();
        const int left = multiply_blocks(tiles[tile]);

        // The end of this tile, and the beginning of the next.
        upcoming = look_up_upcoming(tiles);
        if (kShortEnds) rows.finish();
        start_last_output();
        pass_k(left);
        const LeavingTile leaving = leave(tiles, tile);
        tile = next_tile(tiles, upcoming.tile_is_here);
        if constexpr (kAcrossTiles) takes_part = start_first_scores(tiles[tile], upcoming);
        if (!kShortEnds) rows.finish();
        if constexpr (kAcrossTiles) products.wait_output_beside_scores();
        else products.wait_output();
        release_v();
        finish_tile(leaving, tiles[tile].exists);
        if constexpr (!kAcrossTiles) takes_part = start_first_scores(tiles[tile], upcoming);
    }
    if (warpgroup == 0) await_turn();
    output.finish(lane());
}

/// All blocks of a tile, but for the P V of the last. The first one's scores are in S. Returns how many are left that
/// are not this warpgroup's.
template <class T, Config kConfig>
__device__ __forceinline__ int Consumer<T, kConfig>::multiply_blocks(const WorkTile& tile) {
    KeyBlocks blocks(kReadsAhead ? own.blocks : own_blocks(tile));
    const bool only = blocks.at_last();
    if (only) release_q();
    Extra extra(launch, tile, row_of_tile(tile), lane());
    extra.draw(blocks.n * kConfig.block_kv);
    extra.transform(products.s, blocks.n * kConfig.block_kv);
    rows = {};
#pragma unroll
    for (float& element : products.o) element = 0;
    bool more = true;
#pragma unroll 1
    while (more) {
        mask_and_rescale(tile, blocks);
        more = multiply_until_care(tile, blocks, extra);
    }
    if (kAcrossTiles && !only) release_q();
    return blocks.range.begin - tile.blocks.begin;
}

/// What wants care, and is out of the way of the main loop: the first block of a tile, those with hidden pairs, and
/// those for which O is rescaled.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::mask_and_rescale(const WorkTile& tile, const KeyBlocks& blocks) {
    if (blocks.partial) {
        const OwnTile seen = kReadsAhead ? own : OwnTile(tile);
        const int row = row_of_tile(tile);
        const int query[2] = {seen.q_begin + launch.stack.query(row), seen.q_begin + launch.stack.query(row + 8)};
        apply_mask(products.s, seen.visible, query, blocks.n * kConfig.block_kv, lane());
    }
    float factor[2];
    rows.rescale(products.s, launch.scale_log2, launch.unscale, factor);
    if (!kCountUnderProducts) count_near(tile, blocks);
    if (!kSettleUnderProducts) rows.settle(launch.unscale);
    if (kConfig.own_blocks() || blocks.n != blocks.range.end - 1) {  // O is 0 before the first one
#pragma unroll
        for (int i = 0; i < kConfig.head_dim_v / 2; ++i) products.o[i] *= factor[row_of(i)];
    }
}

/// The main loop: from a block whose scores are ready for the exponential to the next one that wants care (true), or to
/// the tile's last (false).
template <class T, Config kConfig>
__device__ __forceinline__ bool Consumer<T, kConfig>::multiply_until_care(const WorkTile& tile, KeyBlocks& blocks,
                                                                          Extra& extra) {
#pragma unroll 1
    while (true) {
        // P = exp2(S - m), beside the other warpgroup's products: none of this one's runs.
        await_turn();
        exponentiate(products.s, products.p, rows, launch.scale_log2, order, extra, [&] { next = look_up_operands(); });
        give_turn();
        if (blocks.at_last()) return false;
        wait_for_operands();

        // S of the next block and P V of this one, together.
        products.start_scores(whole_descriptor(next.q), whole_descriptor(next.k));
        products.start_output(whole_descriptor(next.v));
        if (kSettleUnderProducts && rows.unsettled) {
            if (kCountUnderProducts) count_near(tile, blocks);
            rows.settle(launch.unscale);
        }
        extra.draw((blocks.n - 1) * kConfig.block_kv);
        products.wait_scores_beside_output();
        release_k();
        blocks.advance();
        if (!kAcrossTiles && blocks.at_last()) release_q();

        // The maximum of S, beside P V. The way out stands before the wait, or the assembler would wait first: it moves
        // a wait in front of arithmetic, but not out of its basic block.
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
