// SPDX-License-Identifier: Apache-2.0
//
// Attention of the new queries, over splits of the keys as in cuda.decode.forward (compute_mma.cuh), with its bits.
// Four warps compute a split: they wait for its query heads, apply QK norm and rotary embedding (append.cuh), and write
// the new key into the tile of cached keys, which was loaded earlier.
#pragma once

#include "cuda/append/append.cuh"
#include "cuda/block/items.cuh"
#include "cuda/block/words.cuh"
#include "cuda/decode/compute_mma.cuh"

namespace tessera::cuda::block {

/// Prefetches the page table: reads the page number of one key of the lane in the item's first tile, so that the copies
/// of the item find the table in the L1.
template <class Shape>
__device__ __forceinline__ int page_ahead(const Block<Shape>& block, int index, int total) {
    const Cache& cache = block.launch.attention.cache;
    if (cache.pages == nullptr || index >= total) return 0;
    const Item item = find_item(block, index);
    const SequenceWork& of_sequence = block.shared.sequences[item.sequence];
    const int key = item.tile + 2 * block.lane;
    if (key < item.keys.begin || key >= item.keys.end) return 0;
    const int number = cache.page_size.quotient(of_sequence.first_kv + key);
    return cache.pages[item.sequence * cache.pages_batch + number * cache.pages_step];
}

/// Loads the cached keys of the CTA's splits: K (`which` 0) by one producer warp, V (1) by the other. A tile takes a
/// stage of K, then one of V.
template <class Shape>
__device__ __forceinline__ void load_keys(const Block<Shape>& block, BlockPipelineState& at, int which) {
    const decode::Launch& attention = block.launch.attention;
    const int total = items_of_all(block);
    int ahead = 0;
#pragma unroll 1
    for (int index = first_item(); index < total; index += static_cast<int>(gridDim.x)) {
        const Item item = find_item(block, index);
        const int tiles = item.tiles();
        if (tiles == 0) continue;
        const SequenceWork& of_sequence = block.shared.sequences[item.sequence];
        decode::SplitWork work{};
        work.cached.slot = of_sequence.slot;
        work.cached.sequence.first_kv = of_sequence.first_kv;
        work.batch = item.sequence;
        work.kv_head = item.kv_head;
        work.tile = item.tile;
        work.begin = item.keys.begin;
        work.end = item.keys.end - (item.newest ? 1 : 0);  // the new key is not in the cache yet
        decode::KeyCopies<Shape> copies(attention, attention.loaded[which], block.lane);
        if (ahead == INT_MIN) __nanosleep(0);  // no page has this number: the compiler has to keep the read
        copies.begin(work);
        ahead = page_ahead(block, index + static_cast<int>(gridDim.x), total);
        for (int i = 0; i < tiles; ++i) {
            if (which == 1) block.next(at);
            if (const int first = item.tile + i * decode::Config::kKeys; i > 0 && first >= work.end) {
                work.tile = first;  // the new key is alone in the last tile, for which no page was looked up
                copies.begin(work);
            }
            block.producer_acquire(at);
            copies.copy_tile(block.stage(at), work, block.shared.full[at.index]);
            block.next(at);
            if (which == 0) block.next(at);
        }
    }
}

/// The words of a head of Q, K or V that a lane reads: four numbers.
template <int kHeadDim>
struct HeadWords {
    Word words[2];

    __device__ __forceinline__ void read(const Launch& launch, int sequence, int head, int lane) {
        if (lane < kHeadDim / 4) ptx::load_relaxed(address(launch, sequence, head, lane), words[0], words[1]);
    }
    /// Waits until they are of this launch, and copies the row, which is the input of norm and rotary embedding. By a
    /// warp.
    __device__ __forceinline__ void copy(Element* to, const Launch& launch, int sequence, int head, unsigned number,
                                         Wait wait, int lane) {
        if (lane < kHeadDim / 4) {
            if (launch_of(words[0]) != number || launch_of(words[1]) != number)
                wait_for<1>(address(launch, sequence, head, lane), 0, words, number, wait);
            reinterpret_cast<uint2*>(to)[lane] = {data_of(words[0]), data_of(words[1])};
        }
        __syncwarp();
    }

 private:
    __device__ __forceinline__ static const Word* address(const Launch& launch, int sequence, int head, int lane) {
        return launch.qkv_words + (std::int64_t{sequence} * launch.qkv.rows + head * kHeadDim) / 2 + 2 * lane;
    }
};

/// The heads that a split needs, divided among the four warps of a group: its query heads, then new K and V if the
/// split has the new key.
struct Heads {
    const Launch& launch;
    const Item& item;

    __device__ __forceinline__ int count() const { return rows() + (item.newest ? 2 : 0); }
    __device__ __forceinline__ int rows() const { return item.keys.count() > 0 ? item.rows : 0; }
    /// 0: Q, 1: K, 2: V.
    __device__ __forceinline__ int kind(int i) const { return i < rows() ? 0 : i - rows() + 1; }
    /// Its number among all heads of Q, K and V.
    __device__ __forceinline__ int head(int i) const {
        const ForwardParams& p = launch.attention.params;
        if (i < rows()) return item.kv_head * p.group + item.first_row + i;
        return p.heads_q + (i - rows()) * p.heads_kv + item.kv_head;
    }
    /// Its row of Group::heads.
    __device__ __forceinline__ int row(int i) const { return i < rows() ? i : Config::kRowsOfTile + i - rows(); }
};

/// Computes Q of an item, and the new key if the item has it, which is also written to the cache. By the four warps of
/// a group, which synchronise at the end. `words`: those of the warp's first head, which were read ahead.
template <class Shape>
__device__ __forceinline__ void prepare(const Block<Shape>& block, Group<Shape::kConfig.head_dim>& group,
                                        const Item& item, HeadWords<Shape::kConfig.head_dim>& words, unsigned number) {
    constexpr int kHeadDim = Shape::kConfig.head_dim, kChunks = kHeadDim / kChunk;
    const Launch& launch = block.launch;
    const int lane = block.lane, slice = block.warp % 4;
    const SequenceWork& of_sequence = block.shared.sequences[item.sequence];
    const Heads heads{launch, item};
    if (const int row = 32 * slice + lane; row < Config::kRowsOfTile)
        group.rows[row] = row < item.rows ? decode::RowInfo{of_sequence.visible.begin, of_sequence.visible.end - 1, 0}
                                          : decode::RowInfo{INT_MAX, -1, -1};
    for (int row = item.rows + slice; row < Config::kRowsOfTile; row += 4)
        if (lane < kChunks)
            *reinterpret_cast<uint4*>(group.queries + decode::chunk_in_panels(Config::kRowsOfTile, row, lane)) =
                uint4{};
#pragma unroll 1
    for (int i = slice; i < heads.count(); i += 4) {
        const int kind = heads.kind(i);
        Element* row = group.heads[heads.row(i)];
        if (i != slice) words.read(launch, item.sequence, heads.head(i), lane);
        words.copy(row, launch, item.sequence, heads.head(i), number, kind == 0 ? Wait::queries : Wait::new_key, lane);
        const bool norms = (kind == 0 ? launch.append.q_norm : launch.append.k_norm).data != nullptr;
        if (kind != 2 && (norms || launch.append.pairs > 0)) {
            const append_rows::HeadRow<Element> in_place{row, 1};
            const append_rows::Change change{kHeadDim, launch.append.pairs, launch.append.interleaved, norms,
                                             launch.append.norm_eps};
            const float* weights = block.shared.norms[kind];
            const float2* rotary = block.shared.rotary[item.sequence];
            append_rows::transform(
                in_place, in_place, change, [&](int c) { return double{weights[c]}; },
                [&](int n) {
                    return double2{rotary[n].x, rotary[n].y};
                },
                lane);
            __syncwarp();
        }
        if (kind == 0) {
            if (lane < kChunks)
                *reinterpret_cast<uint4*>(group.queries + decode::chunk_in_panels(Config::kRowsOfTile, i, lane)) =
                    reinterpret_cast<const uint4*>(row)[lane];
        } else if (item.writes) {
            const append_rows::Rows& cache = kind == 1 ? launch.append.k_cache : launch.append.v_cache;
            append_rows::copy_row(
                append_rows::HeadRow<Element>{row, 1},
                append_rows::head_row<Element>(cache, of_sequence.new_row.slot, of_sequence.new_row.row, item.kv_head),
                kHeadDim, lane);
        }
    }
    ptx::named_barrier_sync(kGroupBarrier + block.warp / 4, 128);
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

/// Sends a warp's part of O, and the first slice's maximum and sum, to the CTA that combines the row.
template <int kHeadDim>
__device__ __forceinline__ void send_partials(const decode::Output<kHeadDim>& o, const OnlineSoftmax<Element>& softmax,
                                              const decode::SliceExchange& exchange, const Launch& launch,
                                              const Item& item, unsigned number, int slice, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = 8 * r + lane / 4;
        if (row >= item.rows) continue;
        const ForwardParams& p = launch.attention.params;
        const std::int64_t head =
            std::int64_t{item.sequence} * p.heads_q + item.kv_head * p.group + item.first_row + row;
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

/// Computes one split, by a consumer warp: decode's compute_by_mma() for one query, on stages of the ring.
template <class Shape>
__device__ __forceinline__ void compute_item(const Block<Shape>& block, Group<Shape::kConfig.head_dim>& group,
                                             BlockPipelineState& at, const Item& item, unsigned number) {
    using T = Element;
    constexpr int kHeadDim = Shape::kConfig.head_dim, kKeys = decode::Config::kKeys;
    const decode::Launch& launch = block.launch.attention;
    const SequenceWork& of_sequence = block.shared.sequences[item.sequence];
    const int tiles = item.tiles(), slice = block.warp % 4, lane = block.lane;
    const int full_begin = of_sequence.visible.begin, full_end = of_sequence.visible.end, new_key = item.new_key();
    decode::SplitWork work{};  // for softcap; there is no ALiBi
    const Scale scale = decode::scale_of(launch);
    OnlineSoftmax<T> softmax;
    decode::Output<kHeadDim> o = {};
    float s[2][4] = {}, rescale[2] = {};
    const auto release = [&](BlockPipelineState& state) {
        block.release(state);
        block.next(state);  // past V, or past K of the next tile
    };
    BlockPipelineState at_k = at, at_v = at;
    block.next(at_v);
#pragma unroll 1
    for (int i = -2;; ++i) {
        float next[2][4], next_rescale[2];
        const int key_of_next = item.tile + (i + 2) * kKeys + 16 * slice;
        if (i + 2 < tiles) {
            block.consumer_wait(at_k);
            char* k = block.stage(at_k);
            if (new_key >= key_of_next && new_key < key_of_next + 16)
                put_key<kHeadDim>(k, group.heads[Config::kRowsOfTile], new_key - key_of_next + 16 * slice, lane);
            decode::multiply_qk<T, kHeadDim>(next, decode::PanelAddress::rows_first(group.queries, 0, lane),
                                             Config::kRowsOfTile * kPanelRowBytes,
                                             decode::PanelAddress::chunks_first(k + 16 * slice * kPanelRowBytes, lane));
            release(at_k);
        }
        if (i + 1 >= 0 && i + 1 < tiles) {
            decode::write_p(group.exchange[(i + 1) & 1], softmax, s, next_rescale, scale, slice, lane);
            if (i + 2 == tiles) decode::write_sums(group.exchange[0], softmax, slice, lane);
        }
        if (i + 2 < tiles) {
            const int own = key_of_next + lane % 4 * 2;
            if (launch.natural) decode::modify(next, launch, work, 0, 0, own, lane);
            if (key_of_next < full_begin || key_of_next + 16 > full_end)
                decode::mask_scores(next, group.rows, own, lane);
            decode::write_maxima(group.exchange[i & 1], next, slice, lane);
        }
        if (i >= 0) {
            const int key = item.tile + i * kKeys;
            const bool full = key >= full_begin && key + kKeys <= full_end;
            block.consumer_wait(at_v);
            char* v = block.stage(at_v);
            if (new_key >= key && new_key < key + kKeys)
                put_value<kHeadDim>(v, group.heads[Config::kRowsOfTile + 1], new_key - key, slice, lane);
            const decode::PanelAddress address(v, lane % 16, 2 * slice + lane / 16);
#pragma unroll
            for (int n = 0; n < kHeadDim / 32; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) o[n][e] *= rescale[e / 2];
            }
            const auto& p = group.exchange[i & 1].p;
            if (full) decode::multiply_pv<T, kHeadDim, false>(o, p, address, group.rows, key, lane);
            else decode::multiply_pv<T, kHeadDim, true>(o, p, address, group.rows, key, lane);
            release(at_v);
        }
        if (i + 1 == tiles) break;
        ptx::named_barrier_sync(kGroupBarrier + block.warp / 4, 128);
#pragma unroll
        for (int j = 0; j < 8; ++j) s[j / 4][j % 4] = next[j / 4][j % 4];
        rescale[0] = next_rescale[0];
        rescale[1] = next_rescale[1];
    }
    at = at_k;  // both states are after the last V
    send_partials<kHeadDim>(o, softmax, group.exchange[0], block.launch, item, number, slice, lane);
}

/// Computes the items of this CTA, by a consumer warp. The groups take them in turn.
template <class Shape>
__device__ __forceinline__ void attend(const Block<Shape>& block, BlockPipelineState& at, unsigned number) {
    const Launch& launch = block.launch;
    const int own = block.warp / 4, slice = block.warp % 4, ctas = static_cast<int>(gridDim.x);
    const int groups = launch.layout.groups;
    auto& group = block.shared.groups[own];
    const int total = items_of_all(block);
    HeadWords<Shape::kConfig.head_dim> words;
    const auto read_ahead = [&](int index) {
        if (index >= total) return;
        const Item item = find_item(block, index);
        const Heads heads{launch, item};
        if (slice < heads.count()) words.read(launch, item.sequence, heads.head(slice), block.lane);
    };
    int group_of_item = 0;
    if (own < groups) read_ahead(first_item() + own * ctas);
#pragma unroll 1
    for (int index = first_item(); index < total; index += ctas) {
        const Item item = find_item(block, index);
        const int tiles = item.tiles();
        if (group_of_item == own) {
            prepare(block, group, item, words, number);
            if (slice == 0 && block.lane == 0 && index == first_item()) record(launch, Mark::queries);
            read_ahead(index + groups * ctas);
            if (tiles > 0) compute_item(block, group, at, item, number);
            ptx::named_barrier_sync(kGroupBarrier + own, 128);  // before Q and the new key are overwritten
        } else {
            block.pass(at, 2 * tiles);
        }
        group_of_item = group_of_item + 1 == groups ? 0 : group_of_item + 1;
    }
}

}  // namespace tessera::cuda::block
