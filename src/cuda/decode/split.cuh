// SPDX-License-Identifier: Apache-2.0
//
// Splits of the keys of one kv head for a tile of rows, which are queries of the heads of a group. A tile of 64 keys is
// shared by four warps, 16 keys each, that have a maximum, a sum and O of their own. The tiles of K and V pass through
// a ring in shared memory.
#pragma once

#include <cfloat>

#include "cuda/decode/work.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/chunks.cuh"
#include "cuda/tile/softcap.cuh"
#include "cuda/tile/warp_gemms.cuh"

namespace tessera::cuda::decode {

/// The numbers of splits of the sequences [first, first + count), summed up: `ends[i]` is that of the first i + 1.
template <int kRows>
__device__ __forceinline__ void count_items(int* ends, const Launch& launch, int first, int count) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
        const Items items = items_of<kRows>(launch, member_of(launch, first + i).sequence);
        ends[i] = items.tiles * items.splits * launch.params.heads_kv;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        const int lane = static_cast<int>(threadIdx.x);
        const int each = (count + 31) / 32;
        int sum = 0;
        for (int i = lane * each; i < min((lane + 1) * each, count); ++i) sum += ends[i];
        int before = sum;  // inclusive sum over the lanes
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(kAllLanes, before, step);
            if (lane >= step) before += other;
        }
        before -= sum;
        for (int i = lane * each; i < min((lane + 1) * each, count); ++i) before = ends[i] += before;
    }
    __syncthreads();
}

/// One split of a tile of rows of a kv head.
struct SplitWork {
    Member member;
    int batch;
    int kv_head;
    int first_row;  ///< of the kv head's rows of this sequence
    int rows;       ///< rows that exist
    bool exists = false;
    bool alike = true;  ///< do all rows have splits of this length?
    int keys = 0;       ///< of a full split
    int number = 0;     ///< its keys begin at number * keys
    int tile = 0;       ///< first key of the first tile: a multiple of 64
    int begin = 0;      ///< keys begin ... end - 1 are visible to a row
    int end = 0;
    Band32 band;
    int full_begin = 0;  ///< keys full_begin ... full_end - 1 are visible to all rows
    int full_end = 0;

    template <int kRows>
    __device__ __forceinline__ void find(const Launch& launch, int batch_index, unsigned item) {
        const ForwardParams& p = launch.params;
        batch = batch_index;
        member = member_of(launch, batch);
        const Sequence& sequence = member.sequence;
        const Items items = items_of<kRows>(launch, sequence);
        const int row_tile = static_cast<int>(item % static_cast<unsigned>(items.tiles));
        item /= static_cast<unsigned>(items.tiles);
        int split = static_cast<int>(item % static_cast<unsigned>(items.splits));
        kv_head = static_cast<int>(item / static_cast<unsigned>(items.splits));
        first_row = row_tile * kRows;
        rows = min(sequence.len_q * p.group - first_row, kRows);
        band = band_of(p.mask, sequence);
        const TileWork work(band, first_row / p.group, (first_row + rows - 1) / p.group);
        exists = split < work.splits();
        if (!exists) return;
        const bool is_large = split >= work.small.count;
        if (is_large) split -= work.small.count;
        const Splits& splits = is_large ? work.large : work.small;
        alike = work.alike();
        keys = splits.keys;
        number = splits.first + split;
        begin = max(number * keys, static_cast<int>(work.visible.begin));
        end = min((number + 1) * keys, static_cast<int>(work.visible.end));
        tile = begin / Config::kKeys * Config::kKeys;
        full_begin = alike ? max(band.first(work.last_query), 0) : INT_MAX;
        full_end = band.last(work.first_query) + 1;
    }
};

/// The place of a key in a cache: a row of a slot or page. Slot -1 is none.
struct Place {
    int slot;
    int row;
};

/// The places of the keys of a split in the pages of its sequence.
__device__ __forceinline__ void find_places(Place* places, const Cache& cache, const SplitWork& work) {
    const std::int32_t* pages = cache.pages + work.batch * cache.pages_batch;
    for (int key = work.begin + static_cast<int>(threadIdx.x); key < work.end; key += static_cast<int>(blockDim.x)) {
        const int row = static_cast<int>(work.member.sequence.first_kv) + key;
        const int page = pages[row / cache.page_size * cache.pages_step];
        places[key - work.tile] = {page >= 0 && page < cache.count ? page : -1, row % cache.page_size};
    }
    __syncthreads();
}

/// K or V of one kv head.
struct KeySource {
    Source source;  ///< row 0 is key 0; with pages, row 0 of page 0
    std::int64_t page_bytes = 0;
    const Place* places = nullptr;  ///< of the keys from work.tile on; null: no pages

    __device__ __forceinline__ KeySource(const Launch& launch, const SplitWork& work, const Rows& rows, int dim,
                                         bool vector, const Place* of_pages)
        : places(of_pages) {
        const bool paged = places != nullptr;
        const std::int64_t slot = paged ? 0 : work.member.slot;
        const std::int64_t first = paged ? 0 : work.member.sequence.first_kv;
        source = source_of<std::uint16_t>(rows, head_offset(rows, slot, first, work.kv_head, 2), INT_MAX, dim, vector);
        page_bytes = rows.batch * 2;
    }
};

/// Loads the rows of keys [key, key + kKeys) into a tile, by all threads of the CTA. Keys that no row sees and columns
/// past the end become 0. Vector loads are cp.async and may still run on return.
template <class Shape>
__device__ __forceinline__ void load_keys(char* tile, const KeySource& from, const SplitWork& work, int key) {
    constexpr int kHeadDim = Shape::kConfig.head_dim, kThreads = Shape::kConfig.threads();
    constexpr int kChunks = kHeadDim / kChunk;
    constexpr int kRowsAtOnce = kThreads / kChunks;
    const Source& source = from.source;
    const int chunk = static_cast<int>(threadIdx.x) % kChunks, row = static_cast<int>(threadIdx.x) / kChunks;
    const bool has_chunk = chunk * kChunk < source.dim;
    const std::uint32_t to = ptx::shared_address(tile);
    if (source.vector && from.places == nullptr) {
        const char* at = source.data + static_cast<std::int64_t>(key + row) * source.row_bytes + chunk * 16;
        const std::int64_t step = ptx::opaque(kRowsAtOnce * source.row_bytes);
#pragma unroll 8
        for (int i = 0; i < Config::kKeys; i += kRowsAtOnce) {
            const bool inside = has_chunk && key + row + i >= work.begin && key + row + i < work.end;
            ptx::cp_async_16(to + chunk_offset<kHeadDim>(row + i, chunk), inside ? at : source.data, inside);
            at += step;
        }
        return;
    }
#pragma unroll 4
    for (int i = 0; i < Config::kKeys; i += kRowsAtOnce) {
        const int own = key + row + i;
        bool inside = has_chunk && own >= work.begin && own < work.end;
        Place place{0, own};
        if (from.places != nullptr && inside) place = from.places[own - work.tile];
        inside = inside && place.slot >= 0;
        const char* page = source.data + (inside ? place.slot * from.page_bytes : 0);
        const std::uint32_t offset = chunk_offset<kHeadDim>(row + i, chunk);
        if (source.vector) {
            ptx::cp_async_16(to + offset, inside ? page + place.row * source.row_bytes + chunk * 16 : source.data,
                             inside);
        } else {
            Source paged = source;
            paged.data = page;
            *reinterpret_cast<uint4*>(tile + offset) = inside ? paged.elements(place.row, chunk * kChunk) : uint4{};
        }
    }
}

/// Loads the rows of Q of a tile; rows and columns past the end become 0.
template <class T, class Shape>
__device__ __forceinline__ void load_queries(char* tile, const Launch& launch, const SplitWork& work) {
    constexpr int kHeadDim = Shape::kConfig.head_dim, kChunks = kHeadDim / kChunk;
    const ForwardParams& p = launch.params;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < Shape::kConfig.rows() * kChunks; i += Shape::kConfig.threads()) {
        const int row = i / kChunks, chunk = i % kChunks;
        uint4 elements{};
        if (row < work.rows && chunk * kChunk < p.head_dim) {
            const std::int64_t query = work.member.sequence.first_q + (work.first_row + row) / p.group;
            const int head = work.kv_head * p.group + (work.first_row + row) % p.group;
            const Source source =
                source_of<T>(p.q, head_offset(p.q, work.batch, query, head, sizeof(T)), 1, p.head_dim, launch.vector_q);
            elements = source.vector ? *reinterpret_cast<const uint4*>(source.data + chunk * 16)
                                     : source.elements(0, chunk * kChunk);
        }
        *reinterpret_cast<uint4*>(tile + chunk_offset<kHeadDim>(row, chunk)) = elements;
    }
}

/// The rows of a thread: which keys each of them sees.
template <class Shape>
struct ThreadRows {
    static constexpr int kTiles = Shape::kConfig.row_tiles;
    int first[kTiles][2];  ///< visible keys first ... last
    int last[kTiles][2];

    __device__ __forceinline__ ThreadRows(const SplitWork& work, int group, int first_row, int lane) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = first_row + 16 * m + 8 * r + lane / 4;
                const Range visible = visible_of(work.band, (work.first_row + row) / group);
                const bool sees = row < work.rows && split_keys(visible.size()) == work.keys;
                first[m][r] = sees ? static_cast<int>(visible.begin) : INT_MAX;
                last[m][r] = sees ? static_cast<int>(visible.end) - 1 : -1;
            }
        }
    }
};

/// Scales the scores of 16 keys, then softcap and ALiBi. `key`: the thread's first.
template <class Shape>
__device__ __forceinline__ void modify(float (&s)[Shape::kConfig.row_tiles][2][4], const Launch& launch,
                                       const SplitWork& work, int first_row, int key, int lane) {
    const ForwardParams& p = launch.params;
    const float inverse = p.softcap > 0 ? fminf(ptx::reciprocal_approx(p.softcap), FLT_MAX) : 0;
    const int shift = work.member.sequence.len_kv - work.member.sequence.len_q;
#pragma unroll
    for (int m = 0; m < Shape::kConfig.row_tiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = work.first_row + first_row + 16 * m + 8 * r + lane / 4;
            const int head = work.kv_head * p.group + row % p.group;
            const bool sloped = p.alibi_slopes != nullptr && row < work.first_row + work.rows;
            const float slope = sloped ? p.alibi_slopes[work.batch * p.alibi_batch + head * p.alibi_head] : 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& score = s[m][i / 2][2 * r + i % 2];
                score = __fmul_rn(score, p.scale);
                if (p.softcap > 0) score = __fmul_rn(p.softcap, hyperbolic_tangent(__fmul_rn(score, inverse)));
                if (slope == 0) continue;
                const int distance = abs(row / p.group + shift - (key + 8 * (i / 2) + i % 2));
                score = __fadd_rn(score, -__fmul_rn(slope, static_cast<float>(distance)));
            }
        }
    }
}

/// O += P V for 16 keys of which rows see only some, keys `key` ... `key` + 15. A key that a row does not see adds
/// nothing to it, whatever its V holds: NaN and infinity of V are left out of the MMA, and added to the rows that see
/// them.
template <class T, class Shape>
__device__ __forceinline__ void multiply_masked_pv(float (&o)[Shape::kConfig.row_tiles][Shape::kConfig.head_dim / 8][4],
                                                   const std::uint32_t (&a)[Shape::kConfig.row_tiles][4],
                                                   const MatrixAddress<Shape::kConfig.head_dim>& v,
                                                   const ThreadRows<Shape>& rows, int key, int lane) {
    constexpr int kTiles = Shape::kConfig.row_tiles;
#pragma unroll
    for (int n = 0; n < Shape::kConfig.head_dim / 8; n += 2) {
        std::uint32_t b[4], special[4], any = 0;
        ptx::ldmatrix_x4_trans(b, v.at(0, n));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const std::uint32_t found = nonfinite<T>(b[i]);
            special[i] = b[i] & ((found >> 15) * 0xFFFF);
            b[i] &= ~((found >> 15) * 0xFFFF);
            any |= found;
        }
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
            ptx::mma<T>(o[m][n], a[m], b[0], b[1]);
            ptx::mma<T>(o[m][n + 1], a[m], b[2], b[3]);
        }
        if (!any_lane(any != 0)) continue;
#pragma unroll 1
        for (int j = 0; j < 16; ++j) {
            const int own = lane % 4 * 2;  // keys own, own + 1 and own + 8, own + 9 of the thread's words
            const auto kept = [&](int at) { return (at == j ? 0xFFFFU : 0U) | (at + 1 == j ? 0xFFFF0000U : 0U); };
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float sum[4] = {};
                    ptx::mma<T>(sum, a[m], special[2 * half] & kept(own), special[2 * half + 1] & kept(own + 8));
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        if (key + j >= rows.first[m][e / 2] && key + j <= rows.last[m][e / 2])
                            o[m][n + half][e] += sum[e];
                    }
                }
            }
        }
    }
}

/// The sums of a CTA's warps, in shared memory after the ring.
template <class Shape>
struct Sums {
    static constexpr int kRows = Shape::kConfig.rows(), kPitch = Shape::kConfig.sum_pitch();
    float* o;    // [kKeyWarps][kRows][kPitch]
    float2* ml;  // [kKeyWarps][kRows]

    __device__ __forceinline__ explicit Sums(char* memory)
        : o(reinterpret_cast<float*>(memory)),
          ml(reinterpret_cast<float2*>(memory + Config::kKeyWarps * kRows * kPitch * 4)) {}
};

/// Adds the sums of the four warps of each row, and writes them to the row's place in the workspace.
template <class T, class Shape>
__device__ __forceinline__ void write_partials(const Sums<Shape>& sums, const Launch& launch, const SplitWork& work,
                                               const Scale& scale) {
    constexpr int kHeadDim = Shape::kConfig.head_dim, kRows = Shape::kConfig.rows(), kPitch = Sums<Shape>::kPitch;
    constexpr int kLanes = kHeadDim / 4;  // of a row: four columns each
    const ForwardParams& p = launch.params;
    for (int row = static_cast<int>(threadIdx.x) / kLanes; row < work.rows; row += Shape::kConfig.threads() / kLanes) {
        const int query = (work.first_row + row) / p.group;
        const int head = work.kv_head * p.group + (work.first_row + row) % p.group;
        const Splits splits(visible_of(work.band, query));
        const int split = work.number - splits.first;
        if (splits.keys != work.keys || split < 0 || split >= splits.count) continue;
        float maximum = -INFINITY;
#pragma unroll
        for (int w = 0; w < Config::kKeyWarps; ++w) maximum = fmaxf(maximum, sums.ml[w * kRows + row].x);
        const int column = static_cast<int>(threadIdx.x) % kLanes * 4;
        float4 sum{};
        float sum_of_p = 0;
#pragma unroll
        for (int w = 0; w < Config::kKeyWarps; ++w) {
            const float2 ml = sums.ml[w * kRows + row];
            const float factor = rescale_of<T>(ml.x, maximum, scale);
            const float4 o = *reinterpret_cast<const float4*>(sums.o + (w * kRows + row) * kPitch + column);
            sum = {fmaf(o.x, factor, sum.x), fmaf(o.y, factor, sum.y), fmaf(o.z, factor, sum.z),
                   fmaf(o.w, factor, sum.w)};
            sum_of_p = fmaf(ml.y, factor, sum_of_p);
        }
        const std::int64_t at = launch.partial((work.member.first_row + query) * p.heads_q + head, split);
        *reinterpret_cast<float4*>(launch.o + at * kHeadDim + column) = sum;
        if (column == 0) launch.ml[at] = {maximum, sum_of_p};
    }
}

/// One split: O, maximum and sum of its keys for the rows of a tile.
template <class T, class Shape>
__device__ __forceinline__ void run_split(char* memory, Place* places, const Launch& launch, const SplitWork& work) {
    constexpr Config kConfig = Shape::kConfig;
    constexpr int kHeadDim = kConfig.head_dim, kTiles = kConfig.row_tiles;
    constexpr int kAhead = kConfig.stages - 1;  // tiles on their way
    const ForwardParams& p = launch.params;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = uniform(static_cast<int>(threadIdx.x / 32));
    const int key_warp = warp % Config::kKeyWarps, first_row = warp / Config::kKeyWarps * 16 * kTiles;

    if (launch.cache.pages != nullptr) find_places(places, launch.cache, work);
    else places = nullptr;
    const KeySource k(launch, work, p.k, p.head_dim, launch.vector_k, places);
    const KeySource v(launch, work, p.v, p.head_dim_v, launch.vector_v, places);

    // Stage i of the ring is K of key tile i / 2 where i is even, else V.
    const int count = 2 * ((work.end - work.tile + Config::kKeys - 1) / Config::kKeys);
    const auto stage_at = [&](int i) { return memory + i % kConfig.stages * kConfig.tile_bytes(); };
    const auto load = [&](int i) {
        const int key = work.tile + i / 2 * Config::kKeys;
        if (i < count && i % 2 == 0) load_keys<Shape>(stage_at(i), k, work, key);
        if (i < count && i % 2 != 0) load_keys<Shape>(stage_at(i), v, work, key);
        ptx::cp_async_commit();
    };
    /// Waits for stage i, and starts the copy into the stage before it.
    const auto next = [&](int i) {
        ptx::cp_async_wait<kAhead - 1>();
        __syncthreads();
        load(i + kAhead);
    };
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) load(i);

    load_queries<T, Shape>(memory + kConfig.ring_bytes(), launch, work);
    Queries<kHeadDim, kTiles, false> queries(memory + kConfig.ring_bytes(), first_row, lane);
    const ThreadRows<Shape> rows(work, p.group, first_row, lane);
    const Scale scale = scale_of(launch);
    OnlineSoftmax<T> softmax[kTiles];
    float o[kTiles][kHeadDim / 8][4] = {};
#pragma unroll 1
    for (int i = 0; i < count; i += 2) {
        const int key = work.tile + i / 2 * Config::kKeys + 16 * key_warp;  // the warp's first
        const bool full = key >= work.full_begin && key + 16 <= work.full_end;
        float s[kTiles][2][4];
        next(i);
        multiply_qk<T>(s, queries,
                       MatrixAddress<kHeadDim>::chunks_first(stage_at(i) + 16 * key_warp * kHeadDim * 2, lane));
        if (launch.natural) modify<Shape>(s, launch, work, first_row, key + lane % 4 * 2, lane);
        if (!full) {
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
#pragma unroll
                for (int n = 0; n < 2; ++n) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int at = key + 8 * n + lane % 4 * 2 + e % 2;
                        if (at < rows.first[m][e / 2] || at > rows.last[m][e / 2]) s[m][n][e] = -INFINITY;
                    }
                }
            }
        }
        std::uint32_t a[kTiles][4];  // P as A fragments: 16 rows x 16 keys
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
            float rescale[2];
            softmax[m].update(s[m], scale, rescale);
            if (any_lane(rescale[0] != 1.0F || rescale[1] != 1.0F)) {
#pragma unroll
                for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) o[m][n][e] *= rescale[e / 2];
                }
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                a[m][2 * n] = ptx::pack<T>(s[m][n][0], s[m][n][1]);
                a[m][2 * n + 1] = ptx::pack<T>(s[m][n][2], s[m][n][3]);
            }
        }
        next(i + 1);
        const auto address = MatrixAddress<kHeadDim>::rows_first(stage_at(i + 1), 16 * key_warp, lane);
        if (full) add_rows_of_v<T, kHeadDim>(o, a, address, 0);
        else multiply_masked_pv<T, Shape>(o, a, address, rows, key, lane);
    }

    ptx::cp_async_wait<0>();
    __syncthreads();  // the ring is free
    const Sums<Shape> sums(memory);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
        softmax[m].finish();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + 16 * m + 8 * r + lane / 4;
            if (row >= work.rows) continue;
            const int at = key_warp * kConfig.rows() + row;
            if (lane % 4 == 0) sums.ml[at] = {softmax[m].max[r], softmax[m].sum[r]};
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
                *reinterpret_cast<float2*>(sums.o + at * Sums<Shape>::kPitch + 8 * n + lane % 4 * 2) = {
                    o[m][n][2 * r], o[m][n][2 * r + 1]};
            }
        }
    }
    __syncthreads();
    write_partials<T, Shape>(sums, launch, work, scale);
    __syncthreads();
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.ctas)
    split_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    constexpr int kRows = kConfig.rows();
    extern __shared__ __align__(128) char memory[];
    auto* places = reinterpret_cast<Place*>(memory + kConfig.ring_bytes() + kConfig.query_bytes());
    __shared__ int ends[kMostMembers];
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
#endif
    const ForwardParams& p = launch.params;
    const int groups = launch.groups;
    const int first = static_cast<int>(blockIdx.x) % groups * kMostMembers;
    const int members = min(static_cast<int>(p.batch) - first, kMostMembers);
    const bool own_lengths = launch.own_lengths();
    int each = 0, total;  // numbers of splits
    if (own_lengths) {
        count_items<kRows>(ends, launch, first, members);
        total = ends[members - 1];
    } else {
        const Items items = items_of<kRows>(launch, member_of(launch, 0).sequence);
        each = items.tiles * items.splits * p.heads_kv;
        total = each * members;
    }
    int member = 0;
    const int ctas = static_cast<int>(gridDim.x) / groups;
    for (int item = static_cast<int>(blockIdx.x) / groups; item < total; item += ctas) {
        int before;
        if (own_lengths) {
            while (ends[member] <= item) ++member;
            before = member == 0 ? 0 : ends[member - 1];
        } else {
            member = item / each;
            before = member * each;
        }
        SplitWork work;
        work.find<kRows>(launch, first + member, static_cast<unsigned>(item - before));
        if (work.exists) run_split<T, Shape>(memory, places, launch, work);
    }
}

}  // namespace tessera::cuda::decode
