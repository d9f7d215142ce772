// SPDX-License-Identifier: Apache-2.0
//
// Attention of the new queries: the splits of the keys as in cuda.decode.forward (compute_mma.cuh), with its bits. Four
// warps have a split: they wait for its query heads, norm and turn them (append.cuh), and put the new key into the tile
// of old ones that was loaded before.
#pragma once

#include "cuda/append/append.cuh"
#include "cuda/block/items.cuh"
#include "cuda/block/words.cuh"
#include "cuda/decode/compute_mma.cuh"

namespace tessera::cuda::block {

/// Loads the old keys of the CTA's splits: for each tile a stage of K and one of V. By a loading warp.
template <class Shape>
__device__ __forceinline__ void load_keys(const Block<Shape>& block, Position& at, int& turn) {
    const decode::Launch& attention = block.launch.attention;
    for_each_item(block, [&](const Item& item) {
        const int tiles = item.tiles();
        if (tiles == 0) return;
        const Member& member = block.shared.members[item.member];
        decode::SplitWork work{};
        work.member.slot = member.slot;
        work.member.sequence.first_kv = member.first_kv;
        work.batch = item.member;
        work.kv_head = item.kv_head;
        work.tile = item.tile;
        work.begin = item.keys.begin;
        work.end = item.keys.end - (item.newest ? 1 : 0);  // the new key is not in the cache yet
        // With two loading warps and two stages a tile, a warp has K or V of all tiles.
        const int which = turn;
        decode::KeyCopies<Shape> copies(attention, attention.loaded[which], block.lane);
        copies.begin(work);
        if (which == 1) block.next(at);
        for (int i = 0; i < tiles; ++i) {
            block.wait_empty(at);
            copies.copy_tile(block.stage(at), work, block.shared.full[at.stage]);
            block.next(at);
            if (which == 0 || i + 1 < tiles) block.next(at);
        }
    });
}

/// A head's row of the product of this launch, as the raw bits that append() takes. By a warp.
template <int kHeadDim>
__device__ __forceinline__ void read_head(Element* to, const Launch& launch, int member, int head, unsigned number,
                                          Wait wait, int lane) {
    const Word* from = launch.qkv_words + (std::int64_t{member} * launch.qkv.rows + head * kHeadDim) / 2;
    if (lane < kHeadDim / 4) {
        Word words[2];
        wait_for<1>(from + 2 * lane, 0, words, number, wait);
        reinterpret_cast<uint2*>(to)[lane] = {data_of(words[0]), data_of(words[1])};
    }
    __syncwarp();
}

/// Norm and rotary embedding of a head in shared memory, in place.
__device__ __forceinline__ void turn_head(Element* head, const Launch& launch, const append_rows::Numbers& norm,
                                          std::int64_t position, int lane) {
    if (norm.data == nullptr && launch.append.pairs == 0) return;
    const append_rows::HeadRow<Element> row{head, 1};
    append_rows::transform(row, row, launch.append, norm, position, lane);
    __syncwarp();
}

/// Makes Q of an item, and the new key if the item has it, which is also written to the cache. By the four warps of a
/// half, who then wait for each other.
template <class Shape>
__device__ __forceinline__ void prepare(const Block<Shape>& block, Half<Shape::kConfig.head_dim>& half,
                                        const Item& item, unsigned number) {
    constexpr int kHeadDim = Shape::kConfig.head_dim, kChunks = kHeadDim / kChunk;
    const Launch& launch = block.launch;
    const ForwardParams& p = launch.attention.params;
    const int lane = block.lane, slice = block.warp % 4;
    const Member& member = block.shared.members[item.member];
    std::int64_t position = member.place.position;
    if (item.keys.count() > 0) {
        const int thread = 32 * slice + lane;
        if (thread < Config::kRowsOfTile)
            half.rows[thread] = thread < item.rows ? decode::RowInfo{member.visible.begin, member.visible.end - 1, 0}
                                                   : decode::RowInfo{INT_MAX, -1, -1};
        for (int row = slice; row < Config::kRowsOfTile; row += 4) {
            Element* head = half.heads[row];
            if (row < item.rows) {
                read_head<kHeadDim>(head, launch, item.member, item.kv_head * p.group + item.first_row + row, number,
                                    Wait::queries, lane);
                turn_head(head, launch, launch.append.q_norm, position, lane);
            }
            if (lane < kChunks) {
                const uint4 chunk = row < item.rows ? reinterpret_cast<const uint4*>(head)[lane] : uint4{};
                *reinterpret_cast<uint4*>(half.queries + decode::chunk_in_panels(Config::kRowsOfTile, row, lane)) =
                    chunk;
            }
        }
    }
    if (item.newest) {
        // K by one warp, V by another; query heads of a small group leave these two with the least to do.
        for (int which = 0; which < 2; ++which) {
            if (slice != 3 - which) continue;
            const int head = p.heads_q + which * p.heads_kv + item.kv_head;
            Element* row = half.heads[Config::kRowsOfTile + which];
            read_head<kHeadDim>(row, launch, item.member, head, number, Wait::new_key, lane);
            if (which == 0) turn_head(row, launch, launch.append.k_norm, position, lane);
            if (!item.writes) continue;
            const append_rows::Rows& cache = which == 0 ? launch.append.k_cache : launch.append.v_cache;
            append_rows::copy_row(
                append_rows::HeadRow<Element>{row, 1},
                append_rows::head_row<Element>(cache, member.place.slot, member.place.row, item.kv_head), kHeadDim,
                lane);
        }
    }
    ptx::named_barrier_sync(kOfHalf + block.warp / 4, 128);
}

/// Copies the new row into a tile of K: the slice's rows are read by this warp alone.
template <int kHeadDim>
__device__ __forceinline__ void put_key(char* tile, const Element* key, int row, int lane) {
    if (lane < kHeadDim / kChunk)
        *reinterpret_cast<uint4*>(tile + decode::chunk_in_panels(decode::Config::kKeys, row, lane)) =
            reinterpret_cast<const uint4*>(key)[lane];
    __syncwarp();
}

/// Copies the new row into a tile of V: the dims that this warp reads.
template <int kHeadDim>
__device__ __forceinline__ void put_value(char* tile, const Element* value, int row, int slice, int lane) {
    if (lane < kHeadDim / 32) {
        const int chunk = lane / 2 * 8 + 2 * slice + lane % 2;
        *reinterpret_cast<uint4*>(tile + decode::chunk_in_panels(decode::Config::kKeys, row, chunk)) =
            reinterpret_cast<const uint4*>(value)[chunk];
    }
    __syncwarp();
}

/// Hands a warp's part of O, and the first slice's maximum and sum, to the CTA that combines the row.
template <int kHeadDim>
__device__ __forceinline__ void hand_partials(const decode::Output<kHeadDim>& o, const OnlineSoftmax<Element>& softmax,
                                              const decode::SliceExchange& exchange, const Launch& launch,
                                              const Item& item, unsigned number, int slice, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = 8 * r + lane / 4;
        if (row >= item.rows) continue;
        const ForwardParams& p = launch.attention.params;
        const std::int64_t head = std::int64_t{item.member} * p.heads_q + item.kv_head * p.group + item.first_row + row;
        const std::int64_t at = head * launch.max_splits + item.split;
        Word* to = launch.o_partial + at * kHeadDim + 16 * slice + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kHeadDim / 32; ++n)
            ptx::store_relaxed(to + 64 * (n / 2) + 8 * (n % 2), word_of(__float_as_uint(o[n][2 * r]), number),
                               word_of(__float_as_uint(o[n][2 * r + 1]), number));
        if (slice != 0 || lane % 4 != 0) continue;
        ptx::store_relaxed(launch.ml_partial + 2 * at, word_of(__float_as_uint(softmax.max[r]), number),
                           word_of(__float_as_uint(decode::sum_of_slices(exchange.sums[row])), number));
    }
}

/// One split, by a computing warp: decode's compute_by_mma() for one query, on stages of the ring.
template <class Shape>
__device__ __forceinline__ void compute_item(const Block<Shape>& block, Half<Shape::kConfig.head_dim>& half,
                                             Position& at, const Item& item, unsigned number) {
    using T = Element;
    constexpr int kHeadDim = Shape::kConfig.head_dim, kKeys = decode::Config::kKeys;
    const decode::Launch& launch = block.launch.attention;
    const Member& member = block.shared.members[item.member];
    const int tiles = item.tiles(), slice = block.warp % 4, lane = block.lane;
    const int full_begin = member.visible.begin, full_end = member.visible.end, new_key = item.new_key();
    decode::SplitWork work{};  // for softcap; there is no ALiBi
    const Scale scale = decode::scale_of(launch);
    OnlineSoftmax<T> softmax;
    decode::Output<kHeadDim> o = {};
    float s[2][4] = {}, rescale[2] = {};
    const auto release = [&](Position& position) {
        ptx::fence_proxy_async();  // bulk copies may follow these reads and stores
        block.release(position, 2);
        block.next(position);  // past V, or past K of the next tile
    };
    Position at_k = at, at_v = at;
    block.next(at_v);
#pragma unroll 1
    for (int i = -2;; ++i) {
        float next[2][4], next_rescale[2];
        const int key_of_next = item.tile + (i + 2) * kKeys + 16 * slice;
        if (i + 2 < tiles) {
            block.wait_full(at_k);
            char* k = block.stage(at_k);
            if (new_key >= key_of_next && new_key < key_of_next + 16)
                put_key<kHeadDim>(k, half.heads[Config::kRowsOfTile], new_key - key_of_next + 16 * slice, lane);
            decode::multiply_qk<T, kHeadDim>(next, decode::PanelAddress::rows_first(half.queries, 0, lane),
                                             Config::kRowsOfTile * kPanelRowBytes,
                                             decode::PanelAddress::chunks_first(k + 16 * slice * kPanelRowBytes, lane));
            release(at_k);
        }
        if (i + 1 >= 0 && i + 1 < tiles) {
            decode::write_p(half.exchange[(i + 1) & 1], softmax, s, next_rescale, scale, slice, lane);
            if (i + 2 == tiles) decode::write_sums(half.exchange[0], softmax, slice, lane);
        }
        if (i + 2 < tiles) {
            const int own = key_of_next + lane % 4 * 2;
            if (launch.natural) decode::modify(next, launch, work, 0, 0, own, lane);
            if (key_of_next < full_begin || key_of_next + 16 > full_end)
                decode::mask_scores(next, half.rows, own, lane);
            decode::write_maxima(half.exchange[i & 1], next, slice, lane);
        }
        if (i >= 0) {
            const int key = item.tile + i * kKeys;
            const bool full = key >= full_begin && key + kKeys <= full_end;
            block.wait_full(at_v);
            char* v = block.stage(at_v);
            if (new_key >= key && new_key < key + kKeys)
                put_value<kHeadDim>(v, half.heads[Config::kRowsOfTile + 1], new_key - key, slice, lane);
            const decode::PanelAddress address(v, lane % 16, 2 * slice + lane / 16);
#pragma unroll
            for (int n = 0; n < kHeadDim / 32; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) o[n][e] *= rescale[e / 2];
            }
            const auto& p = half.exchange[i & 1].p;
            if (full) decode::multiply_pv<T, kHeadDim, false>(o, p, address, half.rows, key, lane);
            else decode::multiply_pv<T, kHeadDim, true>(o, p, address, half.rows, key, lane);
            release(at_v);
        }
        if (i + 1 == tiles) break;
        ptx::named_barrier_sync(kOfHalf + block.warp / 4, 128);
#pragma unroll
        for (int j = 0; j < 8; ++j) s[j / 4][j % 4] = next[j / 4][j % 4];
        rescale[0] = next_rescale[0];
        rescale[1] = next_rescale[1];
    }
    hand_partials<kHeadDim>(o, softmax, half.exchange[0], block.launch, item, number, slice, lane);
}

/// The items of this CTA, by a computing warp: each half of the warps has every second one.
template <class Shape>
__device__ __forceinline__ void attend(const Block<Shape>& block, Position& at, unsigned number) {
    const int own = block.warp / 4;
    auto& half = block.shared.halves[own];
    int turn = 0;
    for_each_item(block, [&](const Item& item) {
        const int tiles = item.tiles();
        if (turn == own) {
            prepare(block, half, item, number);
            if (block.warp % 4 == 0 && block.lane == 0 && own == 0) record(block.launch, Mark::queries);
            if (tiles > 0) compute_item(block, half, at, item, number);
            ptx::named_barrier_sync(kOfHalf + own, 128);  // before Q and the new key are overwritten
        }
        at.skip(2 * tiles, block.launch.layout.stages);
        turn ^= 1;
    });
}

}  // namespace tessera::cuda::block
