// SPDX-License-Identifier: Apache-2.0
//
// From one tile of queries to the next (called from mainloop.cuh; words: consumer.cuh). The epilogue of one tile runs
// beside the first S of the next:
//
//     tensor cores    | O += P V(last)                    | S of the next tile's first block  |
//     this warpgroup  | l; the next tile is acquired      | O / l -> shared memory -> TMA     |
#pragma once

#include "cuda/fa3/forward/consumer.cuh"

namespace tessera::cuda::fa3 {

/// The whole transition. On entry P of the tile's last block is complete, and the tile has `unseen` blocks left that
/// this warpgroup's rows don't see. On return the first S of the next tile runs and `slot` is the next tile's. Returns
/// the result of start_first_scores().
template <class T, Config kConfig>
__device__ __forceinline__ bool Consumer<T, kConfig>::tile_transition(TileReader& tiles, int& slot, int unseen) {
    const Prefetched prefetched = prefetch_next_tile(tiles);
    bool has_rows = false;
    if (kPrefetches) rows.finish();
    start_last_output();  // lines 17, 18
    skip_k(unseen);
    const EpilogueTile epilogue = prepare_epilogue(tiles, slot);
    slot = next_tile(tiles, prefetched.tile_is_ready);
    if constexpr (kOverlapsTiles) has_rows = start_first_scores(tiles[slot], prefetched);
    if (!kPrefetches) rows.finish();
    if constexpr (kOverlapsTiles) gemms.wait_output_beside_scores();
    else gemms.wait_output();
    release_v();
    run_epilogue(epilogue, tiles[slot].exists);  // line 19
    if constexpr (!kOverlapsTiles) has_rows = start_first_scores(tiles[slot], prefetched);
    return has_rows;
}

/// Operands of the next tile's first scores. They are read together and early: each read takes as long as 25
/// instructions.
template <class T, Config kConfig>
__device__ __forceinline__ typename Consumer<T, kConfig>::Prefetched Consumer<T, kConfig>::prefetch_next_tile(
    const TileReader& tiles) const {
    Prefetched found{};
    if (!kPrefetches) return found;
    found.q_is_full = shared.q_ring.is_full(q);
    found.tile_is_ready = tiles.is_next_ready();
    found.q = q_operand(row_block);
    return found;
}

/// O += P V of a tile's last block.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::start_last_output() {
    if (!kPrefetches || !operands.v_is_full) shared.v_ring.consumer_wait(v);
    gemms.start_output(whole_descriptor(kPrefetches ? operands.v : v_operand()));
}

/// Copies the EpilogueTile and releases the tile's slot, while the last P V runs. The slot can't be kept: any number of
/// tiles without keys may need slots before the next tile with keys, which brings the epilogue's stages.
template <class T, Config kConfig>
__device__ __forceinline__ EpilogueTile Consumer<T, kConfig>::prepare_epilogue(TileReader& tiles, int slot) {
    const WorkTile& tile = tiles[slot];
    EpilogueTile epilogue = {};
    if constexpr (kPrefetches) {
        epilogue.row = row_in_tile(row_block);
        describe(epilogue, tile);
    }
    WorkTile& copy = shared.epilogue_tiles[static_cast<int>(threadIdx.x) / 32 - 4];
    static_assert(sizeof(WorkTile) % sizeof(int) == 0 && sizeof(WorkTile) <= 32 * sizeof(int), "one word a lane");
    if (lane() < static_cast<int>(sizeof(WorkTile) / sizeof(int))) {
        reinterpret_cast<int*>(&copy)[lane()] = reinterpret_cast<const int*>(&tile)[lane()];
    }
    tiles.release(slot, lane());
    if constexpr (kPrefetches) {
        // The fence keeps this arithmetic here: ptxas would move it between the next two GEMMs.
        const RowResult results[2] = {result_of(0, epilogue.row, epilogue.head),
                                      result_of(1, epilogue.row, epilogue.head)};
        float numbers[3] = {results[0].inverse, results[1].inverse, lane() % 4 == 0 ? results[0].lse : results[1].lse};
        ptx::warpgroup_fence_operand(numbers);
        epilogue.inverse[0] = numbers[0];
        epilogue.inverse[1] = numbers[1];
        epilogue.lse = numbers[2];
    }
    return epilogue;
}

template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::describe(EpilogueTile& epilogue, const WorkTile& tile) const {
    epilogue.batch = tile.batch;
    epilogue.head = tile.head;
    epilogue.first_row = tile.first_q + tile.q_begin;
    epilogue.queries = tile.q_end - tile.q_begin;
    epilogue.needs_slow_path =
        tile.v_is_sanitized | !OutputStage<kConfig>::tma_can_store(launch, tile, epilogue.row - lane() / 4);
}

/// Slot of the next tile that sees keys, or of the entry that ends the stream. O and LSE of tiles without keys are
/// written on the way. `is_ready`: the next tile is known to be there.
template <class T, Config kConfig>
__device__ __forceinline__ int Consumer<T, kConfig>::next_tile(TileReader& tiles, bool is_ready) {
    while (true) {
        const int slot = tiles.acquire(is_ready);
        is_ready = false;
        if (!tiles[slot].exists | tiles[slot].has_keys()) return slot;  // | reads both at once
        store_empty_rows<T, kConfig>(launch, tiles[slot], row_in_tile(), lane());
        tiles.release(slot, lane());
    }
}

/// Starts S of a tile's first block, and returns whether this warpgroup has rows in the tile. Without rows, and behind
/// the last tile, S is computed from stale shared memory and never read. (ptxas would wait at once for a GEMM that
/// starts on some paths only.)
template <class T, Config kConfig>
__device__ __forceinline__ bool Consumer<T, kConfig>::start_first_scores(const WorkTile& tile,
                                                                         const Prefetched& prefetched) {
    row_block = row_block_of(tile);
    const bool has_rows = tile.exists && has_rows_in(tile);
    if constexpr (kPrefetches) {
        if (kKeepsTile) own = OwnTile(tile);
        if (has_rows) {
            if (!prefetched.q_is_full) shared.q_ring.consumer_wait(q);
            if (!operands.k_is_full) shared.k_ring.consumer_wait(k);
        }
        gemms.start_scores(whole_descriptor(prefetched.q), whole_descriptor(operands.k));
    } else {
        if (has_rows) {
            skip_k(tile.blocks.end - own_blocks(tile).end);
            const bool q_is_full = shared.q_ring.is_full(q);  // both tests before the first wait
            const bool k_is_full = shared.k_ring.is_full(k);
            if (!q_is_full) shared.q_ring.consumer_wait(q);
            if (!k_is_full) shared.k_ring.consumer_wait(k);
        }
        gemms.start_scores(whole_descriptor(q_operand(row_block)), whole_descriptor(k_operand()));
    }
    return has_rows;
}

/// The epilogue: O / l and LSE of the tile that prepare_epilogue() copied. `more`: another tile comes.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::run_epilogue(EpilogueTile epilogue, bool more) {
    const WorkTile& tile = shared.epilogue_tiles[static_cast<int>(threadIdx.x) / 32 - 4];
    const int own_row = row_in_tile(row_block_of(tile));
    const bool warp_has_rows = tile.q_begin + launch.pack.query(own_row - lane() / 4) < tile.q_end;
    // In other shapes warps without rows are few, and the branch takes 1 % of short rows' time.
    if (kConfig.small_rows > 0 && !warp_has_rows) return;
    const float inverse[2] = {kPrefetches ? epilogue.inverse[0] : result_of(0, own_row, tile.head).inverse,
                              kPrefetches ? epilogue.inverse[1] : result_of(1, own_row, tile.head).inverse};
#pragma unroll
    for (int i = 0; i < kConfig.head_dim_v / 2; ++i) gemms.o[i] *= inverse[row_of(i)];
    float* lse = kPrefetches ? lse_target(launch.params, launch.pack, epilogue, lane()) : nullptr;
    if (!kPrefetches) epilogue.row = own_row;
    output.template store<T>(gemms.o, launch, epilogue.row, tile, epilogue_buffer(more), lane(), [&] {
        if (!kPrefetches) describe(epilogue, tile);
        return epilogue;
    });
    // LSE follows O: the proxy fence in front of TMA would wait until LSE is written.
    if (!kPrefetches) {
        lse = lse_target(launch.params, launch.pack, epilogue, lane());
        epilogue.lse = lane() % 4 == 0 ? result_of(0, epilogue.row, epilogue.head).lse
                                       : result_of(1, epilogue.row, epilogue.head).lse;
    }
    if (lse != nullptr) *lse = epilogue.lse;
    if (launch.o_residual.data != nullptr) store_residual<T>(gemms.o, launch, tile, epilogue.row, lane());
}

/// Shared memory for this warpgroup's O: its own, or an alias of a stage that the producer hands over
/// (Producer::hand_stages_to_epilogue), of V to the first warpgroup and of K to the second.
template <class T, Config kConfig>
__device__ __forceinline__ auto& Consumer<T, kConfig>::epilogue_buffer(bool more) {
    if constexpr (kConfig.own_o()) {
        output.wait(lane());
        return shared.o[warpgroup];
    } else {
        using Panels = Panel64[kConfig.v_panels()];
        o_in_kv_stages = true;
        void* stage;
        if (warpgroup == 0) {
            shared.v_ring.consumer_wait(v);
            stage = shared.v[v.index()];
        } else {
            auto state = k;
            if (more) state.advance();  // past K of the next tile's first scores
            shared.k_ring.consumer_wait(state);
            stage = shared.k[state.index()];
        }
        return *static_cast<Panels*>(stage);
    }
}

/// Returns the stages that O of the previous tile aliased, behind this tile's first scores: O has left them by then.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::return_epilogue_stages() {
    if (kConfig.own_o() || !o_in_kv_stages) return;
    o_in_kv_stages = false;
    output.wait(lane());
    shared.k_ring.consumer_wait(k);
    release_k();
    shared.v_ring.consumer_wait(v);
    release_v();
}

/// Skips the blocks of a tile in which this warpgroup has no rows, and starts the first scores of the next tile as
/// tile_transition() does.
template <class T, Config kConfig>
__device__ __forceinline__ bool Consumer<T, kConfig>::skip_tile(TileReader& tiles, int& slot) {
    for (int left = tiles[slot].blocks.count(); left > 0; --left) {
        skip_k(1);
        skip_v();
    }
    shared.q_ring.consumer_wait(q);
    release_q();
    tiles.release(slot, lane());
    slot = next_tile(tiles);
    return start_first_scores(tiles[slot], prefetch_next_tile(tiles));
}

}  // namespace tessera::cuda::fa3
