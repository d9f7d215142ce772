// SPDX-License-Identifier: Apache-2.0
//
// From one tile of queries to the next, as a consumer warpgroup goes (mainloop.cuh calls it; words: consumer.cuh). O of
// the one leaves while S of the other is multiplied:
//
//     tensor cores    | O += P V(last)                 | S of the next tile's first block        |
//     this warpgroup  | l; the next tile is looked up  | O / l -> shared memory -> TMA   |
#pragma once

#include "cuda/fa3/forward/consumer.cuh"

namespace tessera::cuda::fa3 {

/// All of it. At the beginning P of the tile's last block is there, and `unseen` of its blocks are left, which this
/// warpgroup's rows don't see; at the end the first S of the next tile is started. `place` becomes the next one's.
/// Returns start_first_scores().
template <class T, Config kConfig>
__device__ __forceinline__ bool Consumer<T, kConfig>::change_tiles(TileReader& tiles, int& place, int unseen) {
    const Upcoming upcoming = look_ahead(tiles);
    bool has_rows = false;
    if (kAsksEarly) rows.finish();
    start_last_output();  // lines 17, 18
    skip_k(unseen);
    const LeavingTile leaving = leave(tiles, place);
    place = next_tile(tiles, upcoming.tile_is_here);
    if constexpr (kAcrossTiles) has_rows = start_first_scores(tiles[place], upcoming);
    if (!kAsksEarly) rows.finish();
    if constexpr (kAcrossTiles) products.wait_output_beside_scores();
    else products.wait_output();
    release_v();
    finish_tile(leaving, tiles[place].exists);  // line 19
    if constexpr (!kAcrossTiles) has_rows = start_first_scores(tiles[place], upcoming);
    return has_rows;
}

/// What the next tile's first scores want. Asked for together, before they are wanted: an answer takes as long as 25
/// instructions.
template <class T, Config kConfig>
__device__ __forceinline__ typename Consumer<T, kConfig>::Upcoming Consumer<T, kConfig>::look_ahead(
    const TileReader& tiles) const {
    Upcoming found{};
    if (!kAsksEarly) return found;
    found.q_is_here = q.is_full(shared.q_ring);
    found.tile_is_here = tiles.is_next_here();
    found.q = q_operand(slice);
    return found;
}

/// O += P V of a tile's last block.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::start_last_output() {
    if (!kAsksEarly || !operands.v_is_here) v.wait_full(shared.v_ring);
    products.start_output(whole_descriptor(kAsksEarly ? operands.v : v_operand()));
}

/// A tile whose last P V runs gives its place back: any number of tiles without keys may come before the next one with
/// keys and want places, and what is lent for O comes with that one. Each warp keeps a copy.
template <class T, Config kConfig>
__device__ __forceinline__ LeavingTile Consumer<T, kConfig>::leave(TileReader& tiles, int place) {
    const WorkTile& tile = tiles[place];
    LeavingTile leaving = {};
    if constexpr (kAsksEarly) {
        leaving.row = row_in_tile(slice);
        describe(leaving, tile);
    }
    WorkTile& copy = shared.finishing[static_cast<int>(threadIdx.x) / 32 - 4];
    static_assert(sizeof(WorkTile) % sizeof(int) == 0 && sizeof(WorkTile) <= 32 * sizeof(int), "a word of each lane");
    if (lane() < static_cast<int>(sizeof(WorkTile) / sizeof(int))) {
        reinterpret_cast<int*>(&copy)[lane()] = reinterpret_cast<const int*>(&tile)[lane()];
    }
    tiles.close(place, lane());
    if constexpr (kAsksEarly) {
        // In place here: ptxas would work them out between the next two products.
        float numbers[3] = {inverse_sum(0), inverse_sum(1), lane() % 4 == 0 ? rows.lse(0) : rows.lse(1)};
        ptx::warpgroup_fence_operand(numbers);
        leaving.inverse[0] = numbers[0];
        leaving.inverse[1] = numbers[1];
        leaving.lse = numbers[2];
    }
    return leaving;
}

template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::describe(LeavingTile& leaving, const WorkTile& tile) const {
    leaving.batch = tile.batch;
    leaving.head = tile.head;
    leaving.first_row = tile.first_q + tile.q_begin;
    leaving.queries = tile.q_end - tile.q_begin;
    leaving.wants_care = tile.dirty | !OutputStage<kConfig>::is_whole(launch, tile, leaving.row - lane() / 4);
}

/// The place of the next tile that sees keys, or of the end. O and LSE of those on the way are written here. `is_here`:
/// the next one is known to be there.
template <class T, Config kConfig>
__device__ __forceinline__ int Consumer<T, kConfig>::next_tile(TileReader& tiles, bool is_here) {
    while (true) {
        const int place = tiles.open(is_here);
        is_here = false;
        if (!tiles[place].exists | tiles[place].has_keys()) return place;  // both are read at once
        store_empty_rows<T, kConfig>(launch, tiles[place], row_in_tile(), lane());
        tiles.close(place, lane());
    }
}

/// S of a tile's first block. Behind the last tile, and of a tile without rows of this warpgroup, of whatever lies
/// there, and nobody reads it: a product that is started on some paths only would have to be waited for at once.
/// Returns whether it is of the tile.
template <class T, Config kConfig>
__device__ __forceinline__ bool Consumer<T, kConfig>::start_first_scores(const WorkTile& tile,
                                                                         const Upcoming& upcoming) {
    slice = slice_of(tile);
    const bool has_rows = tile.exists && has_rows_in(tile);
    if constexpr (kAsksEarly) {
        if (kKeepsTile) own = OwnTile(tile);
        if (has_rows) {
            if (!upcoming.q_is_here) q.wait_full(shared.q_ring);
            if (!operands.k_is_here) k.wait_full(shared.k_ring);
        }
        products.start_scores(whole_descriptor(upcoming.q), whole_descriptor(operands.k));
    } else {
        if (has_rows) {
            skip_k(tile.blocks.end - blocks_of_slice(tile).end);
            const bool q_is_here = q.is_full(shared.q_ring);  // both are asked for at once
            const bool k_is_here = k.is_full(shared.k_ring);
            if (!q_is_here) q.wait_full(shared.q_ring);
            if (!k_is_here) k.wait_full(shared.k_ring);
        }
        products.start_scores(whole_descriptor(q_operand(slice)), whole_descriptor(k_operand()));
    }
    return has_rows;
}

/// O and LSE leave, of the tile that leave() kept. `more`: another tile comes.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::finish_tile(LeavingTile leaving, bool more) {
    const WorkTile& tile = shared.finishing[static_cast<int>(threadIdx.x) / 32 - 4];
    const float inverse[2] = {kAsksEarly ? leaving.inverse[0] : inverse_sum(0),
                              kAsksEarly ? leaving.inverse[1] : inverse_sum(1)};
#pragma unroll
    for (int i = 0; i < kConfig.head_dim_v / 2; ++i) products.o[i] *= inverse[row_of(i)];
    float* lse = kAsksEarly ? lse_target(launch.params, launch.stack, leaving, lane()) : nullptr;
    if (!kAsksEarly) leaving.row = row_in_tile(slice_of(tile));
    output.template store<T>(products.o, launch, leaving.row, tile, place_for_output(more), lane(), [&] {
        if (!kAsksEarly) describe(leaving, tile);
        return leaving;
    });
    // Behind O: the fence in front of TMA would wait until LSE is written.
    if (!kAsksEarly) {
        lse = lse_target(launch.params, launch.stack, leaving, lane());
        leaving.lse = lane() % 4 == 0 ? rows.lse(0) : rows.lse(1);
    }
    if (lse != nullptr) *lse = leaving.lse;
    if (launch.o_residual.data != nullptr) store_residual<T>(products.o, launch, tile, leaving.row, lane());
}

/// Where O of this warpgroup is laid down: its own memory, or a stage that the producer lends (Producer::lend_stages),
/// of V to the first warpgroup and of K to the second.
template <class T, Config kConfig>
__device__ __forceinline__ auto& Consumer<T, kConfig>::place_for_output(bool more) {
    if constexpr (kConfig.own_o()) {
        output.wait(lane());
        return shared.o[warpgroup];
    } else {
        using Panels = Panel64[kConfig.v_panels()];
        lent = true;
        void* stage;
        if (warpgroup == 0) {
            v.wait_full(shared.v_ring);
            stage = shared.v[v.stage()];
        } else {
            auto position = k;
            if (more) position.advance();  // past the K of the first scores, which are still to be multiplied
            position.wait_full(shared.k_ring);
            stage = shared.k[position.stage()];
        }
        return *static_cast<Panels*>(stage);
    }
}

/// What was lent for O of the tile before goes back to the producer, behind this one's first scores: O is out of it by
/// then.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::return_lent_stages() {
    if (kConfig.own_o() || !lent) return;
    lent = false;
    output.wait(lane());
    k.wait_full(shared.k_ring);
    release_k();
    v.wait_full(shared.v_ring);
    release_v();
}

/// A tile in which this warpgroup has no rows: its blocks are passed over. Starts the first scores of the next one, as
/// change_tiles() does.
template <class T, Config kConfig>
__device__ __forceinline__ bool Consumer<T, kConfig>::skip_tile(TileReader& tiles, int& place) {
    for (int left = tiles[place].blocks.count(); left > 0; --left) {
        skip_k(1);
        skip_v();
    }
    q.wait_full(shared.q_ring);
    release_q();
    tiles.close(place, lane());
    place = next_tile(tiles);
    return start_first_scores(tiles[place], look_ahead(tiles));
}

}  // namespace tessera::cuda::fa3
