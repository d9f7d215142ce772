// SPDX-License-Identifier: Apache-2.0
//
// The producer warpgroup: one warp issues the TMA loads of Q, K and V tiles, three warps sanitize V.
#pragma once

#include "cuda/fa3/forward/shared_storage.cuh"
#include "cuda/fa3/forward/tile_scheduler.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/nonfinite.cuh"
#include "cuda/tile/tma_copy.cuh"

namespace tessera::cuda::fa3 {

/// One thread: all loads, in the order in which the consumers take them. V is loaded one block behind K, across tiles
/// too, since the first scores of a tile overlap with the last P V of the previous tile.
///
/// In the cached shapes it is a warp: the lanes read the page table together, and lane 0 does all else.
template <Config kConfig>
struct Producer {
    struct Block {
        bool exists, partial;
        int row, head, batch;
        int boxes, box_set;  ///< in pages: TMA boxes with keys of the sequence, and where they are (find_boxes)
    };

    const Launch& launch;
    Shared<kConfig>& shared;
    const int lane = static_cast<int>(threadIdx.x);
    TileScheduler<kConfig> scheduler{launch, shared.tiles};
    TileReader tiles{shared.tiles};  ///< cached shapes
    PipelineState<kConfig.q_stages> q{};
    PipelineState<kConfig.kv_stages> k{}, v{};
    Block pending_v{};      ///< the block whose K was loaded and whose V was not yet
    bool had_keys = false;  ///< a tile with keys came
    int box_set = 0;        ///< in pages: the boxes of the next block

    __device__ __forceinline__ void run() {
        if (issues()) scheduler.start();
        while (true) {
            const WorkTile& tile = next_tile();
            if (!tile.exists) break;
            const int batch = launch.params.cu_seqlens_q != nullptr ? 0 : tile.batch;
            const int batch_kv = kConfig.cached ? slot_or_sequence(tile.batch) : batch;
            for (int n = tile.blocks.end - 1; n >= tile.blocks.begin; --n) {
                Block block{true, tile.blocks.partial(n), tile.first_kv + n * kConfig.block_kv, tile.kv_head, batch_kv};
                if constexpr (kConfig.cached) {
                    if (in_pages()) find_boxes(block, tile.last_key + 1 - n * kConfig.block_kv);
                }
                const bool first = n == tile.blocks.end - 1;
                if (n == tile.blocks.begin) choose_next();
                load_k(block);
                if (pending_v.exists) load_v(pending_v);
                if (first) load_q(tile, batch);
                if (first && had_keys) hand_stages_to_epilogue();
                pending_v = block;
                had_keys = true;
                // This V is loaded first: the next K has to wait until O has left the epilogue's stages, and this V
                // need not.
                if (first && !kConfig.own_o()) load_pending_v();
            }
            // Consumers wait for the last V of a tile before they look for the next tile, and more tiles without keys
            // than the ring has slots may follow.
            if (loads_v_early() || !tile.has_keys()) load_pending_v();
            if (!tile.has_keys()) choose_next();
        }
        load_pending_v();
        if (had_keys) hand_stages_to_epilogue();
    }

    /// Does this thread issue loads and arrive at barriers?
    __device__ __forceinline__ bool issues() const { return !kConfig.cached || lane == 0; }

    __device__ __forceinline__ const WorkTile& next_tile() {
        if constexpr (!kConfig.cached) {
            return scheduler.next();
        } else {
            if (lane == 0) scheduler.next();
            __syncwarp();
            return tiles[tiles.acquire(true)];
        }
    }
    __device__ __forceinline__ void choose_next() {
        if (issues()) scheduler.choose_next();
    }

    /// Is the last V of a tile loaded before the next tile is looked up? In a ragged call that takes two reads of
    /// memory one after the other, as long as a tile of a short sequence.
    __device__ __forceinline__ bool loads_v_early() const { return kConfig.takes_list() && launch.list != nullptr; }

    /// Loads the V block that is one behind K, if there is one.
    __device__ __forceinline__ void load_pending_v() {
        if (pending_v.exists) load_v(pending_v);
        pending_v.exists = false;
    }

    /// Without shared memory of its own, a tile's O aliases one stage of K and one of V, which the producer hands to
    /// the epilogue as if they were loaded. They come after the next tile's first K and this tile's last V: so loads
    /// that the consumers wait for never wait for O to leave.
    __device__ __forceinline__ void hand_stages_to_epilogue() {
        if constexpr (!kConfig.own_o()) {
            shared.k_ring.producer_acquire(k);
            if (issues()) ptx::mbarrier_arrive(shared.k_ring.full[k.index()]);
            k.advance();
            shared.v_ring.producer_acquire(v);
            if (issues()) ptx::mbarrier_arrive(shared.v_ring.full[v.index()]);
            v.advance();
        }
    }

    __device__ __forceinline__ void load_q(const WorkTile& tile, int batch) {
        shared.q_ring.producer_acquire(q);
        if (issues()) issue_q(tile, batch);
        q.advance();
    }
    __device__ __forceinline__ void issue_q(const WorkTile& tile, int batch) {
        ptx::Mbarrier& full = shared.q_ring.full[q.index()];
        const int rows = launch.pack.query(64);
        const int row_blocks = kConfig.skips_blocks()
                                   ? min((tile.q_end - tile.q_begin + rows - 1) / rows, kConfig.consumers)
                                   : kConfig.consumers;
        ptx::mbarrier_arrive_expect(full, row_blocks * sizeof(shared.q[0][0]));
        int row = tile.first_q + tile.q_begin;
        for (int w = 0; w < row_blocks; ++w, row += rows) {
#pragma unroll
            for (int s = 0; s < kConfig.qk_panels(); ++s) {  // the map's coordinates are (dim, heads, len, batch)
                ptx::tma_load_4d(shared.q[q.index()][w][s], launch.q, s * kPanelColumns, tile.head, row, batch, full,
                                 ptx::CacheHint::evict_first);
            }
        }
    }
    __device__ __forceinline__ void load_k(const Block& block) {
        shared.k_ring.producer_acquire(k);
        ptx::Mbarrier& full = shared.k_ring.full[k.index()];
        load(shared.k[k.index()], launch.k, block, full);
        k.advance();
    }
    __device__ __forceinline__ void load_v(const Block& block) {
        shared.v_ring.producer_acquire(v);
        ptx::Mbarrier& full = block.partial ? shared.v_unsanitized[v.index()] : shared.v_ring.full[v.index()];
        load(shared.v[v.index()], launch.v, block, full);
        v.advance();
    }
    template <class Panel, int kPanels>
    __device__ __forceinline__ void load(Panel (&panels)[kPanels], const CUtensorMap& map, const Block& block,
                                         ptx::Mbarrier& full) {
        if (!issues()) return;
        if constexpr (kConfig.cached) {
            if (in_pages()) return load_pages(panels, map, block, full);
        }
        ptx::mbarrier_arrive_expect(full, sizeof(panels));
        copy_in(panels, map, block.row, block.head, block.batch, full, ptx::CacheHint::evict_last);
    }

    __device__ __forceinline__ bool in_pages() const { return launch.cache.pages != nullptr; }
    /// The index by which a sequence's keys are found: its own in the page table, or its slot.
    __device__ __forceinline__ int slot_or_sequence(int sequence) const {
        const Cache& cache = launch.cache;
        return cache.slots == nullptr ? sequence : cache.slots[sequence * cache.slots_step];
    }

    /// Finds the pages of a block of keys before its stages are free, a lane for each box of page_rows rows. `keys`:
    /// the sequence's keys from the block's first on. Boxes without keys are left out, so that no entry of the page
    /// table behind the sequence is read: their rows are hidden, and those of V sanitized.
    __device__ __forceinline__ void find_boxes(Block& block, int keys) {
        const Cache& cache = launch.cache;
        const int rows = launch.page_rows;
        block.boxes = (min(keys, kConfig.block_kv) + rows - 1) / rows;
        block.box_set = box_set;
        box_set ^= 1;
        __syncwarp();  // lane 0 has loaded the V that was here
        if (lane < block.boxes) {
            const int row = block.row + lane * rows;
            const int number = cache.page_size.quotient(row);
            shared.boxes.of_block[block.box_set][lane] = {
                row - number * cache.page_size.divisor(),
                cache.pages[block.batch * cache.pages_batch + number * cache.pages_step]};
        }
        __syncwarp();
    }

    /// Loads a block of keys from their pages. A page that does not exist is zeros.
    template <class Panel, int kPanels>
    __device__ __forceinline__ void load_pages(Panel (&panels)[kPanels], const CUtensorMap& map, const Block& block,
                                               ptx::Mbarrier& full) {
        const int rows = launch.page_rows;
        ptx::mbarrier_arrive_expect(full, block.boxes * rows * kPanels * kPanelRowBytes);
        const PageBox* box = shared.boxes.of_block[block.box_set];
        int row = 0;
#pragma unroll 4
        for (int i = 0; i < block.boxes; ++i, row += rows) {
            const PageBox at = box[i];
#pragma unroll
            for (int s = 0; s < kPanels; ++s) {
                ptx::tma_load_4d(&panels[s][row], map, s * kPanelColumns, at.row, block.head, at.page, full,
                                 ptx::CacheHint::evict_last);
            }
        }
    }
};

/// Sets NaN and infinities of one V tile to 0. Returns whether this warp found any.
template <class T, int kBytes>
__device__ __forceinline__ bool sanitize(void* tile, int thread) {
    constexpr int kChunks = kBytes / static_cast<int>(sizeof(uint4));
    constexpr int kThreads = 32 * kSanitizeWarps;
    constexpr int kAtOnce = 4;  // loads in flight
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
    return any_lane(found);
}

/// Sanitizes V of partial blocks, in which some row does not see some key: a hidden probability is 0, but 0 * NaN is
/// NaN. Non-finite elements of V become 0 before the consumers see the block; restore_nonfinite() adds them to the rows
/// that see them. `thread`: index in the sanitizing warps.
template <class T, Config kConfig>
__device__ __forceinline__ void sanitize_v(Shared<kConfig>& shared, int thread) {
    PipelineState<kConfig.kv_stages> v;
    StagePhases unsanitized;
    TileReader tiles{shared.tiles};
    while (true) {
        const int slot = tiles.acquire();
        const WorkTile tile = tiles[slot];
        tiles.release(slot, thread % 32);
        if (!tile.exists) return;
        for (int n = tile.blocks.end - 1; n >= tile.blocks.begin; --n, v.advance()) {
            if (!tile.blocks.partial(n)) continue;
            unsanitized.wait(shared.v_unsanitized[v.index()], v.index());
            // The consumers hold the tile's slot until its last V.
            if (sanitize<T, sizeof(shared.v[0])>(shared.v[v.index()], thread)) {
                shared.tiles.tiles[slot].v_is_sanitized = true;
            }
            ptx::fence_proxy_async();
            ptx::named_barrier_sync(kSanitizeBarrier, 32 * kSanitizeWarps);
            if (thread == 0) ptx::mbarrier_arrive(shared.v_ring.full[v.index()]);
        }
        if (!kConfig.own_o() && tile.has_keys()) v.advance();  // skips the stage that the epilogue uses
    }
}

}  // namespace tessera::cuda::fa3
