// SPDX-License-Identifier: Apache-2.0
//
// The work of a CTA or a warp whose outer loop is over queries: a tile of 128 queries, or 64 rows of them.
#pragma once

#include "cuda/fa3/backward/launch.hpp"
#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::fa3::backward {

/// A tile's number, head by head.
__device__ __forceinline__ QueryTileNumber tile_by_head(const Launch& launch, int number) {
    const int tiles = launch.query_tiles.tiles;
    const int batch_head = number / tiles;
    return {batch_head, tiles - 1 - (number - batch_head * tiles)};
}

/// Query tiles of all heads.
__host__ __device__ __forceinline__ std::int64_t query_tile_count(const Launch& launch) {
    return std::int64_t{launch.query_tiles.heads} * launch.query_tiles.tiles;
}

/// The head split that a query head is in.
__device__ __forceinline__ int split_of(const Launch& launch, int head, int heads_per_split) {
    return head % launch.params.forward.group / heads_per_split;
}
/// fp16: the bounds of a query head's kv head and head split.
__device__ __forceinline__ DsBounds& ds_bounds_of(const Launch& launch, int batch, int head, int heads_per_split) {
    const ForwardParams& p = launch.params.forward;
    return launch.workspace.ds_bounds[(std::int64_t{batch} * p.heads_kv + head / p.group) * launch.key_blocks.splits +
                                      split_of(launch, head, heads_per_split)];
}

/// A query block of a head.
struct QueryBlock {
    int batch, head;
    int m;  ///< ragged: may be no block of the sequence
};

/// Query blocks of all heads.
__host__ __device__ __forceinline__ std::int64_t query_block_count(const Launch& launch) {
    return std::int64_t{launch.params.forward.heads_q} * launch.blocks_q;
}

/// The query block of a number in [0, query_block_count()): sequence by sequence, and head by head in each; ragged: the
/// blocks of all sequences of a head after those of another.
template <Config kConfig>
__device__ __forceinline__ QueryBlock query_block_at(const Launch& launch, int number) {
    const ForwardParams& p = launch.params.forward;
    if (p.cu_seqlens_q != nullptr) {
        const int head = number / launch.blocks_q;
        const SequenceBlock own = launch.workspace.query_blocks[number - head * launch.blocks_q];
        return {own.batch, head, own.m};
    }
    const int blocks = (p.len_q + kConfig.block_q - 1) / kConfig.block_q;
    const int batch_head = number / blocks;
    const int batch = batch_head / p.heads_q;
    return {batch, batch_head - batch * p.heads_q, number - batch_head * blocks};
}

/// A tile of kQueryTile queries, one or two query blocks.
template <Config kConfig>
struct QueryTile {
    ScheduleOf<kConfig> schedule;
    int batch, head;
    int first_q, first_kv;
    std::int64_t first_block;  ///< index of the tile's first query block among those of all heads
    int query;                 ///< the tile's first query
    int n_begin, n_end;        ///< key blocks that it sees

    __device__ __forceinline__ QueryTile(const Launch& launch, const QueryTileNumber& number) {
        const ForwardParams& p = launch.params.forward;
        int tile = number.tile;
        if (p.cu_seqlens_q != nullptr) {
            const cuda::QueryTile of = ragged_tile(p, tile, Config::kQueryTile);
            batch = of.batch;
            head = number.batch_head;
            tile = of.block;
        } else {
            batch = number.batch_head / p.heads_q;
            head = number.batch_head - batch * p.heads_q;
        }
        query = tile * Config::kQueryTile;
        const Sequence sequence = sequence_of(p, batch);
        first_q = static_cast<int>(sequence.first_q);
        first_kv = static_cast<int>(sequence.first_kv);
        schedule.set_of(launch.schedule, p.cu_seqlens_q != nullptr, p.mask, sequence.len_q, sequence.len_kv, p.group);
        first_block = std::int64_t{head} * launch.blocks_q +
                      first_block_q(p, kConfig.block_q, batch, sequence.first_q) + query / kConfig.block_q;
        n_begin = 0;
        n_end = 0;
        for (int m = query / kConfig.block_q; m < (query + Config::kQueryTile) / kConfig.block_q; ++m) {
            if (!exists() || m >= schedule.count_q) break;
            const Span keys = schedule.key_blocks_of(m);
            if (keys.begin >= keys.end) continue;
            n_begin = n_end == 0 ? keys.begin : min(n_begin, keys.begin);
            n_end = max(n_end, keys.end);
        }
    }

    /// Has it queries? A ragged call numbers some tiles that no sequence has.
    __device__ __forceinline__ bool exists() const { return query >= 0 && query < schedule.len_q; }
    __device__ __forceinline__ int split(const Launch& launch) const {
        return split_of(launch, head, schedule.heads_per_split);
    }
    __device__ __forceinline__ DsBounds& ds_bounds(const Launch& launch) const {
        return ds_bounds_of(launch, batch, head, schedule.heads_per_split);
    }
    /// The tile's query block that has its query 64 * part.
    __device__ __forceinline__ static int block_of(int part) { return 64 * part / kConfig.block_q; }
    /// Are these queries in a query block that exists? The last of them may be past the end of the sequence.
    __device__ __forceinline__ bool has_stats(int part) const {
        return query + block_of(part) * kConfig.block_q < schedule.len_q;
    }
};

/// 64 queries of a head.
template <Config kConfig>
struct QueryRows {
    ScheduleOf<kConfig> schedule;
    int batch, head;
    int first_q;                 ///< row where a ragged sequence begins
    std::int64_t first_block_q;  ///< index of the sequence's first block of this head, among all query blocks
    int query;                   ///< the first of the 64 queries

    __device__ __forceinline__ QueryRows(const Launch& launch, int of_batch, int of_head, int first)
        : batch(of_batch), head(of_head), query(first) {
        const ForwardParams& p = launch.params.forward;
        const Sequence sequence = sequence_of(p, batch);
        first_q = static_cast<int>(sequence.first_q);
        schedule.set_of(launch.schedule, p.cu_seqlens_q != nullptr, p.mask, sequence.len_q, sequence.len_kv, p.group);
        first_block_q =
            std::int64_t{head} * launch.blocks_q + backward::first_block_q(p, kConfig.block_q, batch, sequence.first_q);
    }
    /// Their query block, among those of all heads.
    __device__ __forceinline__ std::int64_t block() const { return first_block_q + query / kConfig.block_q; }
    /// Does their query block exist? The last of them may be past the end of the sequence.
    __device__ __forceinline__ bool exists() const { return query >= 0 && query / kConfig.block_q < schedule.count_q; }
    /// The index of their RowStats.
    __device__ __forceinline__ std::int64_t stats() const {
        return block() * kConfig.row_stats() + query % kConfig.block_q / Config::kRows;
    }
    __device__ __forceinline__ DsBounds& ds_bounds(const Launch& launch) const {
        return ds_bounds_of(launch, batch, head, schedule.heads_per_split);
    }
};

/// Sets the dQ semaphores of a query block to 0.
__device__ __forceinline__ void clear_dq_semaphores(const Launch& launch, std::int64_t block) {
    const std::int64_t all = std::int64_t{launch.params.forward.heads_q} * launch.blocks_q;
    for (int accumulator = 0; accumulator < launch.dq_accumulators; ++accumulator) {
        for (int half = 0; half < Config::kConsumers; ++half) {
            launch.workspace.dq_semaphores[(accumulator * all + block) * Config::kConsumers + half] = 0;
        }
    }
}

}  // namespace tessera::cuda::fa3::backward
