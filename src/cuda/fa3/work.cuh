// SPDX-License-Identifier: Apache-2.0
//
// Which tile of queries comes when. Every role of a block walks the same list, so that nobody has to be told.
#pragma once

#include "cuda/fa3/launch.hpp"
#include "cuda/tile/member.cuh"
#include "cuda/tile/pipeline.cuh"

namespace tessera::cuda::fa3 {

/// One tile of queries of one head, and the K/V blocks that it needs. 32 bits are enough: the kernel refuses longer
/// tensors, and registers are short.
template <int kBlockQ, int kBlockKv>
struct Work {
    int batch, head;
    int first_q, first_kv;     ///< rows where a ragged member begins
    int q_begin, q_end;        ///< queries; none past the end of a ragged member
    int n_begin, n_end;        ///< blocks of keys
    int full_begin, full_end;  ///< of these, the blocks whose every pair is visible
    int low, high;             ///< key k is visible to query q if q + low <= k <= q + high ...
    int last_key;              ///< ... and k <= last_key

    __device__ __forceinline__ Work(const Launch& launch, int index) {
        const ForwardParams& p = launch.params;
        const int per_group = launch.heads_together * launch.q_blocks;
        const int group = index / per_group;
        const int first_head = group * launch.heads_together;
        const int heads_here = min(launch.heads_together, static_cast<int>(p.batch) * p.heads_q - first_head);
        const int within = index - group * per_group;
        const int batch_head = first_head + within % heads_here;
        batch = batch_head / p.heads_q;
        head = batch_head - batch * p.heads_q;
        const Member member = member_of(p, batch);
        first_q = static_cast<int>(member.first_q);
        first_kv = static_cast<int>(member.first_kv);
        // From the last queries to the first: under a causal mask the longest tiles go first and the short ones fill
        // up.
        q_begin = (launch.q_blocks - 1 - within / heads_here) * kBlockQ;
        q_end = min(q_begin + kBlockQ, member.len_q);
        const Band band = p.mask.bind(member.len_q, member.len_kv);
        low = static_cast<int>(band.low);
        high = static_cast<int>(band.high);
        last_key = member.len_kv - 1;
        const Range keys = band.kv_range(q_begin, q_end);
        n_begin = static_cast<int>(keys.begin) / kBlockKv;
        n_end = keys.empty() ? n_begin : (static_cast<int>(keys.end) + kBlockKv - 1) / kBlockKv;
        // Full: the last query sees the first key of the block, and the first query its last.
        full_begin = (max(q_end - 1 + low, 0) + kBlockKv - 1) / kBlockKv;
        full_end = (min(q_begin + high, last_key) + 1) / kBlockKv;
    }

    __device__ __forceinline__ bool exists() const { return q_begin < q_end; }
    __device__ __forceinline__ bool has_keys() const { return exists() && n_begin < n_end; }
    /// Does block n hold a pair that is not visible?
    __device__ __forceinline__ bool partial(int n) const { return n < full_begin || n >= full_end; }
    __device__ __forceinline__ bool visible(int query, int key) const {
        return key >= query + low && key <= query + high && key <= last_key;
    }
};

/// The tiles of one block of a persistent grid. The producer decides, and tells the other roles through a ring; the
/// index after the last is kNoTile. With a counter, tiles go to whoever is free (Launch::next_tile).
inline constexpr int kNoTile = -1;
inline constexpr int kTileStages = 2;

struct TileRing {
    Ring<kTileStages> ring;
    int index[kTileStages];
};

/// The producer's side.
struct TileSource {
    const Launch& launch;
    TileRing& tiles;
    RingPosition<kTileStages> position{};
    int upcoming = static_cast<int>(blockIdx.x);

    __device__ __forceinline__ int next() {
        const int index = upcoming < launch.tiles ? upcoming : kNoTile;
        position.wait_empty(tiles.ring);
        tiles.index[position.stage()] = index;
        ptx::mbarrier_arrive(tiles.ring.full[position.stage()]);
        position.advance();
        const int blocks = static_cast<int>(gridDim.x);
        // Asked for a tile ahead: the answer comes while this one is loaded.
        upcoming =
            launch.next_tile == nullptr ? upcoming + blocks : blocks + static_cast<int>(atomicAdd(launch.next_tile, 1));
        return index;
    }
};

/// The other roles' side; each of their warps has one.
struct TileReader {
    TileRing& tiles;
    RingPosition<kTileStages> position{};

    __device__ __forceinline__ int next(int lane) {
        position.wait_full(tiles.ring);
        const int index = tiles.index[position.stage()];
        __syncwarp();
        if (lane == 0) position.release(tiles.ring);
        position.advance();
        return index;
    }
};

}  // namespace tessera::cuda::fa3
