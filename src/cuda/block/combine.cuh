// SPDX-License-Identifier: Apache-2.0
//
// The sum over the splits of a row of O in the order of cuda.decode.forward (combine.cuh there), and the rows of O for
// the output GEMM. A warp computes an eighth of the columns of a row, so that the sums of few rows occupy many CTAs.
#pragma once

#include "cuda/block/items.cuh"
#include "cuda/block/words.cuh"
#include "cuda/decode/combine.cuh"

namespace tessera::cuda::block {

inline constexpr int kColumnParts = 8;  ///< parts of a row of O, each summed by one warp

/// How a part of a row's columns is divided among the lanes of a warp: a lane has two columns of a segment of splits.
template <int kHeadDim>
struct ColumnLanes {
    static constexpr int kLanes = kHeadDim / kColumnParts / 2;    ///< of a segment
    static constexpr int kSegments = 32 / kLanes;                 ///< at once
    static constexpr int kOwn = decode::kSegmentSplits / kLanes;  ///< splits whose factors a lane computes
};

/// Reads a pair of words again and again until it is of this launch.
struct PairWait {
    Word words[2];

    /// Begins to read the pair. A pair that does not exist counts as read.
    __device__ __forceinline__ void start(const Word* from, bool exists, unsigned number) {
        words[0] = words[1] = word_of(0, number);
        if (exists) ptx::load_relaxed(from, words[0], words[1]);
    }
    /// Has the pair arrived? If not, it is read once more.
    __device__ __forceinline__ bool done(const Word* from, unsigned number) {
        const bool missing = launch_of(words[0]) != number || launch_of(words[1]) != number;
        if (missing) ptx::load_relaxed(from, words[0], words[1]);
        return !missing;
    }
    __device__ __forceinline__ float2 pair() const { return {float_of(words[0]), float_of(words[1])}; }
};

/// The partial results of splits first ... first + 7 of a row, up to `end`: sums of P V of a lane's two columns, maxima
/// and sums of P of the lane's own splits.
template <int kHeadDim>
struct PartialResults {
    static constexpr int kSplits = decode::kSegmentSplits;
    static constexpr int kLanes = ColumnLanes<kHeadDim>::kLanes, kOwn = ColumnLanes<kHeadDim>::kOwn;
    float2 o[kSplits];
    float2 ml[kOwn];

    /// Waits for them, and for split `lane` of the row's `splits`, whose largest score it returns. `row`: number of the
    /// row's first split. `column`: the lane's first column.
    ///
    /// While it waits it reads the largest scores alone. All words of all warps that wait are as many bytes as the L2
    /// delivers, which then takes twice as long to answer.
    __device__ __forceinline__ float read(const Launch& launch, std::int64_t row, int first, int end, int splits,
                                          int column, unsigned number, int lane) {
        const Word* const from_ml = launch.ml_partial + 2 * row;
        const Word* const from_o = launch.o_partial + (row + first) * kHeadDim + column;
        const int own = first + lane % kLanes;
        PairWait of_o[kSplits], of_ml[kOwn], largest;
        Watchdog watchdog;
        largest.start(from_ml + 2 * lane, lane < splits, number);
        while (!largest.done(from_ml + 2 * lane, number)) watchdog.again(Wait::partials);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kOwn; ++i) of_ml[i].start(from_ml + 2 * (own + i * kLanes), own + i * kLanes < end, number);
#pragma unroll
        for (int i = 0; i < kSplits; ++i) of_o[i].start(from_o + i * kHeadDim, first + i < end, number);
        bool all;
        do {
            all = true;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) all = of_ml[i].done(from_ml + 2 * (own + i * kLanes), number) && all;
#pragma unroll
            for (int i = 0; i < kSplits; ++i) all = of_o[i].done(from_o + i * kHeadDim, number) && all;
            if (!all) watchdog.again(Wait::partials);
        } while (!all);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) ml[i] = own + i * kLanes < end ? of_ml[i].pair() : float2{-INFINITY, 0};
#pragma unroll
        for (int i = 0; i < kSplits; ++i) o[i] = of_o[i].pair();
        return lane < splits ? largest.pair().x : -INFINITY;
    }
};

/// The largest score of a row, from those of its first 32 splits, one of each lane. By a warp.
__device__ __forceinline__ float wait_for_maximum(const Launch& launch, std::int64_t row, int splits, float maximum,
                                                  unsigned number, int lane) {
    for (int i = lane + 32; i < splits; i += 32) {
        Word words[2];
        wait_for<1>(launch.ml_partial + 2 * (row + i), 0, words, number, Wait::partials);
        maximum = fmaxf(maximum, float_of(words[0]));
    }
    return warp_max(maximum);
}

/// Combines a part of a row of O, and LSE with the first part. By a warp. `index`: query head, counted over the
/// sequences.
template <class Shape>
__device__ __forceinline__ void combine_columns(const Block<Shape>& block, int index, int part, unsigned number) {
    constexpr int kHeadDim = Shape::kConfig.head_dim;
    using Lanes = ColumnLanes<kHeadDim>;
    constexpr int kLanes = Lanes::kLanes, kSplits = decode::kSegmentSplits;
    const Launch& launch = block.launch;
    const ForwardParams& p = launch.attention.params;
    const int lane = block.lane, sequence = index / p.heads_q, head = index - sequence * p.heads_q;
    const int splits = block.shared.sequences[sequence].splits.count, of_segment = decode::segment_splits(splits);
    const int column = part * (kHeadDim / kColumnParts) + lane % kLanes * 2;
    const std::int64_t row = std::int64_t{index} * launch.max_splits;
    const Scale scale = decode::scale_of(launch.attention);
    decode::RowSums<2> sums{};
    float maximum = -INFINITY;
    bool knows_maximum = false;
#pragma unroll 1
    for (int base = 0; base * of_segment < splits; base += Lanes::kSegments) {
        const int begin = (base + lane / kLanes) * of_segment, end = min(begin + of_segment, splits);
        decode::RowSums<2> of_own{};  // the sums over a segment
#pragma unroll 1
        for (int first = 0; first < of_segment; first += kSplits) {
            PartialResults<kHeadDim> parts;
            const float largest = parts.read(launch, row, begin + first, end, splits, column, number, lane);
            if (!knows_maximum) maximum = wait_for_maximum(launch, row, splits, largest, number, lane);
            knows_maximum = true;
            if (block.warp == 0 && lane == 0) record(launch, Mark::partials);
            float factors[Lanes::kOwn];
#pragma unroll
            for (int i = 0; i < Lanes::kOwn; ++i)
                factors[i] = decode::rescale_of<Element>(parts.ml[i].x, maximum, scale);
#pragma unroll
            for (int i = 0; i < kSplits; ++i) {
                const int source = lane / kLanes * kLanes + i % kLanes;
                const float factor = __shfl_sync(kAllLanes, factors[i / kLanes], source);
                const float sum = __shfl_sync(kAllLanes, parts.ml[i / kLanes].y, source);
                of_own.o[0] = __fmaf_rn(parts.o[i].x, factor, of_own.o[0]);
                of_own.o[1] = __fmaf_rn(parts.o[i].y, factor, of_own.o[1]);
                of_own.p = __fmaf_rn(sum, factor, of_own.p);
            }
        }
        for (int i = 0; i < Lanes::kSegments && (base + i) * of_segment < splits; ++i) {
            const int source = i * kLanes + lane % kLanes;
            decode::RowSums<2> of_segment_i;
            of_segment_i.o[0] = __shfl_sync(kAllLanes, of_own.o[0], source);
            of_segment_i.o[1] = __shfl_sync(kAllLanes, of_own.o[1], source);
            of_segment_i.p = __shfl_sync(kAllLanes, of_own.p, source);
            sums.add(of_segment_i);
        }
    }
    const decode::RowEnd end = decode::end_of_row<Element>(launch.attention, head, sums.p, maximum, scale);
    if (lane < kLanes) {
        // fmaf(x, f, 0) turns -0 into +0, as in the decode kernel.
        const std::uint32_t two =
            ptx::pack<Element>(fmaf(sums.o[0], end.factor, 0.0F), fmaf(sums.o[1], end.factor, 0.0F));
        const std::int64_t at = std::int64_t{index} * kHeadDim + column;
        ptx::store_relaxed(launch.o_words + at / 2, word_of(two, number));
        if (p.o.data != nullptr)
            *reinterpret_cast<std::uint32_t*>(p.o.data + head_offset(p.o, sequence, 0, head, 2) + column * 2) = two;
    }
    if (part == 0 && lane == 0 && p.lse.data != nullptr)
        *reinterpret_cast<float*>(p.lse.data + head_offset(p.lse, sequence, 0, head, sizeof(float))) = end.lse;
}

/// Combines the parts of this CTA, by its consumer warps.
template <class Shape>
__device__ __forceinline__ void combine(const Block<Shape>& block, unsigned number) {
    const int parts_of_all = block.launch.batch * block.launch.attention.params.heads_q * kColumnParts;
    const int ctas = static_cast<int>(gridDim.x);
    for (int i = static_cast<int>(blockIdx.x) + block.warp * ctas; i < parts_of_all; i += ctas * Shape::kConfig.warps)
        combine_columns(block, i / kColumnParts, i % kColumnParts, number);
}

/// Waits for the rows of O, and copies them into shared memory. By all consumer warps, which may read them afterwards.
template <class Shape>
__device__ __forceinline__ void gather_output(const Block<Shape>& block, unsigned number) {
    constexpr int kThreads = 32 * Shape::kConfig.warps, kAtOnce = 4;
    const Launch& launch = block.launch;
    const int columns = launch.output.columns, pairs_of_row = columns / 4, pairs = launch.batch * pairs_of_row;
    const int thread = 32 * block.warp + block.lane;
    for (int first = thread; first < pairs; first += kAtOnce * kThreads) {
        const Word* const from = launch.o_words + 2 * first;
        PairWait waits[kAtOnce];
        Watchdog watchdog;
        waits[0].start(from, true, number);
        // Like partial results: the other words are read when the first one has come.
        while (first == thread && !waits[0].done(from, number)) watchdog.again(Wait::output);
#pragma unroll
        for (int i = 1; i < kAtOnce; ++i) waits[i].start(from + 2 * i * kThreads, first + i * kThreads < pairs, number);
        bool all;
        do {
            all = true;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) all = waits[i].done(from + 2 * i * kThreads, number) && all;
            if (!all) watchdog.again(Wait::output);
        } while (!all);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int at = first + i * kThreads;
            if (at >= pairs) continue;
            const int row = at / pairs_of_row, pair = at - row * pairs_of_row;
            *reinterpret_cast<uint2*>(block.rows() + row * row_bytes(columns) + pair * 8) = {
                data_of(waits[i].words[0]), data_of(waits[i].words[1])};
        }
    }
    block.sync_consumers();
}

}  // namespace tessera::cuda::block
