// SPDX-License-Identifier: Apache-2.0
//
// What a thread block of a kernel whose queries are outer works on.
#pragma once

#include "cuda/fa3/backward/launch.hpp"
#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::fa3::backward {

inline constexpr int kDeltaBlockQ = 64 * Config::kConsumers;

/// Which tile of a head a thread block has: from the last to the first, as under a causal mask the longest come first.
struct QueryPlace {
    int batch_head, tile;
};

/// Head by head.
__device__ __forceinline__ QueryPlace place_by_heads(const Launch& launch, int number) {
    const int tiles = (launch.params.forward.len_q + kDeltaBlockQ - 1) / kDeltaBlockQ;
    const int batch_head = number / tiles;
    return {batch_head, tiles - 1 - (number - batch_head * tiles)};
}

/// Some heads, which take turns.
__device__ __forceinline__ QueryPlace place_in_turn(const Launch& launch) {
    const ForwardParams& p = launch.params.forward;
    const int tiles = (p.len_q + kDeltaBlockQ - 1) / kDeltaBlockQ;
    const int round = launch.of_query_round.quotient(static_cast<int>(blockIdx.x));
    const int left = static_cast<int>(blockIdx.x) - round * launch.of_query_round.divisor();
    const int first_head = round * launch.query_heads.divisor();
    const int beyond = static_cast<int>(p.batch) * p.heads_q - first_head;
    const Divider& heads = beyond < launch.query_heads.divisor() ? launch.last_query_heads : launch.query_heads;
    const int started = heads.quotient(left);
    return {first_head + left - started * heads.divisor(), tiles - 1 - started};
}

/// Tiles of queries, of all heads.
__host__ __device__ __forceinline__ std::int64_t query_tiles(const ForwardParams& p) {
    return std::int64_t{p.batch} * p.heads_q * ((p.len_q + kDeltaBlockQ - 1) / kDeltaBlockQ);
}

/// Of its group's, the share that a query head is in.
__device__ __forceinline__ int share_of(const Launch& launch, int head, int share_heads) {
    return head % launch.params.forward.group / share_heads;
}
/// In fp16: of a query head's kv head and share.
__device__ __forceinline__ Limits& limits_of(const Launch& launch, int batch, int head, int share_heads) {
    const ForwardParams& p = launch.params.forward;
    return launch.limits[(std::int64_t{batch} * p.heads_kv + head / p.group) * launch.shares +
                         share_of(launch, head, share_heads)];
}

/// The tile of queries that a thread block of the delta kernel works on.
template <Config kConfig>
struct QueryTile {
    BlocksOf<kConfig> blocks;
    int batch, head;
    int first_q, first_kv;
    std::int64_t first_block;  ///< of the tile's queries, among all
    int query;                 ///< first
    int n_begin, n_end;        ///< blocks of keys

    __device__ __forceinline__ QueryTile(const Launch& launch, const QueryPlace& place) {
        const ForwardParams& p = launch.params.forward;
        const int batch_head = place.batch_head;
        query = place.tile * kDeltaBlockQ;
        batch = batch_head / p.heads_q;
        head = batch_head - batch * p.heads_q;
        const Sequence sequence = sequence_of(p, batch);
        first_q = static_cast<int>(sequence.first_q);
        first_kv = static_cast<int>(sequence.first_kv);
        blocks.set_of(launch.blocks, p.cu_seqlens_q != nullptr, p.mask, sequence.len_q, sequence.len_kv, p.group,
                      p.heads_kv);
        first_block = std::int64_t{head} * launch.blocks_q +
                      first_block_q(p, kConfig.block_q, batch, sequence.first_q) + query / kConfig.block_q;
        n_begin = 0;
        n_end = 0;
        for (int m = query / kConfig.block_q; m < (query + kDeltaBlockQ) / kConfig.block_q; ++m) {
            if (m >= blocks.count_q) break;
            const Span keys = blocks.keys_of(m);
            if (keys.begin >= keys.end) continue;
            n_begin = n_end == 0 ? keys.begin : min(n_begin, keys.begin);
            n_end = max(n_end, keys.end);
        }
    }

    /// Of the group's query heads, this one's.
    __device__ __forceinline__ int share(const Launch& launch) const {
        return share_of(launch, head, blocks.share_heads);
    }
    /// Of the kv head and this share of its query heads.
    __device__ __forceinline__ Limits& limits(const Launch& launch) const {
        return limits_of(launch, batch, head, blocks.share_heads);
    }
    /// Which block of the tile queries 64 * part, ... are in.
    __device__ __forceinline__ static int block_of(int part) { return 64 * part / kConfig.block_q; }
    /// Are these queries of a block that exists? Its last ones may not exist themselves.
    __device__ __forceinline__ bool has_stats(int part) const {
        return query + block_of(part) * kConfig.block_q < blocks.len_q;
    }
};

/// With the residual of O, is there nothing to be done in these queries?
template <Config kConfig>
__device__ __forceinline__ bool done_from_output(const Launch& launch, const QueryTile<kConfig>& tile) {
    if (launch.o_residual.data == nullptr) return false;
    for (int w = 0; w < Config::kConsumers; ++w) {
        if (!tile.has_stats(w)) continue;
        if (launch.workspace.stats[tile.first_block * kConfig.row_stats() + w].some_large != 0) return false;
    }
    return true;
}

/// 64 queries of a head.
template <Config kConfig>
struct QueryRows {
    BlocksOf<kConfig> blocks;
    int batch, head;
    int first_q;                 ///< row where a ragged sequence begins
    std::int64_t first_block_q;  ///< of the sequence and head, among all
    int query;                   ///< first

    __device__ __forceinline__ QueryRows(const Launch& launch, int of_batch, int of_head, int first)
        : batch(of_batch), head(of_head), query(first) {
        const ForwardParams& p = launch.params.forward;
        const Sequence sequence = sequence_of(p, batch);
        first_q = static_cast<int>(sequence.first_q);
        blocks.set_of(launch.blocks, p.cu_seqlens_q != nullptr, p.mask, sequence.len_q, sequence.len_kv, p.group,
                      p.heads_kv);
        first_block_q =
            std::int64_t{head} * launch.blocks_q + backward::first_block_q(p, kConfig.block_q, batch, sequence.first_q);
    }
    /// The block of queries that they are in, among those of all heads.
    __device__ __forceinline__ std::int64_t block() const { return first_block_q + query / kConfig.block_q; }
    /// Does it exist? Its last queries may not exist themselves.
    __device__ __forceinline__ bool exists() const { return query / kConfig.block_q < blocks.count_q; }
    /// Which RowStats are theirs.
    __device__ __forceinline__ std::int64_t stats() const {
        return block() * kConfig.row_stats() + query % kConfig.block_q / Config::kRows;
    }
    /// Of the kv head and their share of its query heads.
    __device__ __forceinline__ Limits& limits(const Launch& launch) const {
        return limits_of(launch, batch, head, blocks.share_heads);
    }
};

/// How many have added to this block of dQ: none.
__device__ __forceinline__ void clear_counters(const Launch& launch, std::int64_t block) {
    const std::int64_t all = std::int64_t{launch.params.forward.heads_q} * launch.blocks_q;
    for (int sum = 0; sum < launch.sums; ++sum) {
        for (int half = 0; half < Config::kConsumers; ++half) {
            launch.workspace.counters[(sum * all + block) * Config::kConsumers + half] = 0;
        }
    }
}

/// Does cu_seqlens fall here?
__device__ __forceinline__ bool falls(const ForwardParams& p, int batch) {
    if (p.cu_seqlens_q == nullptr) return false;
    return cu_seqlens_at(p.cu_seqlens_q, (batch + std::int64_t{1}) * p.cu_stride_q, p.cu_q_is_64, p.total_q) <
           cu_seqlens_at(p.cu_seqlens_q, batch * p.cu_stride_q, p.cu_q_is_64, p.total_q);
}

}  // namespace tessera::cuda::fa3::backward
