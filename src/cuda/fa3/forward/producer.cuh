// SPDX-License-Identifier: Apache-2.0
//
// The producer warpgroup: one warp starts copies of Q, K and V tiles, three look for NaN and infinities in V.
#pragma once

#include "cuda/fa3/forward/shared_storage.cuh"
#include "cuda/fa3/forward/tile_scheduler.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/nonfinite.cuh"

namespace tessera::cuda::fa3 {

/// Starts the copy of a block of K or V: panels of rows from row `row` of (head, batch). Of a pair of thread blocks,
/// each brings half of the rows to both.
template <Config kConfig, class Panel, int kPanels>
__device__ __forceinline__ void copy_in(Panel (&panels)[kPanels], const CUtensorMap& map, int row, int head, int batch,
                                        ptx::Mbarrier& full) {
    constexpr auto kHint = ptx::CacheHint::evict_last;
    if constexpr (kConfig.pairs) {
        const int first = ptx::cluster_rank() * kConfig.kv_box();
#pragma unroll
        for (int s = 0; s < kPanels; ++s) {
            ptx::tma_load_4d_multicast(&panels[s][first], map, s * kPanelColumns, row + first, head, batch, full,
                                       kHint);
        }
    } else {
#pragma unroll
        for (int s = 0; s < kPanels; ++s) {
            ptx::tma_load_4d(panels[s], map, s * kPanelColumns, row, head, batch, full, kHint);
        }
    }
}

/// One thread: all copies, in the order in which the consumers take them. V comes one block behind K, over the ends of
/// tiles too: the first scores of a tile are multiplied beside the last P V of the one before.
template <Config kConfig>
struct Producer {
    struct Block {
        bool exists, partial;
        int row, head, batch;
    };

    const Launch& launch;
    Shared<kConfig>& shared;
    RingPosition<kConfig.q_stages> q{};
    RingPosition<kConfig.kv_stages> k{}, v{};
    Block late{};           ///< the block whose K was asked for and whose V was not yet
    bool had_keys = false;  ///< a tile with keys came

    __device__ __forceinline__ void run() {
        TileScheduler<kConfig> scheduler{launch, shared.tiles, shared.drawn_tiles()};
        while (true) {
            const WorkTile& tile = scheduler.next();
            if (!tile.exists) break;
            const int batch = launch.params.cu_seqlens_q != nullptr ? 0 : tile.batch;
            for (int n = tile.blocks.end - 1; n >= tile.blocks.begin; --n) {
                const Block block{true, tile.blocks.partial(n), tile.first_kv + n * kConfig.block_kv, tile.kv_head,
                                  batch};
                const bool first = n == tile.blocks.end - 1;
                if (n == tile.blocks.begin) scheduler.choose_upcoming();
                load_k(block);
                if (late.exists) load_v(late);
                if (first) load_q(tile, batch);
                if (first && had_keys) lend_stages();
                late = block;
                had_keys = true;
                // The next K has to wait until O has left what was lent; this V has not.
                if (first && !kConfig.own_o()) load_late_v();
            }
            if (tile.has_keys()) continue;
            // Consumers wait for the last V of a tile before they look for the next one; after this there may be more
            // tiles without keys than places in the ring.
            load_late_v();
            scheduler.choose_upcoming();
        }
        load_late_v();
        if (had_keys) lend_stages();
    }

    /// The V that is still to come, if there is one.
    __device__ __forceinline__ void load_late_v() {
        if (late.exists) load_v(late);
        late.exists = false;
    }

    /// Where O has no memory of its own: a stage of K and one of V that are read no more, for O of a tile. Behind the
    /// next tile's first K and this one's last V, so that nothing that the consumers wait for waits for O to leave.
    __device__ __forceinline__ void lend_stages() {
        if constexpr (!kConfig.own_o()) {
            k.wait_empty(shared.k_ring);
            ptx::mbarrier_arrive(shared.k_ring.full[k.stage()]);
            k.advance();
            v.wait_empty(shared.v_ring);
            ptx::mbarrier_arrive(shared.v_ring.full[v.stage()]);
            v.advance();
        }
    }

    __device__ __forceinline__ void load_q(const WorkTile& tile, int batch) {
        q.wait_empty(shared.q_ring);
        ptx::Mbarrier& full = shared.q_ring.full[q.stage()];
        const int rows = launch.stack.query(64);
        const int slices = kConfig.skips_blocks()
                               ? min((tile.q_end - tile.q_begin + rows - 1) / rows, kConfig.consumers)
                               : kConfig.consumers;
        ptx::mbarrier_arrive_expect(full, slices * sizeof(shared.q[0][0]));
        int row = tile.first_q + tile.q_begin;
        for (int w = 0; w < slices; ++w, row += rows) {
#pragma unroll
            for (int s = 0; s < kConfig.qk_panels(); ++s) {
                ptx::tma_load_4d(shared.q[q.stage()][w][s], launch.q, s * kPanelColumns, tile.head, row, batch, full,
                                 ptx::CacheHint::evict_first);
            }
        }
        q.advance();
    }
    __device__ __forceinline__ void load_k(const Block& block) {
        k.wait_empty(shared.k_ring);
        ptx::Mbarrier& full = shared.k_ring.full[k.stage()];
        ptx::mbarrier_arrive_expect(full, sizeof(shared.k[0]));
        copy_in<kConfig>(shared.k[k.stage()], launch.k, block.row, block.head, block.batch, full);
        k.advance();
    }
    __device__ __forceinline__ void load_v(const Block& block) {
        v.wait_empty(shared.v_ring);
        ptx::Mbarrier& full = block.partial ? shared.v_raw[v.stage()] : shared.v_ring.full[v.stage()];
        ptx::mbarrier_arrive_expect(full, sizeof(shared.v[0]));
        copy_in<kConfig>(shared.v[v.stage()], launch.v, block.row, block.head, block.batch, full);
        v.advance();
    }
};

/// Sets NaN and infinities of one V tile to 0. Returns whether this warp met any.
template <class T, int kBytes>
__device__ __forceinline__ bool clean(void* tile, int thread) {
    constexpr int kChunks = kBytes / static_cast<int>(sizeof(uint4));
    constexpr int kThreads = 32 * kGuardWarps;
    constexpr int kAtOnce = 4;  // reads that wait for each other
    auto* chunks = static_cast<uint4*>(tile);
    bool found = false;
    for (int first = thread; first < kChunks; first += kAtOnce * kThreads) {
        uint4 read[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) read[i] = chunks[min(first + i * kThreads, kChunks - 1)];
        const auto sum = __hadd2(__hadd2(zero_or_nan<T>(read[0]), zero_or_nan<T>(read[1])),
                                 __hadd2(zero_or_nan<T>(read[2]), zero_or_nan<T>(read[3])));
        if (nonfinite<T>(reinterpret_cast<const std::uint32_t&>(sum)) == 0) continue;
        found = true;
        for (int i = first; i < min(first + kAtOnce * kThreads, kChunks); i += kThreads) {
            auto* words = reinterpret_cast<std::uint32_t*>(&chunks[i]);
            for (int w = 0; w < 4; ++w) words[w] &= ~((nonfinite<T>(words[w]) >> 15) * 0xFFFF);
        }
    }
    return __any_sync(kAllLanes, found);
}

/// A hidden weight is 0, but 0 * NaN is NaN: in blocks where some row does not see some key, non-finite elements of V
/// are set to 0 before the consumers are told of it; they put them back into the rows that see them (restore_lost).
/// `thread`: of the guard's warps.
template <class T, Config kConfig>
__device__ __forceinline__ void guard(Shared<kConfig>& shared, int thread) {
    RingPosition<kConfig.kv_stages> v;
    StagePhases raw;
    TileReader tiles{shared.tiles};
    while (true) {
        const int place = tiles.open();
        const WorkTile tile = tiles[place];
        tiles.close(place, thread % 32);
        if (!tile.exists) return;
        for (int n = tile.blocks.end - 1; n >= tile.blocks.begin; --n, v.advance()) {
            if (!tile.blocks.partial(n)) continue;
            raw.wait(shared.v_raw[v.stage()], v.stage());
            // The consumers keep the tile's place in the ring until its last V.
            if (clean<T, sizeof(shared.v[0])>(shared.v[v.stage()], thread)) shared.tiles.tiles[place].dirty = true;
            ptx::fence_proxy_async();
            ptx::named_barrier_sync(kGuardBarrier, 32 * kGuardWarps);
            if (thread == 0) ptx::mbarrier_arrive(shared.v_ring.full[v.stage()]);
        }
        if (!kConfig.own_o() && tile.has_keys()) v.advance();  // the stage that is lent for O
    }
}

}  // namespace tessera::cuda::fa3
