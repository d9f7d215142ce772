// SPDX-License-Identifier: Apache-2.0
//
// A split by mma.sync. Each of the four consumer warps has a slice of 16 of the 64 keys of a tile, for which it
// computes S and P of all rows, and a quarter of the dims, for which it computes O. A tile goes through three steps,
// with a barrier of the warps between them: (1) S of the slice and its largest score; (2) the maximum of all slices,
// and P of the slice; (3) O. Between two barriers a warp does step 1 of a tile, step 2 of the one before and step 3 of
// the one before that.
#pragma once

#include "cuda/decode/scores.cuh"
#include "cuda/tile/warp_gemms.cuh"

namespace tessera::cuda::decode {

/// Addresses in a panel of 64 dims.
using PanelAddress = MatrixAddress<kPanelColumns>;

/// S = Q K^T of 16 rows and a warp's 16 keys. `panel_q`: bytes of a panel of Q.
template <class T, int kHeadDim>
__device__ __forceinline__ void multiply_qk(float (&s)[2][4], const PanelAddress& q, int panel_q,
                                            const PanelAddress& k) {
    constexpr int kPanel = Config::kKeys * kPanelRowBytes;
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i / 4][i % 4] = 0;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        std::uint32_t a[4], b[4];  // A and B fragments: 16 rows x 16 dims, 16 keys x 16 dims
        ptx::ldmatrix_x4(a, q.at(0, 2 * (step % 4)) + step / 4 * panel_q);
        ptx::ldmatrix_x4(b, k.at(0, 2 * (step % 4)) + step / 4 * kPanel);
        ptx::mma<T>(s[0], a, b[0], b[1]);
        ptx::mma<T>(s[1], a, b[2], b[3]);
    }
}

/// O of a warp: 16 rows, and of every 64 dims the 16 of its slice. o[2 * i], o[2 * i + 1]: 8 dims each of the i-th 64.
template <int kHeadDim>
using Output = float[kHeadDim / 32][4];

/// O += P V for 16 rows and a tile of 64 keys. `p`: P as A fragments, [slice][lane].
///
/// kMasked: some rows see only some of the keys, `key` ... `key` + 63. A key that a row does not see adds nothing to
/// it, whatever its V holds: NaN and infinity of V are left out of the MMA, and added to the rows that see them.
template <class T, int kHeadDim, bool kMasked>
__device__ __forceinline__ void multiply_pv(Output<kHeadDim>& o, const uint4 (&p)[Config::kWarps][32],
                                            const PanelAddress& v, const RowInfo* rows, int key, int lane) {
#pragma unroll
    for (int step = 0; step < Config::kKeys / 16; ++step) {
        const uint4 four = p[step][lane];
        const std::uint32_t a[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int n = 0; n < kHeadDim / 32; n += 2) {
            std::uint32_t b[4];
            ptx::ldmatrix_x4_trans(b, v.at(16 * step, 0) + n / 2 * Config::kKeys * kPanelRowBytes);
            std::uint32_t special[4], any = 0;
            if constexpr (kMasked) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const std::uint32_t found = nonfinite<T>(b[i]);
                    special[i] = b[i] & ((found >> 15) * 0xFFFF);
                    b[i] &= ~((found >> 15) * 0xFFFF);
                    any |= found;
                }
            }
            ptx::mma<T>(o[n], a, b[0], b[1]);
            ptx::mma<T>(o[n + 1], a, b[2], b[3]);
            if constexpr (kMasked) {
                if (!any_lane(any != 0)) continue;
#pragma unroll 1
                for (int j = 0; j < 16; ++j) {
                    const int own = lane % 4 * 2;  // keys own, own + 1 and own + 8, own + 9 of the thread's words
                    const auto kept = [&](int at) {
                        return (at == j ? 0xFFFFU : 0U) | (at + 1 == j ? 0xFFFF0000U : 0U);
                    };
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float sum[4] = {};
                        ptx::mma<T>(sum, a, special[2 * half] & kept(own), special[2 * half + 1] & kept(own + 8));
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const RowInfo& row = rows[8 * (e / 2) + lane / 4];
                            const int at = key + 16 * step + j;
                            if (at >= row.first && at <= row.last) o[n + half][e] += sum[e];
                        }
                    }
                }
            }
        }
    }
}

/// Publishes the largest score of the slice for each row.
__device__ __forceinline__ void write_maxima(SliceExchange& exchange, const float (&s)[2][4], int slice, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float largest = quad_max(fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1])));
        if (lane % 4 == 0) exchange.maxima[8 * r + lane / 4][slice] = largest;
    }
}

/// Makes P of the scores of the slice, adds it to the sums, and publishes it. `rescale`: the factors of O.
template <class T>
__device__ __forceinline__ void write_p(SliceExchange& exchange, OnlineSoftmax<T>& softmax, float (&s)[2][4],
                                        float (&rescale)[2], const Scale& scale, int slice, int lane) {
    float largest[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float4 of_slices = *reinterpret_cast<const float4*>(exchange.maxima[8 * r + lane / 4]);
        largest[r] = fmaxf(softmax.max[r], fmaxf(fmaxf(of_slices.x, of_slices.y), fmaxf(of_slices.z, of_slices.w)));
    }
    Rescaling rescaling = softmax.update_max({largest[0], largest[1]}, scale);
    if (any_lane(rescaling.any_large())) softmax.subtract(s, scale, rescaling);
    softmax.rescale(rescaling);
    float part[2] = {0, 0};
    softmax.exponentiate(s[0], rescaling, part);
    softmax.exponentiate(s[1], rescaling, part);
    softmax.add(part);
    exchange.p[slice][lane] = {ptx::pack<T>(s[0][0], s[0][1]), ptx::pack<T>(s[0][2], s[0][3]),
                               ptx::pack<T>(s[1][0], s[1][1]), ptx::pack<T>(s[1][2], s[1][3])};
    rescale[0] = rescaling.rescale[0];
    rescale[1] = rescaling.rescale[1];
}

/// Publishes the sums of P of the slice.
template <class T>
__device__ __forceinline__ void write_sums(SliceExchange& exchange, OnlineSoftmax<T>& softmax, int slice, int lane) {
    softmax.finish();
#pragma unroll
    for (int r = 0; r < 2; ++r)
        if (lane % 4 == 0) exchange.sums[8 * r + lane / 4][slice] = softmax.sum[r];
}

/// Writes a warp's part of O, and the first slice's maximum and sum, to the workspace.
template <class T, int kHeadDim>
__device__ __forceinline__ void write_partials(const Output<kHeadDim>& o, const OnlineSoftmax<T>& softmax,
                                               const SliceExchange& exchange, const Launch& launch, const RowInfo* rows,
                                               int count, int slice, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = 8 * r + lane / 4;
        const std::int64_t at = row < count ? rows[row].partial : -1;
        if (at < 0) continue;
        float* to = launch.o + at * kHeadDim + 16 * slice + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kHeadDim / 32; ++n)
            *reinterpret_cast<float2*>(to + 64 * (n / 2) + 8 * (n % 2)) = {o[n][2 * r], o[n][2 * r + 1]};
        if (slice != 0 || lane % 4 != 0) continue;
        launch.ml[at] = {softmax.max[r], sum_of_slices(exchange.sums[row])};
    }
}

/// One split, by a consumer warp. Without `real` it goes through the same instructions on whatever shared memory
/// holds, waits for no copy and writes no result: while the first copies are on their way, it brings the instructions
/// into the cache. With few keys, their fetch would take as long as the data.
template <class T, class Shape>
__device__ __forceinline__ void compute_by_mma(Shared<Shape>& shared, const Buffers<Shape>& buffers,
                                               PipelineStates<Shape>& at, const Launch& launch, const SplitWork& work,
                                               bool real, int slice, int lane) {
    constexpr int kHeadDim = Shape::kConfig.head_dim, kTiles = Shape::kConfig.rows / 16;
    const int tiles = real ? work.tiles() : 1, first = real ? work.tile : 0;
    const int rows_of_work = real ? work.rows : 16 * kTiles;
    const int full_begin = real ? work.full_begin : 0, full_end = real ? work.full_end : Config::kKeys;
    const char* queries = real ? buffers.queries(at.q.index) : buffers.memory;
    const RowInfo* rows = shared.rows[at.q.index];
    SliceExchange(&exchange)[kTiles][2] = shared.exchange.of_rows;
    const Scale scale = scale_of(launch);
    OnlineSoftmax<T> softmax[kTiles];
    Output<kHeadDim> o[kTiles] = {};
    float s[kTiles][2][4] = {}, rescale[kTiles][2] = {};
    const auto for_rows = [&](const auto& f) {  // of the 16s that exist
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
            if (16 * m < rows_of_work) f(m);
        }
    };
#pragma unroll 1
    for (int i = -2;; ++i) {
        float next[kTiles][2][4], next_rescale[kTiles][2];
        if (i + 2 < tiles) {
            if (real) shared.kv[0].consumer_wait(at.k);
            const char* k = real ? buffers.kv(0, at.k.index) : buffers.memory;
            const auto address = PanelAddress::chunks_first(k + 16 * slice * kPanelRowBytes, lane);
            for_rows([&](int m) {
                multiply_qk<T, kHeadDim>(next[m], PanelAddress::rows_first(queries, 16 * m, lane),
                                         Shape::kConfig.rows * kPanelRowBytes, address);
            });
            if (real) shared.kv[0].consumer_release(at.k, lane);
        }
        if (i + 1 >= 0 && i + 1 < tiles) {
            for_rows([&](int m) {
                write_p(exchange[m][(i + 1) & 1], softmax[m], s[m], next_rescale[m], scale, slice, lane);
                if (i + 2 == tiles) write_sums(exchange[m][0], softmax[m], slice, lane);
            });
        }
        if (i + 2 < tiles) {
            const int key = first + (i + 2) * Config::kKeys + 16 * slice, own = key + lane % 4 * 2;
            for_rows([&](int m) {
                if (launch.natural) modify(next[m], launch, work, real ? work.rows : 0, 16 * m, own, lane);
                if (key < full_begin || key + 16 > full_end) mask_scores(next[m], rows + 16 * m, own, lane);
                write_maxima(exchange[m][i & 1], next[m], slice, lane);
            });
        }
        if (i >= 0) {
            const int key = first + i * Config::kKeys;
            const bool full = key >= full_begin && key + Config::kKeys <= full_end;
            if (real) shared.kv[1].consumer_wait(at.v);
            const char* v = real ? buffers.kv(1, at.v.index) : buffers.memory;
            const PanelAddress address(v, lane % 16, 2 * slice + lane / 16);
            for_rows([&](int m) {
#pragma unroll
                for (int n = 0; n < kHeadDim / 32; ++n) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) o[m][n][e] *= rescale[m][e / 2];
                }
                const auto& p = exchange[m][i & 1].p;
                if (full) multiply_pv<T, kHeadDim, false>(o[m], p, address, rows + 16 * m, key, lane);
                else multiply_pv<T, kHeadDim, true>(o[m], p, address, rows + 16 * m, key, lane);
            });
            if (real) shared.kv[1].consumer_release(at.v, lane);
        }
        if (i + 1 == tiles) break;
        ptx::named_barrier_sync(kBarrier, 32 * Config::kWarps);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
#pragma unroll
            for (int j = 0; j < 8; ++j) s[m][j / 4][j % 4] = next[m][j / 4][j % 4];
            rescale[m][0] = next_rescale[m][0];
            rescale[m][1] = next_rescale[m][1];
        }
    }
    for_rows([&](int m) {
        write_partials<T, kHeadDim>(o[m], softmax[m], exchange[m][0], launch, rows + 16 * m,
                                    real ? work.rows - 16 * m : 0, slice, lane);
    });
}

}  // namespace tessera::cuda::decode
