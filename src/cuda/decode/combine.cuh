// SPDX-License-Identifier: Apache-2.0
//
// The sum over the splits of a row, in a fixed order, and O and LSE from it. A row has up to 16 segments of
// neighbouring splits, 8 or more in each. Splits are added in order within a segment, then segments in order. One warp
// adds all segments of a row, or one warp each. Both give the same bits. The kernel starts beside split_kernel and
// waits for it (programmatic dependent launch).
#pragma once

#include "cuda/decode/work.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sink.cuh"

namespace tessera::cuda::decode {

inline constexpr int kSegments = 16;      ///< of a row, at most
inline constexpr int kSegmentSplits = 8;  ///< of a segment, at least
inline constexpr int kSerialSplits = 32;  ///< up to as many splits one warp adds all segments of a row
inline constexpr int kRowsOfCta = 8;      ///< rows of a CTA whose warps have a row each

/// Sums relative to the row's maximum: `columns` of O that a lane has, and the sum of P.
template <int kColumns>
struct RowSums {
    float o[kColumns];
    float p;

    __device__ __forceinline__ void add(const RowSums& other) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) o[c] = __fadd_rn(o[c], other.o[c]);
        p = __fadd_rn(p, other.p);
    }
};

/// A row of the results, and its splits.
struct CombineRow {
    Sequence sequence;
    int batch;
    int head;
    int query;
    int splits = 0;
    std::int64_t first = 0;  ///< index of the first split in `ml`
    bool exists = false;

    /// Row `index` of the launch's, [queries, heads_q].
    __device__ __forceinline__ CombineRow(const Launch& launch, unsigned index) {
        const ForwardParams& p = launch.params;
        const auto heads = static_cast<unsigned>(p.heads_q);
        head = static_cast<int>(index % heads);
        const std::int64_t of_all = launch.first_query + index / heads;
        if (of_all >= launch.end_query) return;
        batch = sequence_with(p, of_all);
        const CachedSequence cached = cached_sequence_of(p, launch.cache, batch);
        sequence = cached.sequence;
        query = static_cast<int>(of_all - cached.first_query);
        exists = query >= 0 && query < sequence.len_q;
        if (!exists) return;
        splits = Splits(visible_of(band_of(launch, sequence), query)).count;
        first = launch.partial(of_all, head, 0);
    }

 private:
    /// The sequence that has a query: of a ragged batch the last one that begins there or before.
    __device__ __forceinline__ static int sequence_with(const ForwardParams& p, std::int64_t query) {
        if (p.cu_seqlens_q == nullptr)
            return static_cast<int>(static_cast<unsigned>(query) / static_cast<unsigned>(p.len_q));
        int low = 0, high = static_cast<int>(p.batch) - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            const bool begun = cu_seqlens_at(p.cu_seqlens_q, middle * p.cu_stride_q, p.cu_q_is_64, p.total_q) <= query;
            (begun ? low : high) = begun ? middle : middle - 1;
        }
        return low;
    }
};

/// The largest score of the row.
__device__ __forceinline__ float maximum_of(const Launch& launch, std::int64_t first, int splits, int lane) {
    float maximum = -INFINITY;
    for (int i = lane; i < splits; i += 32) maximum = fmaxf(maximum, launch.ml[first + i].x);
    return warp_max(maximum);
}

/// Prefetched partial results of up to kSegmentSplits consecutive splits of a row.
template <int kHeadDim>
struct Parts {
    static constexpr int kColumns = kHeadDim / 32;
    float o[kSegmentSplits][kColumns];
    float2 ml;  ///< lane i: of split i

    __device__ __forceinline__ void read(const Launch& launch, const CombineRow& row, int first, int end, int lane) {
        ml = {-INFINITY, 0};
        if (lane < kSegmentSplits && first + lane < end) ml = launch.ml[row.first + first + lane];
#pragma unroll
        for (int i = 0; i < kSegmentSplits; ++i) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) o[i][c] = 0;
            if (first + i >= end) continue;
            const float* from = launch.o + (row.first + first + i) * kHeadDim + lane * kColumns;
#pragma unroll
            for (int c = 0; c < kColumns; c += 2) {
                const float2 pair = *reinterpret_cast<const float2*>(from + c);
                o[i][c] = pair.x;
                o[i][c + 1] = pair.y;
            }
        }
    }

    template <class T>
    __device__ __forceinline__ void add_to(RowSums<kColumns>& sums, float maximum, const Scale& scale) const {
        const float own = rescale_of<T>(ml.x, maximum, scale);
#pragma unroll
        for (int i = 0; i < kSegmentSplits; ++i) {
            const float factor = __shfl_sync(kAllLanes, own, i);
#pragma unroll
            for (int c = 0; c < kColumns; ++c) sums.o[c] = __fmaf_rn(o[i][c], factor, sums.o[c]);
            sums.p = __fmaf_rn(__shfl_sync(kAllLanes, ml.y, i), factor, sums.p);
        }
    }
};

/// The sum over a segment, splits begin ... end - 1. The first call finds `maximum`, -inf before, while it reads.
template <class T, int kHeadDim>
__device__ __forceinline__ RowSums<kHeadDim / 32> segment_sum(const Launch& launch, const CombineRow& row, int begin,
                                                              int end, int splits, float& maximum, const Scale& scale,
                                                              int lane) {
    RowSums<kHeadDim / 32> sums{};
#pragma unroll 1
    for (int i = begin; i == begin || i < end; i += kSegmentSplits) {
        Parts<kHeadDim> parts;
        parts.read(launch, row, i, end, lane);
        if (maximum == -INFINITY) maximum = maximum_of(launch, row.first, splits, lane);
        parts.template add_to<T>(sums, maximum, scale);
    }
    return sums;
}

/// The last step from the sums of a row to its results: O = fmaf(sum of P V, factor, 0).
struct RowEnd {
    float factor;
    float lse;
};

/// The end of a row of query head `head`, with its sink. `sum`: the sum of P.
template <class T>
__device__ __forceinline__ RowEnd end_of_row(const Launch& launch, int head, float sum, float maximum,
                                             const Scale& scale) {
    OnlineSoftmax<T> softmax;
    softmax.max[0] = maximum;
    softmax.sum[0] = sum;
    const WithSink with = with_sink_of(launch.params, head, softmax.lse(0, scale));
    return {softmax.inverse_sum(0) * with.factor, with.lse};
}

/// Writes O and LSE of the row if it `writes`.
template <class T, int kHeadDim>
__device__ __forceinline__ void write_row(const Launch& launch, const CombineRow& row,
                                          const RowSums<kHeadDim / 32>& sums, float maximum, const Scale& scale,
                                          bool writes, int lane) {
    constexpr int kColumns = kHeadDim / 32;
    const ForwardParams& p = launch.params;
    const RowEnd end = end_of_row<T>(launch, row.head, sums.p, maximum, scale);
    if (writes && lane == 0 && p.lse.data != nullptr) {
        char* to =
            p.lse.data + head_offset(p.lse, row.batch, row.sequence.first_q + row.query, row.head, sizeof(float));
        *reinterpret_cast<float*>(to) = end.lse;
    }
    char* to = p.o.data + head_offset(p.o, row.batch, row.sequence.first_q + row.query, row.head, sizeof(T));
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
        const int column = lane * kColumns + c;
        // fmaf(x, f, 0) turns -0 into +0: the sign must not reveal how many masked products were added.
        if (writes && column < p.head_dim_v)
            *reinterpret_cast<T*>(to + column * p.o.column * std::int64_t{sizeof(T)}) =
                T(fmaf(sums.o[c], end.factor, 0.0F));
    }
}

/// Waits for the partial results of split_kernel. Each CTA does: otherwise kernels after this one could start while
/// split_kernel still reads its tensors.
__device__ __forceinline__ void wait_for_splits() {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_wait();
#endif
}

/// Splits of a segment of a row.
__device__ __forceinline__ int segment_splits(int splits) {
    return max((splits + kSegments - 1) / kSegments, kSegmentSplits);
}

/// kParallel: a CTA has one row and its warps a segment each; otherwise a warp has a row.
template <class T, int kHeadDim, bool kParallel>
__global__ void __launch_bounds__(32 * (kParallel ? kSegments : kRowsOfCta), 1)
    combine_kernel(const __grid_constant__ Launch launch) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const CombineRow row(launch, kParallel ? blockIdx.x : blockIdx.x * kRowsOfCta + warp);
    if (!row.exists) {
        wait_for_splits();
        return;
    }
    const Scale scale = scale_of(launch);
    // The first round has no splits and writes nothing: it brings the instructions into the cache, while split_kernel
    // runs.
#pragma unroll 1
    for (bool real = false;; real = true) {
        const int splits = real ? row.splits : 0, of_segment = segment_splits(splits);
        if (real) wait_for_splits();
        RowSums<kHeadDim / 32> sums{};
        float maximum = -INFINITY;
        const auto sum_of = [&](int segment) {
            const int end = min((segment + 1) * of_segment, splits);
            return segment_sum<T, kHeadDim>(launch, row, segment * of_segment, end, splits, maximum, scale, lane);
        };
        if constexpr (kParallel) {
            __shared__ RowSums<kHeadDim / 32> of_segments[kSegments][32];
            of_segments[warp][lane] = sum_of(warp);
            __syncthreads();
            for (int i = 0; i * of_segment < splits; ++i) sums.add(of_segments[i][lane]);
        } else {
#pragma unroll 1
            for (int i = 0; i == 0 || i * of_segment < splits; ++i) sums.add(sum_of(i));
        }
        write_row<T, kHeadDim>(launch, row, sums, maximum, scale, real && (!kParallel || warp == 0), lane);
        if (real) return;
    }
}

}  // namespace tessera::cuda::decode
