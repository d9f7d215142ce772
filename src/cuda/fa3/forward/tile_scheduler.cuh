// SPDX-License-Identifier: Apache-2.0
//
// The tile scheduler of the persistent grid, which decides the order of the query tiles. The producer picks a tile,
// works out the key blocks that it needs (causal tiles past the diagonal are skipped here), and passes it to the other
// warps.
#pragma once

#include "cuda/fa3/forward/launch.hpp"
#include "cuda/fa3/host/block_range.hpp"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::fa3 {

/// One tile of queries, and the K/V blocks that it needs. 32 bits suffice, since longer tensors are refused, and save
/// registers.
struct WorkTile {
    int batch, head, kv_head;  ///< head: the first of those that PackGQA put into the tile
    int first_q, first_kv;     ///< rows of the tensors where a varlen sequence begins; 0 when dense
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

/// The tile at an index of the launch order. A cluster takes two tiles or two heads at once; the result is this thread
/// block's tile.
template <Config kConfig>
__device__ __forceinline__ WorkTile tile_at(const Launch& launch, int index) {
    const ForwardParams& p = launch.params;
    const TileIndex at = launch.order[index];
    WorkTile tile;
    int block =
        kConfig.cluster_multicast && !kConfig.cluster_over_heads ? 2 * at.block + ptx::cluster_rank() : at.block;
    const int queries = launch.pack.query(kConfig.block_q());
    Sequence sequence{0, 0, p.len_q, p.len_kv};
    tile.low = launch.low;
    tile.high = launch.high;
    if (p.cu_seqlens_q == nullptr) {
        tile.batch = launch.packed_heads.quotient(at.head);
        tile.head = (at.head - tile.batch * launch.packed_heads.divisor()) << launch.pack.shift;
        if constexpr (kConfig.cluster_over_heads) tile.head = 2 * tile.head + ptx::cluster_rank();
    } else {
        const QueryTile of = ragged_tile(p, at.block, queries);
        block = of.block;
        tile.batch = of.batch;
        tile.head = at.head << launch.pack.shift;
        sequence = sequence_of(p, tile.batch);
        const Band band = p.mask.bind(sequence.len_q, sequence.len_kv);
        tile.low = static_cast<int>(band.low);
        tile.high = static_cast<int>(band.high);
    }
    tile.kv_head = launch.group.quotient(tile.head);
    tile.first_q = static_cast<int>(sequence.first_q);
    tile.first_kv = static_cast<int>(sequence.first_kv);
    tile.q_begin = block * queries;
    tile.q_end = min(tile.q_begin + queries, sequence.len_q);
    // A cluster's second tile may have no queries: it still loads its half of K and V.
    tile.exists = kConfig.cluster_multicast || tile.q_begin < tile.q_end;
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

/// Tile indices that the first CTA of a cluster draws from the counter, on their way to the second. The first CTA is at
/// most three draws ahead: both load halves of every block, K has two stages, and every tile has a block.
struct ClusterTileIndices {
    static constexpr int kStages = 4;

    ptx::Mbarrier full[kStages];
    std::uint32_t index[kStages];

    __device__ void init() {
        for (auto& barrier : full) ptx::mbarrier_init(barrier, 1);
    }
};

/// The producer's side of the scheduler. Dynamic: a counter in the workspace (FlashAttention-3's tile_count_semaphore)
/// hands the next tile to whichever thread block is free. Static, without the counter: round-robin.
template <Config kConfig>
struct TileScheduler {
    static constexpr int kBlocks = kConfig.cluster_multicast ? 2 : 1;  ///< CTAs that share an index of the order

    const Launch& launch;
    TileRing& ring;
    ClusterTileIndices* cluster;  ///< with cluster_over_heads
    PipelineState<kTileStages> state{};
    int next_index = static_cast<int>(blockIdx.x) / kBlocks;
    int rotation = 0;

    /// The next tile that has queries, passed to the other warps too. The reference holds for three more calls.
    /// choose_next() comes before each call but the first.
    __device__ __forceinline__ const WorkTile& next() {
        ring.ring.producer_acquire(state);
        WorkTile& tile = ring.tiles[state.index()];
        tile.exists = false;
        if constexpr (kConfig.cluster_over_heads) share_next_index();
        while (next_index < launch.order.tiles()) {
            tile = tile_at<kConfig>(launch, next_index);
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
        const int blocks = static_cast<int>(gridDim.x) / kBlocks;
        if (launch.tile_counter == nullptr) {
            next_index += blocks;
        } else {
            if (kConfig.cluster_over_heads && ptx::cluster_rank() != 0) return;
            ptx::griddepcontrol_wait();  // the counter was reset
            next_index = blocks + static_cast<int>(atomicAdd(launch.tile_counter, 1));
        }
    }

    // With cluster_over_heads the first CTA draws an index and sends it to the second, when the second asks for it.
    PipelineState<ClusterTileIndices::kStages> index_state{};
    bool had_tile = false;  ///< false for the first tile, whose index is not drawn
    __device__ __forceinline__ void share_next_index() {
        if (had_tile && launch.tile_counter != nullptr) {
            const int stage = index_state.index();
            if (ptx::cluster_rank() == 0) {
                ptx::st_async(cluster->index[stage], static_cast<std::uint32_t>(next_index), cluster->full[stage], 1);
            } else {
                ptx::mbarrier_arrive_expect(cluster->full[stage], sizeof(cluster->index[0]));
                wait(cluster->full[stage], index_state.phase());
                next_index = static_cast<int>(*static_cast<volatile std::uint32_t*>(&cluster->index[stage]));
            }
            index_state.advance();
        }
        had_tile = true;
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
