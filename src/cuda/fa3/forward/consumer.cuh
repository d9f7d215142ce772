// SPDX-License-Identifier: Apache-2.0
//
// A consumer warpgroup: what it holds, and where its products find their operands. What it does has pages of its own:
// mainloop.cuh, and from one tile to the next, tile_ends.cuh. Words of all three:
//
//     tile     of queries of one head, 64 for each warpgroup, and the blocks of keys that some of them see (WorkTile)
//     place    of a tile in the ring through which the producer tells of it (TileReader)
//     slice    64 rows of a tile: one warpgroup's
//     block    of keys, and of K and V: number n; from the last to the first. Partial: it holds hidden pairs
//     stage    of shared memory, for one block of K or V; released when this warpgroup has read it
//     turn     of two warpgroups, whose exponentials run now
//
// Two things only some compiled shapes have (config.h). Config::skips_blocks(): a warpgroup passes over blocks that its
// own rows don't see, and over tiles in which it has no rows; elsewhere all do all blocks. Not Config::own_o(): O
// leaves through a stage that the producer lends it.
#pragma once

#include "cuda/fa3/forward/epilogue.cuh"
#include "cuda/fa3/forward/score_mod.cuh"
#include "cuda/fa3/forward/shared_storage.cuh"
#include "cuda/fa3/forward/softmax.cuh"
#include "cuda/fa3/forward/tile_scheduler.cuh"
#include "cuda/tile/products.cuh"

namespace tessera::cuda::fa3 {

/// The blocks of keys of a tile, from the last to the first.
struct KeyBlocks {
    const BlockRange range;
    int n;         ///< the block whose scores are in S
    bool partial;  ///< it holds pairs that are not visible

    __device__ __forceinline__ explicit KeyBlocks(const BlockRange& blocks)
        : range(blocks), n(blocks.end - 1), partial(blocks.partial(n)) {}
    __device__ __forceinline__ bool at_last() const { return n <= range.begin; }
    __device__ __forceinline__ void advance() {
        --n;
        partial = range.partial(n);
    }
};

/// A descriptor of which the lower word was kept: the upper one is the same for all.
__device__ __forceinline__ std::uint64_t whole_descriptor(std::uint32_t low) {
    return row_descriptor(nullptr) >> 32 << 32 | low;
}

/// One consumer warpgroup: 64 queries of each tile.
template <class T, Config kConfig>
struct Consumer {
    using Extra = Extras<T, kConfig.block_kv, kConfig.scores>;

    const Launch& launch;
    Shared<kConfig>& shared;
    int warpgroup;                                ///< 0 .. consumers - 1
    ptx::IssueOrder order{launch.order.tiles()};  ///< of the exponentials

    RingPosition<kConfig.q_stages> q{};
    RingPosition<kConfig.kv_stages> k{}, v{};
    OutputStage<kConfig> output{};

    Products<T, kConfig.block_kv, kConfig.head_dim, kConfig.head_dim_v> products;
    OnlineSoftmax<T> rows;
    int slice = warpgroup;  ///< of the tile that is multiplied
    int v_to_skip = 0;      ///< blocks whose K was passed over, and whose V was not yet
    bool lent = false;      ///< O of the tile before still lies in the stage that was lent for it

    // What is done early, where registers and shared memory allow it.
    /// The last P V of a tile runs under the first scores of the next: there is a second Q tile for them. Else Q is
    /// still on its way here, and comes while O leaves.
    static constexpr bool kAcrossTiles = kConfig.q_stages > 1;
    /// OnlineSoftmax's limits, which nothing waits for, are worked out under the next products. Three consumers have
    /// no registers for that; nor for the count of scores near the maximum long rows of O: over 64 it gains nothing.
    static constexpr bool kLimitsUnderProducts = kConfig.consumers < 3;
    static constexpr bool kCountUnderProducts = kLimitsUnderProducts && kConfig.head_dim_v <= 64;
    /// A tile's ends are one chain of short waits, for barriers, shared memory, shuffles: what is wanted later is asked
    /// for early, and kept in registers; the next tile's mask and blocks, too (over 64 long rows lose by it).
    static constexpr bool kAsksEarly = kAcrossTiles && kConfig.consumers < 3;
    static constexpr bool kKeepsTile = kAsksEarly && kConfig.head_dim_v <= 64;

    /// Of the tile that is multiplied, with kKeepsTile: read when its first scores start.
    struct OwnTile {
        int q_begin;
        Visibility visible;
        BlockRange blocks;

        OwnTile() = default;
        __device__ __forceinline__ explicit OwnTile(const WorkTile& tile)
            : q_begin(tile.q_begin), visible(tile.visible()), blocks(tile.blocks) {}
    };
    OwnTile own;
    /// What the next S and P V multiply (lower words of descriptors), and whether K and V have come yet. Looked up
    /// beside the last exponentials in front of them.
    struct Operands {
        std::uint32_t q, k, v;
        bool k_is_here, v_is_here;
    };
    Operands operands;
    /// The same of what only the next tile's first S wants, with kAsksEarly.
    struct Upcoming {
        std::uint32_t q;
        bool q_is_here, tile_is_here;
    };

    // mainloop.cuh
    __device__ __forceinline__ void run();
    __device__ __forceinline__ int multiply_blocks(const WorkTile& tile);
    __device__ __forceinline__ void mask_and_rescale(const WorkTile& tile, const KeyBlocks& blocks);
    __device__ __forceinline__ bool multiply_until_rescale(const WorkTile& tile, KeyBlocks& blocks, Extra& extra);

    // tile_ends.cuh
    __device__ __forceinline__ bool change_tiles(TileReader& tiles, int& place, int unseen);
    __device__ __forceinline__ Upcoming look_ahead(const TileReader& tiles) const;
    __device__ __forceinline__ void start_last_output();
    __device__ __forceinline__ LeavingTile leave(TileReader& tiles, int place);
    __device__ __forceinline__ void describe(LeavingTile& leaving, const WorkTile& tile) const;
    __device__ __forceinline__ int next_tile(TileReader& tiles, bool is_here = false);
    __device__ __forceinline__ bool start_first_scores(const WorkTile& tile, const Upcoming& upcoming);
    __device__ __forceinline__ float inverse_sum(int r) const { return rows.inverse_sum(r) * launch.params.keep_scale; }
    __device__ __forceinline__ void finish_tile(LeavingTile leaving, bool more);
    __device__ __forceinline__ auto& place_for_output(bool more);
    __device__ __forceinline__ void return_lent_stages();
    __device__ __forceinline__ bool skip_tile(TileReader& tiles, int& place);

    // This warpgroup's rows.
    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    /// This warpgroup's, of any tile.
    __device__ __forceinline__ int slice_of(const WorkTile& tile) const {
        return kConfig.skips_blocks() ? fa3::slice_of(warpgroup, tile.rotation, kConfig.consumers) : warpgroup;
    }
    /// The thread's first row.
    __device__ __forceinline__ int row_in_tile() const { return row_in_tile(slice); }
    __device__ __forceinline__ static int row_in_tile(int slice) {
        return 64 * slice + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane() / 4;
    }
    __device__ __forceinline__ int row_of_tile(const WorkTile& tile) const {
        return row_in_tile(kConfig.skips_blocks() ? slice_of(tile) : slice);
    }
    __device__ __forceinline__ int first_query(const WorkTile& tile) const {
        return tile.q_begin + launch.stack.query(64 * (kConfig.skips_blocks() ? slice_of(tile) : slice));
    }
    __device__ __forceinline__ bool has_rows_in(const WorkTile& tile) const {
        return !kConfig.skips_blocks() || first_query(tile) < tile.q_end;
    }
    /// The blocks that this warpgroup multiplies, of a tile in which it has rows.
    __device__ __forceinline__ BlockRange blocks_of_slice(const WorkTile& tile) const {
        if constexpr (kConfig.skips_blocks()) {
            const int begin = first_query(tile);
            const int end = min(begin + launch.stack.query(64), tile.q_end);
            return part_of(tile.blocks, blocks_of<kConfig.block_kv>(begin, end, tile.visible()));
        } else {
            return tile.blocks;
        }
    }

    // Operands.
    __device__ __forceinline__ std::uint32_t q_operand(int of_slice) const {
        return static_cast<std::uint32_t>(uniform(row_descriptor(shared.q[q.stage()][of_slice])));
    }
    __device__ __forceinline__ std::uint32_t k_operand() const {
        return static_cast<std::uint32_t>(uniform(row_descriptor(shared.k[k.stage()])));
    }
    __device__ __forceinline__ std::uint32_t v_operand() const {
        return static_cast<std::uint32_t>(uniform(column_descriptor(shared.v[v.stage()], kConfig.block_kv)));
    }
    __device__ __forceinline__ Operands look_up_operands() const {
        Operands found;
        found.q = q_operand(slice);
        found.k = k_operand();
        found.v = v_operand();
        found.k_is_here = k.is_full(shared.k_ring);
        found.v_is_here = v.is_full(shared.v_ring);
        return found;
    }
    __device__ __forceinline__ void wait_for_operands() {
        if (!operands.k_is_here) k.wait_full(shared.k_ring);
        if (!operands.v_is_here) v.wait_full(shared.v_ring);
    }

    // Stages that were read go back.
    __device__ __forceinline__ void release_q() {
        if (lane() == 0) q.release(shared.q_ring);
        q.advance();
    }
    __device__ __forceinline__ void release_k() { release(k, shared.k_ring); }
    __device__ __forceinline__ void release_v() { release(v, shared.v_ring); }
    /// Of K and V: to both thread blocks of a pair, each of which fills half of it for both.
    __device__ __forceinline__ static void release(RingPosition<kConfig.kv_stages>& place,
                                                   Ring<kConfig.kv_stages>& ring) {
        if constexpr (kConfig.pairs) {
            if (lane() < 2) place.release_at(ring, lane());
        } else if (lane() == 0) {
            place.release(ring);
        }
        place.advance();
    }
    /// With skips_blocks(): K of so many blocks is passed over; then V of all blocks whose K was.
    __device__ __forceinline__ void skip_k(int blocks) {
        if constexpr (kConfig.skips_blocks()) {
            v_to_skip += blocks;
            for (; blocks > 0; --blocks) {
                k.wait_full(shared.k_ring);
                release_k();
            }
        }
    }
    __device__ __forceinline__ void skip_v() {
        if constexpr (kConfig.skips_blocks()) {
            for (; v_to_skip > 0; --v_to_skip) {
                v.wait_full(shared.v_ring);
                release_v();
            }
        }
    }

    /// Two warpgroups take turns in exponentials: together, each would take twice as long, and then both would
    /// multiply.
    __device__ __forceinline__ void await_turn() const {
        if (kConfig.takes_turns()) ptx::named_barrier_sync(kTurnBarrier + warpgroup, 2 * 128);
    }
    __device__ __forceinline__ void give_turn() const {
        if (kConfig.takes_turns()) ptx::named_barrier_arrive(kTurnBarrier + 1 - warpgroup, 2 * 128);
    }

    // OnlineSoftmax's limits, after a rescale.
    __device__ __forceinline__ void count_near(const WorkTile& tile, const KeyBlocks& blocks) {
        const ThreadRows rows_of(tile, launch.stack, row_of_tile(tile));
        rows.template count_near<kConfig.block_kv>(tile, rows_of.query, blocks.n * kConfig.block_kv, launch.scale_log2);
    }
    __device__ __forceinline__ void set_limits_under_products(const WorkTile& tile, const KeyBlocks& blocks) {
        if (!kLimitsUnderProducts || !rows.limits_are_due) return;
        if (kCountUnderProducts) count_near(tile, blocks);
        rows.set_limits(launch.unscale);
    }
};

}  // namespace tessera::cuda::fa3
