// SPDX-License-Identifier: Apache-2.0
//
// A consumer warpgroup: its state, its operands and its synchronisation. The steps are elsewhere: mainloop.cuh has the
// blocks of one tile, tile_transition.cuh the code between two tiles. Words of the three files:
//
//     tile       queries of one head, 64 for each consumer warpgroup, and the key blocks that some of them see
//     row block  64 rows of a tile, M of a wgmma: one warpgroup's
//     block n    a block of keys with its K and V. Blocks run from the last to the first. Partial: some pairs are
//     hidden stage      shared memory for one block of K or V, released when this warpgroup has read it slot       an
//     entry of the ring through which the tile scheduler passes tiles to the warps (TileReader)
//
// Two things depend on the compiled shape (forward_config.h). With Config::skips_blocks() a warpgroup skips blocks that
// its own rows don't see, and tiles in which it has no rows. Without Config::own_o() the epilogue's O aliases a stage
// of K or V.
#pragma once

#include "cuda/fa3/forward/epilogue.cuh"
#include "cuda/fa3/forward/score_mod.cuh"
#include "cuda/fa3/forward/shared_storage.cuh"
#include "cuda/fa3/forward/softmax.cuh"
#include "cuda/fa3/forward/tile_scheduler.cuh"
#include "cuda/tile/attention_gemms.cuh"

namespace tessera::cuda::fa3 {

/// The key blocks of a tile, from the last to the first.
struct KeyBlockIterator {
    const BlockRange range;
    int n;         ///< the block whose scores are in S
    bool partial;  ///< it holds pairs that are not visible

    __device__ __forceinline__ explicit KeyBlockIterator(const BlockRange& blocks)
        : range(blocks), n(blocks.end - 1), partial(blocks.partial(n)) {}
    __device__ __forceinline__ bool at_last() const { return n <= range.begin; }
    __device__ __forceinline__ void advance() {
        --n;
        partial = range.partial(n);
    }
};

/// A matrix descriptor from its lower word; the upper word is the same for all.
__device__ __forceinline__ std::uint64_t whole_descriptor(std::uint32_t low) {
    return row_descriptor(nullptr) >> 32 << 32 | low;
}

/// One consumer warpgroup: 64 queries of each tile.
template <class T, Config kConfig>
struct Consumer {
    using Mod = ScoreMod<T, kConfig.block_kv, kConfig.scores>;

    const Launch& launch;
    Shared<kConfig>& shared;
    int warpgroup;                                ///< 0 .. consumers - 1
    ptx::IssueOrder order{launch.order.tiles()};  ///< keeps the order in which exponentials are issued

    PipelineState<kConfig.q_stages> q{};
    PipelineState<kConfig.kv_stages> k{}, v{};
    OutputStage<kConfig> output{};

    AttentionGemms<T, kConfig.block_kv, kConfig.head_dim, kConfig.head_dim_v> gemms;
    OnlineSoftmax<T, kConfig.takes_bias() ? 4 : 1> rows;
    int row_block = warpgroup;    ///< this warpgroup's row block in the tile in progress
    int v_to_skip = 0;            ///< blocks whose K was skipped and whose V was not yet
    bool o_in_kv_stages = false;  ///< the previous tile's O still lies in a stage of K or V

    // Overlap and prefetch, if registers and shared memory allow them.
    /// The last P V of a tile runs beside the first scores of the next. That takes a second Q stage; with one, Q is
    /// loaded while the epilogue runs.
    static constexpr bool kOverlapsTiles = kConfig.q_stages > 1;
    /// The rescale threshold is computed during the next GEMMs, with 2 consumer warpgroups only, since 3 would spill.
    /// Scores near the maximum are counted for head_dim_v <= 64 only, because it saves time only there.
    static constexpr bool kThresholdUnderGemm = kConfig.consumers < 3;
    static constexpr bool kCountUnderGemm = kThresholdUnderGemm && kConfig.head_dim_v <= 64;
    /// Barrier states and epilogue operands are read before the last P V, to overlap their latencies. Up to head_dim_v
    /// 64 the next tile's mask and blocks are, too; at larger ones that is slower on long rows.
    static constexpr bool kPrefetches = kOverlapsTiles && kConfig.consumers < 3;
    static constexpr bool kKeepsTile = kPrefetches && kConfig.head_dim_v <= 64;

    /// The tile in progress, in registers (kKeepsTile). Read when its first scores start.
    struct OwnTile {
        int q_begin;
        Band32 band;
        BlockRange blocks;

        OwnTile() = default;
        __device__ __forceinline__ explicit OwnTile(const WorkTile& tile)
            : q_begin(tile.q_begin), band(tile.band()), blocks(tile.blocks) {}
    };
    OwnTile own;
    /// Operands of the next S and P V: lower words of descriptors, and whether K and V have arrived. Read beside the
    /// last exponentials in front of those GEMMs.
    struct Operands {
        std::uint32_t q, k, v;
        bool k_is_full, v_is_full;
    };
    Operands operands;
    /// The additional operands of the next tile's first S (kPrefetches).
    struct Prefetched {
        std::uint32_t q;
        bool q_is_full, tile_is_ready;
    };

    // mainloop.cuh
    __device__ __forceinline__ void run();
    __device__ __forceinline__ int run_blocks(const WorkTile& tile);
    __device__ __forceinline__ void mask_and_rescale(const WorkTile& tile, const KeyBlockIterator& blocks);
    __device__ __forceinline__ bool run_until_rescale(const WorkTile& tile, KeyBlockIterator& blocks, Mod& score_mod);

    // tile_transition.cuh
    __device__ __forceinline__ bool tile_transition(TileReader& tiles, int& slot, int unseen);
    __device__ __forceinline__ Prefetched prefetch_next_tile(const TileReader& tiles) const;
    __device__ __forceinline__ void start_last_output();
    __device__ __forceinline__ EpilogueTile prepare_epilogue(TileReader& tiles, int slot);
    __device__ __forceinline__ void describe(EpilogueTile& epilogue, const WorkTile& tile) const;
    __device__ __forceinline__ int next_tile(TileReader& tiles, bool is_ready = false);
    __device__ __forceinline__ bool start_first_scores(const WorkTile& tile, const Prefetched& prefetched);
    /// Results of the thread's row r, with the sink of its head. `row`, `head`: the thread's first row in the tile, and
    /// the tile's first head.
    struct RowResult {
        float inverse;  ///< the factor of O
        float lse;
    };
    __device__ __forceinline__ RowResult result_of(int r, int row, int head) const {
        RowResult found{rows.inverse_sum(r) * launch.params.keep_scale, rows.lse(r)};
        if (!kConfig.takes_sinks() || launch.params.sinks == nullptr) return found;
        const WithSink with = with_sink_of(launch.params, head + launch.pack.head(row + 8 * r), found.lse);
        return {found.inverse * with.factor, with.lse};
    }
    __device__ __forceinline__ void run_epilogue(EpilogueTile epilogue, bool more);
    __device__ __forceinline__ auto& epilogue_buffer(bool more);
    __device__ __forceinline__ void return_epilogue_stages();
    __device__ __forceinline__ bool skip_tile(TileReader& tiles, int& slot);

    // This warpgroup's rows.
    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    /// This warpgroup's row block of any tile.
    __device__ __forceinline__ int row_block_of(const WorkTile& tile) const {
        return kConfig.skips_blocks() ? fa3::row_block_of(warpgroup, tile.rotation, kConfig.consumers) : warpgroup;
    }
    /// The thread's first row in a tile.
    __device__ __forceinline__ int row_in_tile() const { return row_in_tile(row_block); }
    __device__ __forceinline__ static int row_in_tile(int row_block) {
        return 64 * row_block + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane() / 4;
    }
    __device__ __forceinline__ int row_of_tile(const WorkTile& tile) const {
        return row_in_tile(kConfig.skips_blocks() ? row_block_of(tile) : row_block);
    }
    __device__ __forceinline__ int first_query(const WorkTile& tile) const {
        return tile.q_begin + launch.pack.query(64 * (kConfig.skips_blocks() ? row_block_of(tile) : row_block));
    }
    __device__ __forceinline__ bool has_rows_in(const WorkTile& tile) const {
        return !kConfig.skips_blocks() || first_query(tile) < tile.q_end;
    }
    /// The blocks that this warpgroup works on, in a tile in which it has rows.
    __device__ __forceinline__ BlockRange own_blocks(const WorkTile& tile) const {
        if constexpr (kConfig.skips_blocks()) {
            const int begin = first_query(tile);
            const int end = min(begin + launch.pack.query(64), tile.q_end);
            return part_of(tile.blocks, blocks_of<kConfig.block_kv>(begin, end, tile.band()));
        } else {
            return tile.blocks;
        }
    }

    // Operands.
    __device__ __forceinline__ std::uint32_t q_operand(int of_row_block) const {
        return static_cast<std::uint32_t>(uniform(row_descriptor(shared.q[q.index()][of_row_block])));
    }
    __device__ __forceinline__ std::uint32_t k_operand() const {
        return static_cast<std::uint32_t>(uniform(row_descriptor(shared.k[k.index()])));
    }
    __device__ __forceinline__ std::uint32_t v_operand() const {
        return static_cast<std::uint32_t>(uniform(column_descriptor(shared.v[v.index()], kConfig.block_kv)));
    }
    __device__ __forceinline__ Operands prefetch_operands() const {
        Operands found;
        found.q = q_operand(row_block);
        found.k = k_operand();
        found.v = v_operand();
        found.k_is_full = shared.k_ring.is_full(k);
        found.v_is_full = shared.v_ring.is_full(v);
        return found;
    }
    __device__ __forceinline__ void wait_for_operands() {
        if (!operands.k_is_full) shared.k_ring.consumer_wait(k);
        if (!operands.v_is_full) shared.v_ring.consumer_wait(v);
    }

    // Stages that were read are released to the producer.
    __device__ __forceinline__ void release_q() {
        if (lane() == 0) shared.q_ring.consumer_release(q);
        q.advance();
    }
    __device__ __forceinline__ void release_k() { release(shared.k_ring, k); }
    __device__ __forceinline__ void release_v() { release(shared.v_ring, v); }
    __device__ __forceinline__ static void release(Ring<kConfig.kv_stages>& ring,
                                                   PipelineState<kConfig.kv_stages>& state) {
        if (lane() == 0) ring.consumer_release(state);
        state.advance();
    }
    /// With skips_blocks(): skips K of so many blocks; skip_v() then skips V of all blocks whose K was skipped.
    __device__ __forceinline__ void skip_k(int blocks) {
        if constexpr (kConfig.skips_blocks()) {
            v_to_skip += blocks;
            for (; blocks > 0; --blocks) {
                shared.k_ring.consumer_wait(k);
                release_k();
            }
        }
    }
    __device__ __forceinline__ void skip_v() {
        if constexpr (kConfig.skips_blocks()) {
            for (; v_to_skip > 0; --v_to_skip) {
                shared.v_ring.consumer_wait(v);
                release_v();
            }
        }
    }

    /// Ping-pong scheduling of two warpgroups (FlashAttention-3, section 3.1; warp_scheduler_barrier_sync and _arrive
    /// in its code): one exponentiates while the other's GEMMs run. If both exponentiated at once, each would take
    /// twice as long.
    __device__ __forceinline__ void wait_for_turn() const {
        if (kConfig.ping_pong()) ptx::named_barrier_sync(kPingPongBarrier + warpgroup, 2 * 128);
    }
    __device__ __forceinline__ void signal_other_warpgroup() const {
        if (kConfig.ping_pong()) ptx::named_barrier_arrive(kPingPongBarrier + 1 - warpgroup, 2 * 128);
    }

    // The rescale threshold (softmax.cuh), after a rescale.
    __device__ __forceinline__ void count_near_max(const WorkTile& tile, const KeyBlockIterator& blocks) {
        const ThreadRows rows_of(tile, launch.pack, row_of_tile(tile));
        rows.template count_near_max<kConfig.block_kv>(tile, rows_of.query, blocks.n * kConfig.block_kv,
                                                       launch.scale_log2);
    }
    __device__ __forceinline__ void set_rescale_threshold_under_gemm(const WorkTile& tile,
                                                                     const KeyBlockIterator& blocks) {
        if (!kThresholdUnderGemm || !rows.threshold_is_due) return;
        if (kCountUnderGemm) count_near_max(tile, blocks);
        rows.set_rescale_threshold(launch.unscale);
    }
};

}  // namespace tessera::cuda::fa3
