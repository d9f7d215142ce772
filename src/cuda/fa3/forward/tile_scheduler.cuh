// SPDX-License-Identifier: Apache-2.0
//
// The tile scheduler of the persistent grid: which tile of queries comes when. The producer decides, works out what the
// tile needs, and tells the other roles.
#pragma once

#include "cuda/fa3/forward/launch.hpp"
#include "cuda/fa3/host/block_range.hpp"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::fa3 {

/// One tile of queries of one head, and the K/V blocks that it needs. 32 bits are enough: the kernel refuses longer
/// tensors, and registers are short.
struct WorkTile {
    int batch, head, kv_head;  ///< head: the first one of those that are stacked
    int first_q, first_kv;     ///< rows where a ragged sequence begins
    int q_begin, q_end;        ///< queries; none past the end of a ragged sequence
    int low, high;             ///< key k is visible to query q if q + low <= k <= q + high ...
    int last_key;              ///< ... and k <= last_key
    BlockRange blocks;
    int rotation;  ///< of its slices, where they go round (slice_of)
    bool dirty;    ///< the guard took a NaN or infinity out of a V; known when the last V is there
    bool exists;   ///< it has queries. In the ring, false is the end: no tile comes after it

    __device__ __forceinline__ bool has_keys() const { return blocks.begin < blocks.end; }
    __device__ __forceinline__ Visibility visible() const { return {low, high, last_key}; }
};

/// The two rows of a tile that a thread of a consumer holds (ptx/wgmma.cuh).
struct ThreadRows {
    int query[2];
    int head[2];

    /// `row`: the first one, in the tile.
    __device__ __forceinline__ ThreadRows(const WorkTile& tile, HeadStack stack, int row)
        : query{tile.q_begin + stack.query(row), tile.q_begin + stack.query(row + 8)},
          head{tile.head + stack.head(row), tile.head + stack.head(row + 8)} {}
};

/// The tile of a place in the order of the work. Of pairs: of two tiles in the same order, or of two heads, this thread
/// block's one.
template <Config kConfig>
__device__ __forceinline__ WorkTile tile_at(const Launch& launch, int index) {
    const ForwardParams& p = launch.params;
    const TilePlace place = launch.order[index];
    WorkTile tile;
    int block = kConfig.pairs && !kConfig.pairs_of_heads ? 2 * place.block + ptx::cluster_rank() : place.block;
    const int queries = launch.stack.query(kConfig.block_q());
    Sequence sequence{0, 0, p.len_q, p.len_kv};
    tile.low = launch.low;
    tile.high = launch.high;
    if (p.cu_seqlens_q == nullptr) {
        tile.batch = launch.stacks.quotient(place.head);
        tile.head = (place.head - tile.batch * launch.stacks.divisor()) << launch.stack.shift;
        if constexpr (kConfig.pairs_of_heads) tile.head = 2 * tile.head + ptx::cluster_rank();
    } else {
        const QueryTile of = ragged_tile(p, place.block, queries);
        block = of.block;
        tile.batch = of.batch;
        tile.head = place.head << launch.stack.shift;
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
    // The second tile of a pair may have no queries: the first one's K and V come to it, too.
    tile.exists = kConfig.pairs || tile.q_begin < tile.q_end;
    tile.last_key = sequence.len_kv - 1;
    tile.blocks = blocks_of<kConfig.block_kv>(tile.q_begin, tile.q_end, tile.visible());
    tile.dirty = false;
    return tile;
}

/// The tiles of one block of a persistent grid, on their way from the producer to the other roles.
inline constexpr int kTileStages = 4;

struct TileRing {
    Ring<kTileStages> ring;
    WorkTile tiles[kTileStages];
};

/// What the first thread block of a pair draws from the counter, on its way to the second. The first is at most three
/// draws ahead: both bring halves of every block, the stages of K are two, and every tile has a block.
struct DrawnTiles {
    static constexpr int kStages = 4;

    ptx::Mbarrier here[kStages];
    std::uint32_t drawn[kStages];

    __device__ void init() {
        for (auto& barrier : here) ptx::mbarrier_init(barrier, 1);
    }
};

/// The scheduler, on the producer's side. With a counter, tiles go to whoever is free (Launch::next_tile); without,
/// they go round.
template <Config kConfig>
struct TileScheduler {
    static constexpr int kBlocks = kConfig.pairs ? 2 : 1;  ///< that take a place in the order together

    const Launch& launch;
    TileRing& ring;
    DrawnTiles* pair;  ///< with pairs_of_heads
    RingPosition<kTileStages> position{};
    int upcoming = static_cast<int>(blockIdx.x) / kBlocks;
    int rotation = 0;

    /// The next tile that has queries; the other roles are told of it. It may be read until three more were asked for.
    /// Before each call but the first, choose_upcoming() has to be called.
    __device__ __forceinline__ const WorkTile& next() {
        position.wait_empty(ring.ring);
        WorkTile& tile = ring.tiles[position.stage()];
        tile.exists = false;
        if constexpr (kConfig.pairs_of_heads) tell_pair();
        while (upcoming < launch.order.tiles()) {
            tile = tile_at<kConfig>(launch, upcoming);
            if (tile.exists) break;
            choose_upcoming();
        }
        tile.rotation = rotation;
        if (kConfig.skips_blocks()) rotation = next_rotation(rotation, kConfig.consumers);
        ptx::mbarrier_arrive(ring.ring.full[position.stage()]);
        position.advance();
        return tile;
    }
    /// Decides which tile is next. As late as the answer can still come in time: who is free is known better then.
    __device__ __forceinline__ void choose_upcoming() {
        const int blocks = static_cast<int>(gridDim.x) / kBlocks;
        if (launch.next_tile == nullptr) {
            upcoming += blocks;
        } else {
            if (kConfig.pairs_of_heads && ptx::cluster_rank() != 0) return;
            ptx::griddepcontrol_wait();  // the counter is 0
            upcoming = blocks + static_cast<int>(atomicAdd(launch.next_tile, 1));
        }
    }

    // Of a pair of heads the first thread block draws, and tells the second: not before the answer is wanted.
    RingPosition<DrawnTiles::kStages> told{};
    bool drew = false;  ///< not before the first tile
    __device__ __forceinline__ void tell_pair() {
        if (drew && launch.next_tile != nullptr) {
            const int stage = told.stage();
            if (ptx::cluster_rank() == 0) {
                ptx::st_async(pair->drawn[stage], static_cast<std::uint32_t>(upcoming), pair->here[stage], 1);
            } else {
                ptx::mbarrier_arrive_expect(pair->here[stage], sizeof(pair->drawn[0]));
                wait(pair->here[stage], told.phase());
                upcoming = static_cast<int>(*static_cast<volatile std::uint32_t*>(&pair->drawn[stage]));
            }
            told.advance();
        }
        drew = true;
    }
};

/// The other roles' side; each of their warps has one. A tile is named by its place in the ring, from open() to
/// close().
struct TileReader {
    TileRing& ring;
    RingPosition<kTileStages> position{};

    __device__ __forceinline__ const WorkTile& operator[](int place) const { return ring.tiles[place]; }
    /// Is the next one there already? Doesn't wait.
    __device__ __forceinline__ bool is_next_here() const { return position.is_full(ring.ring); }
    __device__ __forceinline__ int open(bool is_here = false) {
        if (!is_here) position.wait_full(ring.ring);
        const int place = position.stage();
        position.advance();
        return place;
    }
    __device__ __forceinline__ void close(int place, int lane) {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ring.ring.empty[place]);
    }
};

}  // namespace tessera::cuda::fa3
