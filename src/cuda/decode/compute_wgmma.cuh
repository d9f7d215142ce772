// SPDX-License-Identifier: Apache-2.0
//
// A split by wgmma: the four consumer warps are a warpgroup, which has up to 64 rows. With fewer, the tensor cores
// compute on whatever lies after Q, and warps without rows have no softmax. O += P V of a tile runs beside S = Q K^T
// of the next.
#pragma once

#include "cuda/decode/scores.cuh"
#include "cuda/tile/attention_gemms.cuh"

namespace tessera::cuda::decode {

/// A key that a row does not see must add nothing to its O, even if V of that key is NaN or infinite. In a tile with
/// such keys this function adds the NaN and infinities of V to O of the rows that see them, and replaces them by 0 in
/// shared memory. All four warps call it.
///
/// `p`: P as A fragments; `rows`: the warp's 16.
template <class T, class Shape>
__device__ __forceinline__ void take_nonfinite(char* v, Exchange<Shape::kConfig.rows>& exchange,
                                               float (&o)[Shape::kConfig.head_dim / 2],
                                               const std::uint32_t (&p)[Config::kKeys / 16][4], const RowInfo* rows,
                                               int key, int warp, int lane) {
    constexpr int kThreads = 32 * Config::kWarps, kWords = 4;
    auto* const chunks = reinterpret_cast<uint4*>(v);
    const int thread = 32 * warp + lane;
    bool any = false;
    for (int i = thread; i < Shape::kConfig.tile_bytes() / 16; i += kThreads) any |= nonfinite<T>(chunks[i]) != 0;
    if (!ptx::named_barrier_any(kBarrier, kThreads, any)) return;
    std::uint32_t(&own)[Config::kKeys / 2] = exchange.p[16 * warp % Shape::kConfig.rows + lane / 4];
    std::uint32_t(&below)[Config::kKeys / 2] = exchange.p[16 * warp % Shape::kConfig.rows + lane / 4 + 8];
    const bool has_rows = 16 * warp < Shape::kConfig.rows;
    if (has_rows) {
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                own[8 * step + 4 * half + lane % 4] = p[step][2 * half];
                below[8 * step + 4 * half + lane % 4] = p[step][2 * half + 1];
            }
        }
        __syncwarp();
#pragma unroll 1
        for (int j = 0; j < Config::kKeys; ++j) {
#pragma unroll
            for (int n = 0; n < Shape::kConfig.head_dim / 8; ++n) {
                const char* word = v + chunk_in_panels(Config::kKeys, j, n) + lane % 4 * kWords;
                const T* two = reinterpret_cast<const T*>(word);
                if (nonfinite<T>(*reinterpret_cast<const std::uint32_t*>(word)) == 0) continue;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const RowInfo& row = rows[8 * (e / 2) + lane / 4];
                    const float x = static_cast<float>(two[e % 2]);
                    if (key + j < row.first || key + j > row.last || fabsf(x) <= FLT_MAX) continue;
                    o[4 * n + e] += static_cast<float>(reinterpret_cast<const T*>(e < 2 ? own : below)[j]) * x;
                }
            }
        }
    }
    ptx::named_barrier_sync(kBarrier, kThreads);
    for (int i = thread; i < Shape::kConfig.tile_bytes() / 16; i += kThreads) {
        if (nonfinite<T>(chunks[i]) == 0) continue;
        auto* const numbers = reinterpret_cast<T*>(chunks + i);
        for (int c = 0; c < kChunk; ++c)
            if (!(fabsf(static_cast<float>(numbers[c])) <= FLT_MAX)) numbers[c] = T(0.0F);
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kBarrier, kThreads);
}

/// The online softmax of a warp's 16 rows. Each 16 keys of a tile have sums of their own, as in compute_mma.cuh.
template <class T>
struct SlicedSoftmax {
    static constexpr int kSlices = Config::kKeys / 16;
    OnlineSoftmax<T> of_slice[kSlices];  ///< the maxima are those of the first

    /// Scores become P. `rescale`: the factors of O.
    __device__ __forceinline__ void update(float (&s)[2 * kSlices][4], const Scale& scale, float (&rescale)[2]) {
        Rescaling rescaling = of_slice[0].update_max(of_slice[0].maxima(s), scale);
        if (any_lane(rescaling.any_large())) of_slice[0].subtract(s, scale, rescaling);
#pragma unroll
        for (int i = 0; i < kSlices; ++i) {
            of_slice[i].rescale(rescaling);
            float part[2] = {0, 0};
            of_slice[i].exponentiate(s[2 * i], rescaling, part);
            of_slice[i].exponentiate(s[2 * i + 1], rescaling, part);
            of_slice[i].add(part);
        }
        rescale[0] = rescaling.rescale[0];
        rescale[1] = rescaling.rescale[1];
    }
    /// After the last tile: maximum and sum of the thread's two rows.
    __device__ __forceinline__ float2 result(int r) {
        float sums[kSlices];
#pragma unroll
        for (int i = 0; i < kSlices; ++i) sums[i] = quad_sum(of_slice[i].sum[r]);
        return {of_slice[0].max[r], sum_of_slices(sums)};
    }
};

/// Writes O, maximum and sum of the warp's rows to the workspace.
template <class T, int kHeadDim>
__device__ __forceinline__ void write_partials(const float (&o)[kHeadDim / 2], SlicedSoftmax<T>& softmax,
                                               const Launch& launch, const RowInfo* rows, int count, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = 8 * r + lane / 4;
        const float2 ml = softmax.result(r);
        const std::int64_t at = row < count ? rows[row].partial : -1;
        if (at < 0) continue;
        float* to = launch.o + at * kHeadDim + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n)
            *reinterpret_cast<float2*>(to + 8 * n) = {o[4 * n + 2 * r], o[4 * n + 2 * r + 1]};
        if (lane % 4 == 0) launch.ml[at] = ml;
    }
}

/// One split, by the warpgroup. Without `real` it goes through the same instructions on whatever shared memory holds,
/// waits for no copy and writes no result: while the first copies are on their way, it brings the instructions into the
/// cache. With few keys, their fetch would take as long as the data.
template <class T, class Shape>
__device__ __forceinline__ void compute_by_wgmma(Shared<Shape>& shared, const Buffers<Shape>& buffers,
                                                 PipelineStates<Shape>& at, const Launch& launch, const SplitWork& work,
                                                 bool real, int warp, int lane) {
    constexpr int kHeadDim = Shape::kConfig.head_dim;
    const int tiles = real ? work.tiles() : 1, first = real ? work.tile : 0, first_row = 16 * warp;
    const int count = (real ? work.rows : Shape::kConfig.rows) - first_row;  // rows of this warp
    const RowInfo* rows = shared.rows[at.q.index] + min(first_row, Shape::kConfig.rows - 16);
    const Scale scale = scale_of(launch);
    const auto tile_of = [&](int which, int stage) { return real ? buffers.kv(which, stage) : buffers.memory; };
    const std::uint64_t queries = row_descriptor(real ? buffers.queries(at.q.index) : buffers.memory);
    AttentionGemms<T, Config::kKeys, kHeadDim, kHeadDim, Shape::kConfig.rows> gemms;
    float(&s)[Config::kKeys / 8][4] = reinterpret_cast<float(&)[Config::kKeys / 8][4]>(gemms.s);
    SlicedSoftmax<T> softmax;
#pragma unroll
    for (float& element : gemms.o) element = 0;
    if (real) shared.kv[0].consumer_wait(at.k);
    ptx::fence_proxy_async();  // cp.async wrote Q and K
    gemms.start_scores(queries, row_descriptor(tile_of(0, at.k.index)));
    gemms.wait_scores();
    if (real) shared.kv[0].consumer_release(at.k, lane);
#pragma unroll 1
    for (int i = 0;; ++i) {
        const int key = first + i * Config::kKeys;
        if (count > 0) {
            if (launch.natural) modify(s, launch, work, real ? work.rows : 0, first_row, key + lane % 4 * 2, lane);
            if (real && (key < work.full_begin || key + Config::kKeys > work.full_end))
                mask_scores(s, rows, key + lane % 4 * 2, lane);
            float rescale[2];
            softmax.update(s, scale, rescale);
#pragma unroll
            for (int e = 0; e < kHeadDim / 2; ++e) gemms.o[e] *= rescale[row_of(e)];
        }
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                gemms.p[step][e] = ptx::pack<T>(s[2 * step + e / 2][e % 2 * 2], s[2 * step + e / 2][e % 2 * 2 + 1]);
        }
        const bool more = i + 1 < tiles;
        if (real && more) shared.kv[0].consumer_wait(at.k);
        char* const v = tile_of(1, at.v.index);
        if (real) {
            shared.kv[1].consumer_wait(at.v);
            if (max(key, work.begin) < work.full_begin || min(key + Config::kKeys, work.end) > work.full_end)
                take_nonfinite<T, Shape>(v, shared.exchange, gemms.o, gemms.p, rows, key, warp, lane);
        }
        ptx::fence_proxy_async();
        if (more) gemms.start_scores(queries, row_descriptor(tile_of(0, at.k.index)));
        gemms.start_output(column_descriptor(v, Config::kKeys));
        gemms.wait_output();
        gemms.wait_scores();
        if (!real) break;
        if (more) shared.kv[0].consumer_release(at.k, lane);
        shared.kv[1].consumer_release(at.v, lane);
        if (!more) break;
    }
    write_partials<T, kHeadDim>(gemms.o, softmax, launch, rows, real ? count : 0, lane);
}

}  // namespace tessera::cuda::decode
