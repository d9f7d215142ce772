// SPDX-License-Identifier: Apache-2.0
//
// A consumer warpgroup: what it holds, where its products find their operands, and how a tile begins and ends. The main
// loop has a page of its own (mainloop.cuh).
#pragma once

#include "cuda/fa3/epilogue.cuh"
#include "cuda/fa3/extras.cuh"
#include "cuda/fa3/shared.cuh"
#include "cuda/fa3/softmax.cuh"
#include "cuda/fa3/tile_scheduler.cuh"
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
    int slice = warpgroup;  ///< of the tile that is multiplied: the 64 rows that are this warpgroup's
    int v_to_pass = 0;      ///< blocks that are not this warpgroup's, whose K was passed over and whose V was not yet
    bool lent = false;  ///< where O has no memory of its own: that of the tile before is still in what was lent for it

    /// The last P V of a tile runs under the first scores of the next, where there is a second Q tile for them. Else Q
    /// is still on its way here, and comes while O leaves.
    static constexpr bool kAcrossTiles = kConfig.q_stages > 1;
    /// Three consumers have no registers for what it takes.
    static constexpr bool kSettleUnderProducts = kConfig.consumers < 3;
    /// A tile's ends are one chain of short waits, for barriers, shared memory, shuffles: what is wanted later is asked
    /// for early, and kept in registers.
    static constexpr bool kShortEnds = kAcrossTiles && kConfig.consumers < 3;
    static constexpr bool kReadsAhead = kShortEnds && kConfig.head_dim_v <= 64;  // over 64 long rows lose by it
    /// Nor have long rows of O: over 64 it gains nothing.
    static constexpr bool kCountUnderProducts = kSettleUnderProducts && kConfig.head_dim_v <= 64;

    /// Of the tile that is multiplied; with kReadsAhead, read when its first scores start.
    struct OwnTile {
        int q_begin;
        Visibility visible;
        BlockRange blocks;

        OwnTile() = default;
        __device__ __forceinline__ explicit OwnTile(const WorkTile& tile)
            : q_begin(tile.q_begin), visible(tile.visible()), blocks(tile.blocks) {}
    };
    OwnTile own;
    /// What the products of a step multiply (lower words of descriptors), and whether it has come yet. Looked up beside
    /// the last exponentials of the step before.
    struct Operands {
        std::uint32_t q, k, v;
        bool k_is_here, v_is_here;
    };
    Operands next;
    /// The same of what only a tile's first scores want.
    struct Upcoming {
        std::uint32_t q;
        bool q_is_here, tile_is_here;
    };

    // The main loop.
    __device__ __forceinline__ void run();
    __device__ __forceinline__ int multiply_blocks(const WorkTile& tile);
    __device__ __forceinline__ void mask_and_rescale(const WorkTile& tile, const KeyBlocks& blocks);
    __device__ __forceinline__ bool multiply_until_care(const WorkTile& tile, KeyBlocks& blocks, Extra& extra);
    __device__ __forceinline__ void count_near(const WorkTile& tile, const KeyBlocks& blocks) {
        const ThreadRows rows_of(tile, launch.stack, row_of_tile(tile));
        rows.template count_near<kConfig.block_kv>(tile, rows_of.query, blocks.n * kConfig.block_kv, launch.scale_log2);
    }

    // The ends of a tile.
    __device__ __forceinline__ int next_tile(TileReader& tiles, bool is_here = false);
    __device__ __forceinline__ LeavingTile leave(TileReader& tiles, int tile);
    __device__ __forceinline__ Upcoming look_up_upcoming(const TileReader& tiles) const;
    __device__ __forceinline__ bool start_first_scores(const WorkTile& tile, const Upcoming& upcoming);
    __device__ __forceinline__ void start_last_output();
    __device__ __forceinline__ int leave_out(TileReader& tiles, int tile);
    __device__ __forceinline__ void describe(LeavingTile& leaving, const WorkTile& tile) const;
    __device__ __forceinline__ float inverse_sum(int r) const { return rows.inverse_sum(r) * launch.params.keep_scale; }
    __device__ __forceinline__ void finish_tile(LeavingTile leaving, bool more);
    __device__ __forceinline__ auto& borrow_output(bool more);
    __device__ __forceinline__ void return_output();

    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    /// The 64 rows of the next tile that are this warpgroup's.
    __device__ __forceinline__ int slice_of(const WorkTile& tile) const {
        return kConfig.own_blocks() ? fa3::slice_of(warpgroup, tile.turn, kConfig.consumers) : warpgroup;
    }
    /// The thread's first row.
    __device__ __forceinline__ int row_in_tile() const { return row_in_tile(slice); }
    __device__ __forceinline__ static int row_in_tile(int slice) {
        return 64 * slice + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane() / 4;
    }
    __device__ __forceinline__ int row_of_tile(const WorkTile& tile) const {
        return row_in_tile(kConfig.own_blocks() ? slice_of(tile) : slice);
    }
    __device__ __forceinline__ int first_query(const WorkTile& tile) const {
        return tile.q_begin + launch.stack.query(64 * (kConfig.own_blocks() ? slice_of(tile) : slice));
    }
    __device__ __forceinline__ bool has_rows(const WorkTile& tile) const {
        return !kConfig.own_blocks() || first_query(tile) < tile.q_end;
    }
    /// The blocks of keys that this warpgroup multiplies, of a tile in which it has rows.
    __device__ __forceinline__ BlockRange own_blocks(const WorkTile& tile) const {
        if constexpr (kConfig.own_blocks()) {
            const int begin = first_query(tile);
            const int end = min(begin + launch.stack.query(64), tile.q_end);
            return part_of(tile.blocks, blocks_of<kConfig.block_kv>(begin, end, tile.visible()));
        } else {
            return tile.blocks;
        }
    }

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
        if (!next.k_is_here) k.wait_full(shared.k_ring);
        if (!next.v_is_here) v.wait_full(shared.v_ring);
    }

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
    /// Two warpgroups take turns in exponentials: together, each would take twice as long, and then both would
    /// multiply.
    __device__ __forceinline__ void await_turn() const {
        if (kConfig.takes_turns()) ptx::named_barrier_sync(kTurnBarrier + warpgroup, 2 * 128);
    }
    __device__ __forceinline__ void give_turn() const {
        if (kConfig.takes_turns()) ptx::named_barrier_arrive(kTurnBarrier + 1 - warpgroup, 2 * 128);
    }

    /// Blocks of keys that only other warpgroups multiply.
    __device__ __forceinline__ void pass_k(int blocks) {
        if constexpr (kConfig.own_blocks()) {
            v_to_pass += blocks;
            for (; blocks > 0; --blocks) {
                k.wait_full(shared.k_ring);
                release_k();
            }
        }
    }
    __device__ __forceinline__ void pass_v() {
        if constexpr (kConfig.own_blocks()) {
            for (; v_to_pass > 0; --v_to_pass) {
                v.wait_full(shared.v_ring);
                release_v();
            }
        }
    }
};

/// The next tile that sees keys, or the end; those on the way are written here.
template <class T, Config kConfig>
__device__ __forceinline__ int Consumer<T, kConfig>::next_tile(TileReader& tiles, bool is_here) {
    while (true) {
        const int tile = tiles.open(is_here);
        is_here = false;
        if (!tiles[tile].exists | tiles[tile].has_keys()) return tile;  // both are read at once
        store_empty_rows<T, kConfig>(launch, tiles[tile], row_in_tile(), lane());
        tiles.close(tile, lane());
    }
}

/// A tile whose last P V runs gives its place in the ring back: any number of tiles without keys may come before the
/// next one with keys and want places, and what is lent for O comes with that one. Each warp keeps a copy.
template <class T, Config kConfig>
__device__ __forceinline__ LeavingTile Consumer<T, kConfig>::leave(TileReader& tiles, int place) {
    const WorkTile& tile = tiles[place];
    LeavingTile leaving = {};
    if constexpr (kShortEnds) {
        leaving.row = row_in_tile(slice);
        describe(leaving, tile);
    }
    WorkTile& copy = shared.finishing[static_cast<int>(threadIdx.x) / 32 - 4];
    static_assert(sizeof(WorkTile) % sizeof(int) == 0 && sizeof(WorkTile) <= 32 * sizeof(int), "a word of each lane");
    if (lane() < static_cast<int>(sizeof(WorkTile) / sizeof(int))) {
        reinterpret_cast<int*>(&copy)[lane()] = reinterpret_cast<const int*>(&tile)[lane()];
    }
    tiles.close(place, lane());
    if constexpr (kShortEnds) {
        // In place here: the assembler would work them out between the next two products.
        float numbers[3] = {inverse_sum(0), inverse_sum(1), lane() % 4 == 0 ? rows.lse(0) : rows.lse(1)};
        ptx::keep_in_place(numbers);
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

/// Asked for together, before they are wanted: an answer takes as long as 25 instructions.
template <class T, Config kConfig>
__device__ __forceinline__ typename Consumer<T, kConfig>::Upcoming Consumer<T, kConfig>::look_up_upcoming(
    const TileReader& tiles) const {
    Upcoming found{};
    if (!kShortEnds) return found;  // without registers for it
    found.q_is_here = q.is_full(shared.q_ring);
    found.tile_is_here = tiles.is_next_here();
    found.q = q_operand(slice);
    return found;
}

/// S of the next tile's first block. Behind the last tile, and of a tile without rows of this warpgroup, of whatever
/// lies there, and nobody reads it: a product that is started on some paths only would have to be waited for at once.
/// Returns whether they are of the tile.
template <class T, Config kConfig>
__device__ __forceinline__ bool Consumer<T, kConfig>::start_first_scores(const WorkTile& tile,
                                                                         const Upcoming& upcoming) {
    slice = slice_of(tile);
    const bool takes_part = tile.exists && has_rows(tile);
    if constexpr (kShortEnds) {
        if (kReadsAhead) own = OwnTile(tile);
        if (takes_part) {
            if (!upcoming.q_is_here) q.wait_full(shared.q_ring);
            if (!next.k_is_here) k.wait_full(shared.k_ring);
        }
        products.start_scores(whole_descriptor(upcoming.q), whole_descriptor(next.k));
    } else {
        if (takes_part) {
            pass_k(tile.blocks.end - own_blocks(tile).end);
            const bool q_is_here = q.is_full(shared.q_ring);  // both are asked for at once
            const bool k_is_here = k.is_full(shared.k_ring);
            if (!q_is_here) q.wait_full(shared.q_ring);
            if (!k_is_here) k.wait_full(shared.k_ring);
        }
        products.start_scores(whole_descriptor(q_operand(slice)), whole_descriptor(k_operand()));
    }
    return takes_part;
}

/// O += P V of a tile's last block.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::start_last_output() {
    if (!kShortEnds || !next.v_is_here) v.wait_full(shared.v_ring);
    products.start_output(whole_descriptor(kShortEnds ? next.v : v_operand()));
}

/// A tile in which this warpgroup has no rows. Returns the next one.
template <class T, Config kConfig>
__device__ __forceinline__ int Consumer<T, kConfig>::leave_out(TileReader& tiles, int tile) {
    for (int left = tiles[tile].blocks.count(); left > 0; --left) {
        pass_k(1);
        pass_v();
    }
    q.wait_full(shared.q_ring);
    release_q();
    tiles.close(tile, lane());
    return next_tile(tiles);
}

/// O and LSE leave. `more`: another tile comes. Without registers for more, all is looked up here.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::finish_tile(LeavingTile leaving, bool more) {
    const WorkTile& tile = shared.finishing[static_cast<int>(threadIdx.x) / 32 - 4];
    const float inverse[2] = {kShortEnds ? leaving.inverse[0] : inverse_sum(0),
                              kShortEnds ? leaving.inverse[1] : inverse_sum(1)};
#pragma unroll
    for (int i = 0; i < kConfig.head_dim_v / 2; ++i) products.o[i] *= inverse[row_of(i)];
    float* lse = kShortEnds ? lse_target(launch.params, launch.stack, leaving, lane()) : nullptr;
    if (!kShortEnds) leaving.row = row_in_tile(slice_of(tile));
    output.template store<T>(products.o, launch, leaving.row, tile, borrow_output(more), lane(), [&] {
        if (!kShortEnds) describe(leaving, tile);
        return leaving;
    });
    // Behind O: the fence in front of the copy engine would wait until LSE is written.
    if (!kShortEnds) {
        lse = lse_target(launch.params, launch.stack, leaving, lane());
        leaving.lse = lane() % 4 == 0 ? rows.lse(0) : rows.lse(1);
    }
    if (lse != nullptr) *lse = leaving.lse;
    if (launch.o_rest.data != nullptr) store_rest<T>(products.o, launch, tile, leaving.row, lane());
}

/// Where O of this warpgroup is laid down: its own memory, or a stage that the producer lends (Producer::lend_stages),
/// of V to the first warpgroup and of K to the second.
template <class T, Config kConfig>
__device__ __forceinline__ auto& Consumer<T, kConfig>::borrow_output(bool more) {
    if constexpr (kConfig.own_o()) {
        output.wait(lane());
        return shared.o[warpgroup];
    } else {
        using Slabs = Slab64[kConfig.v_slabs()];
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
        return *static_cast<Slabs*>(stage);
    }
}

/// Both stages go back to the producer, behind the next tile's first scores: O is out of them by then.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::return_output() {
    lent = false;
    output.wait(lane());
    k.wait_full(shared.k_ring);
    release_k();
    v.wait_full(shared.v_ring);
    release_v();
}

}  // namespace tessera::cuda::fa3
