// SPDX-License-Identifier: Apache-2.0
//
// The two producer warps: one copies tiles of K, the other Q and tiles of V, into rings in shared memory. They go
// through the splits of their CTA as soon as stages are empty, so the copies of a split run while the previous one is
// computed.
#pragma once

#include "cuda/decode/exchange.cuh"
#include "cuda/decode/ring.cuh"
#include "cuda/decode/work.cuh"
#include "cuda/tile/chunks.cuh"
#include "cuda/tile/swizzle_panel.cuh"

namespace tessera::cuda::decode {

/// A row of a split.
struct RowInfo {
    int first;  ///< visible keys first ... last
    int last;
    std::int64_t partial;  ///< index of its result in `ml`; negative: it has none, since it sees no key of the split
};

/// The static shared memory of a CTA: barriers, the splits in flight, the exchange between warps.
template <class Shape>
struct Shared {
    CopyRing<Shape::kConfig.stages> kv[2];
    CopyRing<Shape::kConfig.q_stages> q;
    SplitWork work[Shape::kConfig.q_stages];
    RowInfo rows[Shape::kConfig.q_stages][Shape::kConfig.rows];
    Exchange<Shape::kConfig.rows> exchange;
    int ends[kMostSequences];  ///< own_lengths(): numbers of splits up to each sequence of the CTA's group
};

/// The buffers in dynamic shared memory. Rows are stored in panels of 64 dims (swizzle_panel.cuh). Tiles of keys follow
/// Q, since wgmma reads 64 rows of Q even if there are fewer.
template <class Shape>
struct Buffers {
    static constexpr Config kConfig = Shape::kConfig;
    char* memory;

    __device__ __forceinline__ char* queries(int work) const { return memory + work * kConfig.query_bytes(); }
    /// A tile of K (0) or V (1).
    __device__ __forceinline__ char* kv(int which, int stage) const {
        return queries(kConfig.q_stages) + (which * kConfig.stages + stage) * kConfig.tile_bytes();
    }
};

/// Counts the splits of the sequences of a group, and sums them up. By all threads of the CTA.
template <class Shape>
__device__ __forceinline__ void count_items(int* ends, const Launch& launch, int first, int count) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
        const Items items =
            items_of(launch, cached_sequence_of(launch.params, launch.cache, first + i), Shape::kConfig.rows);
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

/// How the lanes of a warp share rows of head_dim: a lane copies a chunk of every kRowsAtOnce-th row, or kParts of
/// them, 8 chunks apart.
template <int kHeadDim>
struct Lanes {
    static constexpr int kChunks = 32 % (kHeadDim / kChunk) == 0 ? kHeadDim / kChunk : 8;
    static constexpr int kParts = kHeadDim / kChunk / kChunks;
    static constexpr int kRowsAtOnce = 32 / kChunks;
    static_assert(kParts * kChunks * kChunk == kHeadDim);
};

/// Byte offset of a chunk in a tile of `rows` rows.
__device__ __forceinline__ int chunk_in_panels(int rows, int row, int chunk) {
    return chunk / 8 * rows * kPanelRowBytes + swizzled(row, chunk % 8);
}

/// The rows of K, or of V, of one kv head of a sequence, copied a tile at a time.
template <class Shape>
class KeyCopies {
 public:
    static constexpr int kHeadDim = Shape::kConfig.head_dim;
    static constexpr int kChunks = Lanes<kHeadDim>::kChunks, kParts = Lanes<kHeadDim>::kParts;
    static constexpr int kRowsAtOnce = Lanes<kHeadDim>::kRowsAtOnce;

    __device__ __forceinline__ KeyCopies(const Launch& launch, const Loaded& loaded, int lane)
        : launch_(launch),
          rows_(loaded.rows),
          dim_(loaded.dim),
          vector_(loaded.vector),
          policy_(launch.read_once ? ptx::CacheHint::evict_first : ptx::CacheHint::normal),
          lane_(lane),
          chunk_(lane % kChunks),
          row_(lane / kChunks) {
#pragma unroll
        for (int i = 0; i < kOffsets; ++i) offsets_[i] = chunk_in_panels(Config::kKeys, row_ + i * kRowsAtOnce, chunk_);
    }

    __device__ __forceinline__ void begin(const SplitWork& work) {
        key_ = work.tile;
        head_ = rows_.data + work.kv_head * rows_.head * 2;
        if (paged()) read_pages(work, key_);
        else head_ += (work.cached.slot * rows_.batch + work.cached.sequence.first_kv * rows_.row) * 2;
    }

    /// Copies the next tile, and arrives at `full` when that is done.
    __device__ __forceinline__ void copy_tile(char* tile, const SplitWork& work, ptx::Mbarrier& full) {
        std::int64_t row_offsets[2] = {0, 0};
        bool whole = key_ >= work.begin && key_ + Config::kKeys <= work.end;  // do all keys of the tile exist?
        if (paged()) {
            find_row_offsets(row_offsets);
            whole = __all_sync(kAllLanes, row_offsets[0] >= 0 && row_offsets[1] >= 0);
            if (key_ + Config::kKeys < work.end) read_pages(work, key_ + Config::kKeys);
        }
        if (!whole || !vector_) copy_some(tile, work, row_offsets);
        else if (paged()) copy_pages(ptx::shared_address(tile), row_offsets);
        else copy_rows(ptx::shared_address(tile));
        if (vector_) ptx::cp_async_mbarrier_arrive(full);
        else ptx::mbarrier_arrive(full);
        key_ += Config::kKeys;
    }

 private:
    static constexpr int kOffsets = 8 / kRowsAtOnce;  ///< the swizzle repeats every 8 rows
    static constexpr int kBatch = 8;                  ///< copies, whose addresses are found before the first one

    __device__ __forceinline__ bool paged() const { return launch_.cache.pages != nullptr; }
    /// Chunks past the end of the rows were set to 0 when the kernel began, and are never written.
    __device__ __forceinline__ bool has_chunk(int part) const { return (chunk_ + 8 * part) * kChunk < dim_; }

    /// Reads the page numbers of the tile's keys lane and lane + 32, ahead of their use. `tile`: its first key.
    __device__ __forceinline__ void read_pages(const SplitWork& work, int tile) {
        const Cache& cache = launch_.cache;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int key = tile + lane_ + 32 * i;
            const int row = static_cast<int>(work.cached.sequence.first_kv) + key;
            const int number = cache.page_size.quotient(row);
            row_in_page_[i] = row - number * cache.page_size.divisor();
            page_[i] = -1;
            if (key >= work.begin && key < work.end)
                page_[i] = cache.pages[work.batch * cache.pages_batch + number * cache.pages_step];
        }
    }

    /// Bytes from the first row of the kv head to the two keys; negative: none.
    __device__ __forceinline__ void find_row_offsets(std::int64_t (&row_offsets)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool exists = page_[i] >= 0 && page_[i] < launch_.cache.count;
            row_offsets[i] = exists ? (page_[i] * rows_.batch + row_in_page_[i] * rows_.row) * 2 : -1;
        }
    }

    /// The copies of batch number `batch` from these addresses.
    __device__ __forceinline__ void copy_batch(std::uint32_t to, int batch, const char* (&from)[kBatch]) const {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = batch * kBatch * kRowsAtOnce + i / kOffsets * 8;  // without the lane's own
#pragma unroll
            for (int part = 0; part < kParts; ++part)
                ptx::cp_async_16_if(has_chunk(part),
                                    to + offsets_[i % kOffsets] + (row + part * Config::kKeys) * kPanelRowBytes,
                                    from[i] + part * 128, policy_);
        }
    }

    __device__ __forceinline__ void copy_rows(std::uint32_t to) const {
        const std::int64_t step = kRowsAtOnce * rows_.row * 2;
        const char* first = head_ + (key_ + row_) * rows_.row * 2 + chunk_ * 16;
#pragma unroll 2
        for (int batch = 0; batch < Config::kKeys / (kBatch * kRowsAtOnce); ++batch) {
            const char* from[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) from[i] = first + i * step;
            first += kBatch * step;
            copy_batch(to, batch, from);
        }
    }

    __device__ __forceinline__ void copy_pages(std::uint32_t to, const std::int64_t (&row_offsets)[2]) const {
        const char* first = head_ + chunk_ * 16;
#pragma unroll
        for (int batch = 0; batch < Config::kKeys / (kBatch * kRowsAtOnce); ++batch) {
            const char* from[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int row = (batch * kBatch + i) * kRowsAtOnce;
                from[i] = first + __shfl_sync(kAllLanes, row_offsets[row / 32], row % 32 + row_);
            }
            copy_batch(to, batch, from);
        }
    }

    /// A tile of which some rows do not exist, or that is read element by element.
    __device__ __forceinline__ void copy_some(char* tile, const SplitWork& work,
                                              const std::int64_t (&row_offsets)[2]) const {
#pragma unroll 1
        for (int row = row_; row < Config::kKeys; row += kRowsAtOnce) {
            bool inside = key_ + row >= work.begin && key_ + row < work.end;
            std::int64_t row_offset = (key_ + row) * rows_.row * 2;
            if (paged()) {
                const std::int64_t low = __shfl_sync(kAllLanes, row_offsets[0], row % 32);
                const std::int64_t high = __shfl_sync(kAllLanes, row_offsets[1], row % 32);
                row_offset = row < 32 ? low : high;
                inside = row_offset >= 0;
            }
#pragma unroll 1
            for (int part = 0; part < kParts && has_chunk(part); ++part) {
                const int chunk = chunk_ + 8 * part, offset = chunk_in_panels(Config::kKeys, row, chunk);
                if (vector_) {
                    ptx::cp_async_16(ptx::shared_address(tile) + offset,
                                     inside ? head_ + row_offset + chunk * 16 : rows_.data, inside);
                    continue;
                }
                const Source source{head_ + row_offset, 0, rows_.column * 2, 1, dim_, false};
                *reinterpret_cast<uint4*>(tile + offset) = inside ? source.elements(0, chunk * kChunk) : uint4{};
            }
        }
    }

    const Launch& launch_;
    const Rows& rows_;
    int dim_;
    bool vector_;
    ptx::CacheHint policy_;
    int lane_;
    int chunk_;
    int row_;
    int offsets_[kOffsets];       ///< in a tile: those of the lane's chunks of the first 8 rows
    const char* head_ = nullptr;  ///< key 0 of the sequence; with pages, row 0 of page 0
    int key_ = 0;                 ///< first of the next tile
    int page_[2] = {};
    int row_in_page_[2] = {};
};

/// Finds out about the rows of a split.
__device__ __forceinline__ void describe_rows(RowInfo* rows, int count, const Launch& launch, const SplitWork& work,
                                              int lane) {
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
                info.partial = launch.partial(work.cached.first_query + query, work.head(launch, row), split);
        }
        rows[row] = info;
    }
}

/// Copies the rows of Q of a split. Rows and columns past the end become 0, up to a multiple of 16 rows.
template <class T, class Shape>
__device__ __forceinline__ void load_queries(char* tile, const Launch& launch, const SplitWork& work, int lane) {
    constexpr int kRows = Shape::kConfig.rows, kHeld = (kRows + 31) / 32;
    using Lanes = Lanes<Shape::kConfig.head_dim>;
    const ForwardParams& p = launch.params;
    const std::uint32_t to = ptx::shared_address(tile);
    std::int64_t offsets[kHeld];  // of the rows lane, lane + 32
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        const int row = lane + 32 * i;
        const std::int64_t query = work.cached.sequence.first_q + work.query(launch, row);
        offsets[i] = row < work.rows ? head_offset(p.q, work.batch, query, work.head(launch, row), sizeof(T)) : -1;
    }
    const int end = (work.rows + 15) / 16 * 16;
#pragma unroll 4
    for (int first = 0; first < end; first += Lanes::kRowsAtOnce) {
        const int row = first + lane / Lanes::kChunks;
        std::int64_t offset = __shfl_sync(kAllLanes, offsets[0], row % 32);
        if (kHeld > 1) {
            const std::int64_t other = __shfl_sync(kAllLanes, offsets[kHeld - 1], row % 32);
            if (row >= 32) offset = other;
        }
        const char* from = p.q.data + max(offset, std::int64_t{0});
#pragma unroll
        for (int part = 0; part < Lanes::kParts; ++part) {
            const int chunk = lane % Lanes::kChunks + 8 * part;
            const bool inside = offset >= 0 && chunk * kChunk < p.head_dim;
            const std::uint32_t at = chunk_in_panels(kRows, row, chunk);
            if (launch.vector_q) {
                ptx::cp_async_16(to + at, inside ? from + chunk * 16 : p.q.data, inside);
            } else {
                const Source source{from, 0, p.q.column * 2, 1, p.head_dim, false};
                *reinterpret_cast<uint4*>(tile + at) = inside ? source.elements(0, chunk * kChunk) : uint4{};
            }
        }
    }
}

/// Calls f for each split of this CTA.
template <class Shape, class F>
__device__ __forceinline__ void for_each_split(const Shared<Shape>& shared, const Launch& launch, const F& f) {
    const ForwardParams& p = launch.params;
    const int cta = launch.groups.quotient(static_cast<int>(blockIdx.x));
    const int first = (static_cast<int>(blockIdx.x) - cta * launch.groups.divisor()) * kMostSequences;
    const int sequences = min(static_cast<int>(p.batch) - first, kMostSequences);
    const int ctas = launch.groups.quotient(static_cast<int>(gridDim.x));
    const int each = launch.items_per_sequence.divisor();
    const int total = launch.own_lengths() ? shared.ends[sequences - 1] : each * sequences;
    int sequence = 0;
    for (int item = cta; item < total; item += ctas) {
        int before;
        if (launch.own_lengths()) {
            while (shared.ends[sequence] <= item) ++sequence;
            before = sequence == 0 ? 0 : shared.ends[sequence - 1];
        } else {
            sequence = launch.items_per_sequence.quotient(item);
            before = sequence * each;
        }
        const SplitWork work = SplitWork::find(launch, first + sequence, item - before, Shape::kConfig.rows);
        if (work.exists) f(work);
    }
}

/// A producer warp: the first one loads K, the second one V, Q, and the description of each split for the consumer
/// warps.
template <class T, class Shape>
__device__ __forceinline__ void load(Shared<Shape>& shared, const Buffers<Shape>& buffers, const Launch& launch,
                                     int warp, int lane) {
    KeyCopies<Shape> copies(launch, launch.loaded[warp], lane);
    auto& ring = shared.kv[warp];
    CopyPipelineState<Shape::kConfig.stages> at;
    CopyPipelineState<Shape::kConfig.q_stages> slot;
    for_each_split(shared, launch, [&](const SplitWork& work) {
        copies.begin(work);
        if (warp == 1) {
            shared.q.producer_acquire(slot);
            load_queries<T, Shape>(buffers.queries(slot.index), launch, work, lane);
            if (lane == 0) shared.work[slot.index] = work;
            describe_rows(shared.rows[slot.index], Shape::kConfig.rows, launch, work, lane);
            ptx::mbarrier_arrive(shared.q.full[slot.index]);  // for the stores
            if (launch.vector_q) ptx::cp_async_mbarrier_arrive(shared.q.full[slot.index]);
            else ptx::mbarrier_arrive(shared.q.full[slot.index]);
            slot.advance();
        }
        for (int i = work.tiles(); i > 0; --i) {
            ring.producer_acquire(at);
            copies.copy_tile(buffers.kv(warp, at.index), work, ring.full[at.index]);
            at.advance();
        }
    });
    if (warp == 1) {
        shared.q.producer_acquire(slot);
        if (lane == 0) shared.work[slot.index].rows = 0;
        ptx::mbarrier_arrive(shared.q.full[slot.index]);
        ptx::mbarrier_arrive(shared.q.full[slot.index]);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
}

}  // namespace tessera::cuda::decode
