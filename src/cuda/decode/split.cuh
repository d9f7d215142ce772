// SPDX-License-Identifier: Apache-2.0
//
// A split of the keys of one kv head for a few queries. A warp has one query, and its 16 rows are query heads of the
// group. All rows of a warp therefore see the same keys. The tiles of K and V pass through a ring in shared memory.
#pragma once

#include "cuda/decode/launch.hpp"
#include "cuda/host/band32.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/chunks.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/softmax.cuh"
#include "cuda/tile/warp_gemms.cuh"

namespace tessera::cuda::decode {

/// The work of a CTA.
struct SplitWork {
    Sequence sequence;
    int batch;
    int kv_head;
    int first_head;  ///< query head of row 0
    int heads;       ///< rows that exist
    int split;       ///< counted from the sequence's first
    bool exists;     ///< does the sequence have such a split?
    int begin = 0;   ///< keys begin ... end - 1, from a multiple of 64 on
    int end = 0;
    Band32 band;

    __device__ SplitWork(const Launch& launch, unsigned index) {
        const ForwardParams& p = launch.params;
        const auto splits = static_cast<unsigned>(launch.max_splits);
        const auto head_tiles = static_cast<unsigned>(launch.head_tiles);
        const auto heads_kv = static_cast<unsigned>(p.heads_kv);
        split = static_cast<int>(index % splits);
        index /= splits;
        const auto head_tile = static_cast<int>(index % head_tiles);
        index /= head_tiles;
        kv_head = static_cast<int>(index % heads_kv);
        batch = static_cast<int>(index / heads_kv);
        first_head = kv_head * p.group + head_tile * kHeadsOfTile;
        heads = min(p.group - head_tile * kHeadsOfTile, kHeadsOfTile);
        sequence = sequence_of(p, batch);
        const Band bound = p.mask.bind(sequence.len_q, sequence.len_kv);
        band = Band32(bound);
        const Range visible = bound.kv_range(0, sequence.len_q);
        const Splits of_sequence(visible);
        exists = split < of_sequence.count;
        if (!exists) return;
        const int first = (of_sequence.first + split) * of_sequence.keys;
        begin = max(first, static_cast<int>(visible.begin) / Config::kKeys * Config::kKeys);
        end = min(first + of_sequence.keys, static_cast<int>(visible.end));
    }
};

/// Loads kKeys rows of K or V into a tile, by all threads of the CTA. Rows from `end` on and columns past the end
/// become 0. Vector loads are cp.async and may still run on return.
template <int kHeadDim>
__device__ __forceinline__ void load_tile(char* tile, const Source& source, int first_row, int end) {
    constexpr int kChunks = kHeadDim / kChunk;
    const std::uint32_t to = ptx::shared_address(tile);
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < Config::kKeys * kChunks; i += static_cast<int>(blockDim.x)) {
        const int row = i / kChunks;
        const int chunk = i % kChunks;
        const bool inside = first_row + row < end && chunk * kChunk < source.dim;
        if (source.vector) {
            const char* from = source.data + (first_row + row) * source.row_bytes + chunk * 16;
            ptx::cp_async_16(to + chunk_offset<kHeadDim>(row, chunk), inside ? from : source.data, inside);
        } else {
            const uint4 elements = inside ? source.elements(first_row + row, chunk * kChunk) : uint4{};
            *reinterpret_cast<uint4*>(tile + chunk_offset<kHeadDim>(row, chunk)) = elements;
        }
    }
}

/// The rows of Q of a warp as A fragments; rows past `heads` and columns past the end are 0.
template <class T, int kHeadDim>
__device__ __forceinline__ void read_queries(Queries<kHeadDim, 1, true>& queries, const Launch& launch,
                                             const SplitWork& work, int query, int lane) {
    const ForwardParams& p = launch.params;
    const std::int64_t offset = head_offset(p.q, work.batch, work.sequence.first_q + query, work.first_head, sizeof(T));
    const auto element = [&](const char* row, int column) -> std::uint32_t {
        if (column >= p.head_dim) return 0;
        return *reinterpret_cast<const std::uint16_t*>(row + column * p.q.column * std::int64_t{sizeof(T)});
    };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int head = lane / 4 + 8 * r;
        const char* row = p.q.data + offset + head * p.q.head * std::int64_t{sizeof(T)};
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = 16 * step + 8 * half + lane % 4 * 2;
                std::uint32_t pair = 0;
                if (head < work.heads && column < p.head_dim) {
                    if (launch.vector_q) pair = *reinterpret_cast<const std::uint32_t*>(row + column * sizeof(T));
                    else pair = element(row, column) | element(row, column + 1) << 16;
                }
                queries.held[step][0][r + 2 * half] = pair;
            }
        }
    }
}

/// O += P V over one tile of keys. `first` and `last`: the visible keys, counted from the tile's first. Rows of V
/// outside of them count as 0, whatever they hold: all have P = 0.
template <class T, int kHeadDim>
__device__ __forceinline__ void multiply_visible_pv(float (&o)[1][kHeadDim / 8][4],
                                                    const float (&p)[1][Config::kKeys / 8][4],
                                                    const MatrixAddress<kHeadDim>& v, int first, int last, int lane) {
    const auto kept = [&](int key) {
        const auto sees = [&](int k) { return k >= first && k <= last; };
        return (sees(key) ? 0x0000FFFFU : 0U) | (sees(key + 1) ? 0xFFFF0000U : 0U);
    };
#pragma unroll
    for (int step = 0; step < Config::kKeys / 16; ++step) {
        const float(&low)[4] = p[0][2 * step];
        const float(&high)[4] = p[0][2 * step + 1];
        const std::uint32_t a[4] = {ptx::pack<T>(low[0], low[1]), ptx::pack<T>(low[2], low[3]),
                                    ptx::pack<T>(high[0], high[1]), ptx::pack<T>(high[2], high[3])};
        const std::uint32_t keep[2] = {kept(16 * step + lane % 4 * 2), kept(16 * step + 8 + lane % 4 * 2)};
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; n += 2) {
            std::uint32_t b[4];  // B fragments of 16 keys x 16 dims
            ptx::ldmatrix_x4_trans(b, v.at(16 * step, n));
            ptx::mma<T>(o[0][n], a, b[0] & keep[0], b[1] & keep[1]);
            ptx::mma<T>(o[0][n + 1], a, b[2] & keep[0], b[3] & keep[1]);
        }
    }
}

template <class T, class Shape>
__global__ void __launch_bounds__(32 * kMaxQueries, 1) split_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    constexpr int kHeadDim = kConfig.head_dim;
    constexpr int kAhead = kConfig.tiles - 1;  // tiles on their way
    extern __shared__ __align__(128) char memory[];
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
#endif
    const SplitWork work(launch, blockIdx.x);
    if (!work.exists) return;
    const ForwardParams& p = launch.params;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int query = uniform(static_cast<int>(threadIdx.x / 32));
    const Source k = source_of<T>(p.k, head_offset(p.k, work.batch, work.sequence.first_kv, work.kv_head, sizeof(T)),
                                  work.sequence.len_kv, p.head_dim, launch.vector_k);
    const Source v = source_of<T>(p.v, head_offset(p.v, work.batch, work.sequence.first_kv, work.kv_head, sizeof(T)),
                                  work.sequence.len_kv, p.head_dim_v, launch.vector_v);

    // Tile number i of the ring is K of key tile i / 2 where i is even, else V.
    const int count = 2 * ((work.end - work.begin + Config::kKeys - 1) / Config::kKeys);
    const auto tile_at = [&](int i) { return memory + i % kConfig.tiles * kConfig.tile_bytes(); };
    const auto load = [&](int i) {
        const int key = work.begin + i / 2 * Config::kKeys;
        if (i < count && i % 2 == 0) load_tile<kHeadDim>(tile_at(i), k, key, work.end);
        if (i < count && i % 2 != 0) load_tile<kHeadDim>(tile_at(i), v, key, work.end);
        ptx::cp_async_commit();
    };
    /// Waits for tile i, and starts the copy of the one that takes the place of tile i - 1.
    const auto next = [&](int i) {
        ptx::cp_async_wait<kAhead - 1>();
        __syncthreads();
        load(i + kAhead);
    };
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) load(i);

    Queries<kHeadDim, 1, true> queries(memory, 0, lane);
    const bool has_query = query < work.sequence.len_q;
    if (has_query) read_queries<T>(queries, launch, work, query, lane);
    const Scale scale{p.scale, p.scale * kLog2E};
    OnlineSoftmax<T> rows;
    float o[1][kHeadDim / 8][4] = {};
#pragma unroll 1
    for (int i = 0; i < count; i += 2) {
        const int key = work.begin + i / 2 * Config::kKeys;
        const int first = work.band.first(query) - key, last = min(work.band.last(query), work.end - 1) - key;
        const bool visible = has_query && first < Config::kKeys && last >= 0 && first <= last;
        const bool full = first <= 0 && last >= Config::kKeys - 1;
        float s[1][Config::kKeys / 8][4];
        next(i);
        if (visible) {
            multiply_qk<T>(s, queries, MatrixAddress<kHeadDim>::chunks_first(tile_at(i), lane));
            if (!full) {
#pragma unroll
                for (int n = 0; n < Config::kKeys / 8; ++n) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int at = 8 * n + lane % 4 * 2 + e % 2;
                        if (at < first || at > last) s[0][n][e] = -INFINITY;
                    }
                }
            }
            float rescale[2];
            rows.update(s[0], scale, rescale);
            if (any_lane(rescale[0] != 1.0F || rescale[1] != 1.0F)) {
#pragma unroll
                for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) o[0][n][e] *= rescale[e / 2];
                }
            }
        }
        next(i + 1);
        if (visible) {
            const auto address = MatrixAddress<kHeadDim>::rows_first(tile_at(i + 1), 0, lane);
            if (full) multiply_pv<T, kHeadDim>(o, s, address);
            else multiply_visible_pv<T, kHeadDim>(o, s, address, first, last, lane);
        }
    }

    rows.finish();
    if (!has_query) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int head = lane / 4 + 8 * r;
        if (head >= work.heads) continue;
        const std::int64_t at = launch.partial(launch.row(work.batch, query, work.first_head + head), work.split);
        if (lane % 4 == 0) launch.ml[at] = {rows.max[r], rows.sum[r]};
        float* to = launch.o + at * kHeadDim + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            *reinterpret_cast<float2*>(to + 8 * n) = {o[0][n][2 * r], o[0][n][2 * r + 1]};
        }
    }
}

}  // namespace tessera::cuda::decode
