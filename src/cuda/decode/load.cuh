// SPDX-License-Identifier: Apache-2.0
//
// The warp that loads: it finds the splits of its CTA one after the other, and copies their Q and their tiles of K and
// V into rings in shared memory as soon as there is room. So the copies of a split run while the one before is
// computed.
#pragma once

#include "cuda/decode/ring.cuh"
#include "cuda/decode/work.cuh"
#include "cuda/tile/chunks.cuh"

namespace tessera::cuda::decode {

/// A row of a split.
struct RowInfo {
    int first;  ///< visible keys first ... last
    int last;
    std::int64_t partial;  ///< its place in the workspace; negative: it has none, since it sees no key of the split
};

/// What the warps of a CTA share, beside the buffers.
template <class Shape>
struct Shared {
    CopyRing<Shape::kConfig.stages> tiles;
    CopyRing<Shape::kConfig.works> works;
    SplitWork work[Shape::kConfig.works];
    RowInfo rows[Shape::kConfig.works][Shape::kConfig.rows()];
    float2 ml[Config::kKeyWarps][Shape::kConfig.rows()];  ///< maximum and sum of P of each warp
    int ends[kMostMembers];  ///< own_lengths(): numbers of splits up to each sequence of the CTA's group
};

/// The buffers in dynamic shared memory.
template <class Shape>
struct Buffers {
    static constexpr Config kConfig = Shape::kConfig;
    char* memory;

    __device__ __forceinline__ char* tile(int stage) const { return memory + stage * kConfig.tile_bytes(); }
    __device__ __forceinline__ char* queries(int work) const {
        return memory + kConfig.stages * kConfig.tile_bytes() + work * kConfig.query_bytes();
    }
    /// O of a warp's rows, [rows][sum_pitch].
    __device__ __forceinline__ float* sums(int key_warp) const {
        return reinterpret_cast<float*>(queries(kConfig.works)) + key_warp * kConfig.rows() * kConfig.sum_pitch();
    }
};

/// Counts the splits of the sequences of a group, and sums them up. By all threads of the CTA.
template <class Shape>
__device__ __forceinline__ void count_items(int* ends, const Launch& launch, int first, int count) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
        const Items items = items_of(launch, member_of(launch, first + i).sequence, Shape::kConfig.rows());
        ends[i] = items.tiles * items.splits * launch.params.heads_kv;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        const int lane = static_cast<int>(threadIdx.x);
        const int each = (count + 31) / 32;
        const int begin = min(lane * each, count), end = min(begin + each, count);
        int sum = 0;
        for (int i = begin; i < end; ++i) sum += ends[i];
        int before = sum;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(kAllLanes, before, step);
            if (lane >= step) before += other;
        }
        before -= sum;
        for (int i = begin; i < end; ++i) before = ends[i] += before;
    }
    __syncthreads();
}

/// cp.async: 16 bytes past the L1.
__device__ __forceinline__ void copy_16(std::uint32_t to, const char* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/// The chunks of a tile's rows that a lane copies: chunk `chunk` of rows `row`, row + kRowsAtOnce, ...
template <class Shape>
struct LaneChunks {
    static constexpr int kHeadDim = Shape::kConfig.head_dim, kChunks = kHeadDim / kChunk;
    static constexpr int kRowsAtOnce = 32 / kChunks;
    static constexpr int kOffsets = 8 / kRowsAtOnce;  ///< the swizzle repeats every 8 rows

    int chunk;
    int row;
    int offsets[kOffsets];  ///< in a tile: those of the chunks of the first 8 rows

    __device__ __forceinline__ explicit LaneChunks(int lane) : chunk(lane % kChunks), row(lane / kChunks) {
#pragma unroll
        for (int i = 0; i < kOffsets; ++i) offsets[i] = chunk_offset<kHeadDim>(row + i * kRowsAtOnce, chunk);
    }
    /// Copies the lane's chunks of rows begin ... end - 1 (multiples of 32). `address`(row): that of the chunk. Eight
    /// addresses are found before the copies of eight rows: a copy keeps its address register for a while.
    template <class Address>
    __device__ __forceinline__ void copy(std::uint32_t to, int begin, int end, bool has_chunk,
                                         const Address& address) const {
        constexpr int kBatch = 8;
#pragma unroll 1
        for (int first = begin; first < end; first += kBatch * kRowsAtOnce) {
            const char* from[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) from[i] = address(first + i * kRowsAtOnce + row);
            if (!has_chunk) continue;
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int eights = i / kOffsets * 8;  // of rows
                copy_16(to + first * kHeadDim * 2 + offsets[i % kOffsets] + eights * kHeadDim * 2, from[i]);
            }
        }
    }
};

/// The rows of K and V of one kv head of a sequence, copied a tile at a time.
template <class Shape>
class KeyCopies {
 public:
    __device__ __forceinline__ KeyCopies(const Launch& launch, const SplitWork& work, const LaneChunks<Shape>& chunks,
                                         int lane)
        : launch_(launch), work_(work), chunks_(chunks), lane_(lane), key_(work.tile) {
        if (paged()) read_pages(key_);
    }

    /// Finds the places of the next tile's keys, and copies their rows of K.
    __device__ __forceinline__ void load_k(char* tile) {
        if (paged()) find_places();
        load(tile, launch_.params.k, launch_.params.head_dim, launch_.vector_k, places_k_);
    }
    /// Copies the rows of V of the tile, and goes on to the next.
    __device__ __forceinline__ void load_v(char* tile) {
        load(tile, launch_.params.v, launch_.params.head_dim_v, launch_.vector_v, places_v_);
        key_ += Config::kKeys;
    }

 private:
    __device__ __forceinline__ bool paged() const { return launch_.cache.pages != nullptr; }

    /// Reads the page numbers of the tile's keys lane and lane + 32, ahead of their use. `tile`: its first key.
    __device__ __forceinline__ void read_pages(int tile) {
        const Cache& cache = launch_.cache;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int key = tile + lane_ + 32 * i;
            const int row = static_cast<int>(work_.member.sequence.first_kv) + key;
            const int number = cache.page_size.quotient(row);
            row_in_page_[i] = row - number * cache.page_size.divisor();
            page_[i] = -1;
            if (key >= work_.begin && key < work_.end)
                page_[i] = cache.pages[work_.batch * cache.pages_batch + number * cache.pages_step];
        }
    }

    /// Bytes from the first row of the kv head to the two keys; negative: none. Then reads the next tile's pages.
    __device__ __forceinline__ void find_places() {
        const ForwardParams& p = launch_.params;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool exists = page_[i] >= 0 && page_[i] < launch_.cache.count;
            places_k_[i] = exists ? (page_[i] * p.k.batch + row_in_page_[i] * p.k.row) * 2 : -1;
            places_v_[i] = exists ? (page_[i] * p.v.batch + row_in_page_[i] * p.v.row) * 2 : -1;
        }
        if (key_ + Config::kKeys < work_.end) read_pages(key_ + Config::kKeys);
    }

    __device__ __forceinline__ void load(char* tile, const Rows& rows, int dim, bool vector,
                                         const std::int64_t (&places)[2]) const {
        const std::uint32_t to = ptx::shared_address(tile);
        const char* from = rows.data + work_.kv_head * rows.head * 2;
        bool whole;  // do all keys of the tile exist?
        if (paged()) {
            whole = __all_sync(kAllLanes, places[0] >= 0 && places[1] >= 0);
        } else {
            whole = key_ >= work_.begin && key_ + Config::kKeys <= work_.end;
            from += (work_.member.slot * rows.batch + (work_.member.sequence.first_kv + key_) * rows.row) * 2;
        }
        if (!whole || !vector) {
            load_some(tile, from, rows, dim, vector, places);
            return;
        }
        // Chunks past the end of the rows were set to 0 when the kernel began, and are never written.
        const bool has_chunk = chunks_.chunk * kChunk < dim;
        from += chunks_.chunk * 16;
        if (paged()) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                chunks_.copy(to, 32 * half, 32 * half + 32, has_chunk,
                             [&](int row) { return from + __shfl_sync(kAllLanes, places[half], row); });
            }
        } else {
            from += chunks_.row * rows.row * 2;
            const std::int64_t step = LaneChunks<Shape>::kRowsAtOnce * rows.row * 2;
            chunks_.copy(to, 0, Config::kKeys, has_chunk, [&](int) {
                const char* at = from;
                from += step;
                return at;
            });
        }
    }

    /// Rows of which some do not exist, or that are read element by element.
    __device__ __forceinline__ void load_some(char* tile, const char* from, const Rows& rows, int dim, bool vector,
                                              const std::int64_t (&places)[2]) const {
        const int chunk = chunks_.chunk;
#pragma unroll 1
        for (int row = chunks_.row; row < Config::kKeys; row += LaneChunks<Shape>::kRowsAtOnce) {
            bool inside = key_ + row >= work_.begin && key_ + row < work_.end;
            std::int64_t place = row * rows.row * 2;
            if (paged()) {
                const std::int64_t low = __shfl_sync(kAllLanes, places[0], row % 32);
                const std::int64_t high = __shfl_sync(kAllLanes, places[1], row % 32);
                place = row < 32 ? low : high;
                inside = place >= 0;
            }
            if (chunk * kChunk >= dim) continue;
            const int offset = chunk_offset<Shape::kConfig.head_dim>(row, chunk);
            if (vector) {
                ptx::cp_async_16(ptx::shared_address(tile) + offset, inside ? from + place + chunk * 16 : rows.data,
                                 inside);
                continue;
            }
            const Source source{from + place, 0, rows.column * 2, 1, dim, false};
            *reinterpret_cast<uint4*>(tile + offset) = inside ? source.elements(0, chunk * kChunk) : uint4{};
        }
    }

    const Launch& launch_;
    const SplitWork& work_;
    const LaneChunks<Shape>& chunks_;
    int lane_;
    int key_;  ///< first of the tile
    int page_[2] = {};
    int row_in_page_[2] = {};
    std::int64_t places_k_[2] = {};
    std::int64_t places_v_[2] = {};
};

/// Finds out about the rows of a split.
__device__ __forceinline__ void describe_rows(RowInfo* rows, int count, const Launch& launch, const SplitWork& work,
                                              int lane) {
    const ForwardParams& p = launch.params;
    for (int row = lane; row < count; row += 32) {
        RowInfo info{INT_MAX, -1, -1};
        const int query = work.query(launch, row);
        const Span visible = visible_of(work.band, query);
        const Splits splits(visible);
        if (row < work.rows && splits.shift == work.shift) {
            info.first = visible.begin;
            info.last = visible.end - 1;
            const int split = work.number - splits.first;
            if (split >= 0 && split < splits.count)
                info.partial =
                    launch.partial((work.member.first_row + query) * p.heads_q + work.head(launch, row), split);
        }
        rows[row] = info;
    }
}

/// Copies the rows of Q of a split; rows and columns past the end become 0.
template <class T, class Shape>
__device__ __forceinline__ void load_queries(char* tile, const Launch& launch, const SplitWork& work, int lane) {
    constexpr int kHeadDim = Shape::kConfig.head_dim, kChunks = kHeadDim / kChunk;
    const ForwardParams& p = launch.params;
    const std::uint32_t to = ptx::shared_address(tile);
    const int chunk = lane % kChunks;
#pragma unroll 1
    for (int row = lane / kChunks; row < Shape::kConfig.rows(); row += 32 / kChunks) {
        const bool inside = row < work.rows && chunk * kChunk < p.head_dim;
        const std::int64_t query = work.member.sequence.first_q + work.query(launch, row);
        const char* from =
            inside ? p.q.data + head_offset(p.q, work.batch, query, work.head(launch, row), sizeof(T)) : p.q.data;
        const std::uint32_t offset = chunk_offset<kHeadDim>(row, chunk);
        if (launch.vector_q) {
            ptx::cp_async_16(to + offset, inside ? from + chunk * 16 : from, inside);
        } else {
            const Source source{from, 0, p.q.column * 2, 1, p.head_dim, false};
            *reinterpret_cast<uint4*>(tile + offset) = inside ? source.elements(0, chunk * kChunk) : uint4{};
        }
    }
}

template <class T, class Shape>
__device__ __forceinline__ void load_splits(Shared<Shape>& shared, const Buffers<Shape>& buffers, const Launch& launch,
                                            int lane) {
    const ForwardParams& p = launch.params;
    const int first = static_cast<int>(blockIdx.x) % launch.groups * kMostMembers;
    const int members = min(static_cast<int>(p.batch) - first, kMostMembers);
    const int ctas = static_cast<int>(gridDim.x) / launch.groups;
    const int each = launch.items.tiles * launch.items.splits * p.heads_kv;
    const int total = launch.own_lengths() ? shared.ends[members - 1] : each * members;
    const LaneChunks<Shape> chunks(lane);
    Position<Shape::kConfig.stages> stage;
    Position<Shape::kConfig.works> slot;
    int member = 0;
    for (int item = static_cast<int>(blockIdx.x) / launch.groups; item < total; item += ctas) {
        int before;
        if (launch.own_lengths()) {
            while (shared.ends[member] <= item) ++member;
            before = member == 0 ? 0 : shared.ends[member - 1];
        } else {
            member = item / each;
            before = member * each;
        }
        const SplitWork work = SplitWork::find(launch, first + member, item - before, Shape::kConfig.rows());
        if (!work.exists) continue;
        shared.works.wait_empty(slot);
        if (lane == 0) shared.work[slot.stage] = work;
        describe_rows(shared.rows[slot.stage], Shape::kConfig.rows(), launch, work, lane);
        shared.works.stored(slot);
        load_queries<T, Shape>(buffers.queries(slot.stage), launch, work, lane);
        if (launch.vector_q) shared.works.copied(slot);
        else shared.works.stored(slot);
        slot.next();
        KeyCopies<Shape> copies(launch, work, chunks, lane);
        for (int i = work.tiles(); i > 0; --i) {
            shared.tiles.wait_empty(stage);
            copies.load_k(buffers.tile(stage.stage));
            if (launch.vector_k) shared.tiles.copied(stage);
            else shared.tiles.stored(stage);
            stage.next();
            shared.tiles.wait_empty(stage);
            copies.load_v(buffers.tile(stage.stage));
            if (launch.vector_v) shared.tiles.copied(stage);
            else shared.tiles.stored(stage);
            stage.next();
        }
    }
    shared.works.wait_empty(slot);
    if (lane == 0) shared.work[slot.stage].rows = 0;
    shared.works.stored(slot);
    shared.works.stored(slot);
    ptx::cp_async_wait<0>();
}

}  // namespace tessera::cuda::decode
