// SPDX-License-Identifier: Apache-2.0
//
// The tile scheduler of the persistent grid, which decides the order of the query tiles. The producer picks a tile,
// works out the key blocks that it needs (causal tiles past the diagonal are skipped here), and passes it to the other
// warps.
#pragma once

#include "cuda/fa3/forward/launch.hpp"
#include "cuda/fa3/host/block_range.hpp"
#include "cuda/tile/cache.cuh"
#include "cuda/tile/pipeline.cuh"

namespace tessera::cuda::fa3 {

/// One tile of queries, and the K/V blocks that it needs. 32 bits suffice, since longer tensors are refused, and save
/// registers.
struct WorkTile {
    int batch, head, kv_head;  ///< head: the first of those that PackGQA put into the tile
    int first_q, first_kv;     ///< rows of the tensors where a varlen sequence begins; 0 when dense. In a cache,
                               ///< first_kv counts from the slot's first row
    int q_begin, q_end;        ///< queries of the sequence; an empty range past a varlen sequence's end
    int low, high, last_key;   ///< the band: query q sees keys q + low to q + high, up to last_key
    BlockRange blocks;
    int rotation;         ///< how its row blocks rotate over the warpgroups (row_block_of)
    bool v_is_sanitized;  ///< a NaN or infinity was taken out of V; known once the last V is there
    bool exists;          ///< it has queries. In the ring, false ends the stream: no tile comes after it

    __device__ __forceinline__ bool has_keys() const { return blocks.begin < blocks.end; }
    __device__ __forceinline__ Band32 band() const { return {low, high, last_key}; }
};

/// The two rows of a tile that a consumer thread holds (ptx/wgmma.cuh).
struct ThreadRows {
    int query[2];
    int head[2];

    /// `row`: the first one, in the tile.
    __device__ __forceinline__ ThreadRows(const WorkTile& tile, PackGqa pack, int row)
        : query{tile.q_begin + pack.query(row), tile.q_begin + pack.query(row + 8)},
          head{tile.head + pack.head(row), tile.head + pack.head(row + 8)} {}
};

/// Sets the tile's band to that of its sequence.
__device__ __forceinline__ void set_band(WorkTile& tile, const Mask& mask, const Sequence& sequence) {
    const Band band = mask.bind(sequence.len_q, sequence.len_kv);
    tile.low = static_cast<int>(band.low);
    tile.high = static_cast<int>(band.high);
}

/// An item of the list. Not by the read-only cache: the kernel before this one may still be writing when it starts.
__device__ __forceinline__ ListedSequence read_item(const ListedSequence* item) {
    const auto* words = reinterpret_cast<const int4*>(item);
    const int4 first = __ldcg(words), second = __ldcg(words + 1);
    return {first.x, first.y, first.z, first.w, second.x, second.y, {}};
}

/// The tile at an index of the launch order. `items`: tiles of a head, in a call with a list.
template <Config kConfig>
__device__ __forceinline__ WorkTile tile_at(const Launch& launch, int index, int items) {
    const ForwardParams& p = launch.params;
    const bool listed = kConfig.takes_list() && launch.list != nullptr;
    const TileIndex at = listed ? launch.order.listed(index, items) : launch.order[index];
    WorkTile tile;
    int block = at.block;
    const int queries = launch.pack.query(kConfig.block_q());
    Sequence sequence{0, 0, p.len_q, p.len_kv};
    tile.low = launch.low;
    tile.high = launch.high;
    if (p.cu_seqlens_q == nullptr) {
        tile.batch = launch.packed_heads.quotient(at.head);
        tile.head = (at.head - tile.batch * launch.packed_heads.divisor()) << launch.pack.shift;
    } else {
        tile.head = at.head << launch.pack.shift;
        if (listed) {
            const int item = launch.order.q_blocks() - 1 - at.block;  // the list ends with the order's block 0
            const ListedSequence own = read_item(launch.list + item);
            sequence = {own.first_q, own.first_kv, own.len_q, own.len_kv};
            block = launch.tile_queries.quotient(own.len_q + queries - 1) - 1 - (item - own.first_item);
            tile.batch = own.batch;
        } else {
            const QueryTile of = ragged_tile(p, at.block, queries);
            block = of.block;
            tile.batch = of.batch;
            if constexpr (!kConfig.cached) sequence = sequence_of(p, tile.batch);
        }
        if constexpr (!kConfig.cached) set_band(tile, p.mask, sequence);
    }
    if constexpr (kConfig.cached) {
        sequence = cached_sequence_of(p, launch.cache, tile.batch).sequence;
        set_band(tile, p.mask, sequence);
    }
    tile.kv_head = launch.group.quotient(tile.head);
    tile.first_q = static_cast<int>(sequence.first_q);
    tile.first_kv = static_cast<int>(sequence.first_kv);
    tile.q_begin = block * queries;
    tile.q_end = min(tile.q_begin + queries, sequence.len_q);
    tile.exists = tile.q_begin < tile.q_end;
    tile.last_key = sequence.len_kv - 1;
    tile.blocks = blocks_of<kConfig.block_kv>(tile.q_begin, tile.q_end, tile.band());
    tile.v_is_sanitized = false;
    return tile;
}

/// Tiles of one thread block, on their way from the producer to the other warps.
inline constexpr int kTileStages = 4;

struct TileRing {
    Ring<kTileStages> ring;
    WorkTile tiles[kTileStages];
};

/// The producer's side of the scheduler. Dynamic: a counter in the workspace hands the next tile to whichever thread
/// block is free. Static, without the queue: round-robin.
template <Config kConfig>
struct TileScheduler {
    const Launch& launch;
    TileRing& ring;
    PipelineState<kTileStages> state{};
    int next_index = static_cast<int>(blockIdx.x);
    int rotation = 0;
    int items = 0;  ///< with a list: its length

    /// Waits for the list, if there is one.
    __device__ __forceinline__ void start() {
        if (!kConfig.takes_list() || launch.list == nullptr) return;
        ptx::griddepcontrol_wait();
        items = __ldcg(&launch.queue->items);
    }

    /// The next tile that has queries; it is passed to the other warps too. The reference stays valid for three more
    /// calls. Every call except the first needs a choose_next() before it.
    __device__ __forceinline__ const WorkTile& next() {
        ring.ring.producer_acquire(state);
        WorkTile& tile = ring.tiles[state.index()];
        tile.exists = false;
        while (next_index < tiles()) {
            tile = tile_at<kConfig>(launch, next_index, items);
            if (tile.exists) break;
            choose_next();
        }
        tile.rotation = rotation;
        if (kConfig.skips_blocks()) rotation = next_rotation(rotation, kConfig.consumers);
        ptx::mbarrier_arrive(ring.ring.full[state.index()]);
        state.advance();
        return tile;
    }
    /// Chooses the next tile. Called as late as its loads allow, when it is better known which thread block is free.
    __device__ __forceinline__ void choose_next() {
        const int blocks = static_cast<int>(gridDim.x);
        if (launch.queue == nullptr) {
            next_index += blocks;
        } else {
            ptx::griddepcontrol_wait();  // the counter was reset
            next_index = blocks + static_cast<int>(atomicAdd(&launch.queue->taken, 1));
        }
    }
    __device__ __forceinline__ int tiles() const {
        if (kConfig.takes_list() && launch.list != nullptr) return launch.order.listed_tiles(items);
        return launch.order.tiles();
    }
};

/// The other warps' side; each has one. A tile is named by its slot in the ring, from acquire() to release().
struct TileReader {
    TileRing& ring;
    PipelineState<kTileStages> state{};

    __device__ __forceinline__ const WorkTile& operator[](int slot) const { return ring.tiles[slot]; }
    /// Is the next tile there already? Doesn't wait.
    __device__ __forceinline__ bool is_next_ready() const { return ring.ring.is_full(state); }
    /// Slot of the next tile. `is_ready`: it is known to be there.
    __device__ __forceinline__ int acquire(bool is_ready = false) {
        if (!is_ready) ring.ring.consumer_wait(state);
        const int slot = state.index();
        state.advance();
        return slot;
    }
    __device__ __forceinline__ void release(int slot, int lane) {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ring.ring.empty[slot]);
    }
};

}  // namespace tessera::cuda::fa3
