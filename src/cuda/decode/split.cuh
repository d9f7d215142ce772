// SPDX-License-Identifier: Apache-2.0
//
// Splits of the keys of one kv head for a tile of rows: O, maximum and sum of P of each row over the keys of a split.
// Four warps share 16 rows. Each has a slice of 16 of the 64 keys of a tile, for which it computes S and P, and a
// quarter of the dims, for which it computes O. A tile goes through three steps, with a barrier of the four warps
// between them: (1) S of the slice and its largest score; (2) the maximum of all slices, and P of the slice; (3) O.
// Between two barriers a warp does step 1 of a tile, step 2 of the one before and step 3 of the one before that. Two
// more warps load (load.cuh).
#pragma once

#include <cfloat>

#include "cuda/decode/load.cuh"
#include "cuda/tile/softcap.cuh"
#include "cuda/tile/warp_gemms.cuh"

namespace tessera::cuda::decode {

/// Scales the scores of 16 keys, then softcap and ALiBi. `key`: the thread's first. `rows`: those of `work`, or 0 if
/// `work` is not known yet.
__device__ __forceinline__ void modify(float (&s)[2][4], const Launch& launch, const SplitWork& work, int rows,
                                       int first_row, int key, int lane) {
    const ForwardParams& p = launch.params;
    const float inverse = p.softcap > 0 ? fminf(ptx::reciprocal_approx(p.softcap), FLT_MAX) : 0;
    const int shift = work.member.sequence.len_kv - work.member.sequence.len_q;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = first_row + 8 * r + lane / 4;
        const float slope = row < rows ? p.alibi_slope(work.batch, work.head(launch, row)) : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& score = s[i / 2][2 * r + i % 2];
            score = __fmul_rn(score, p.scale);
            if (p.softcap > 0) score = __fmul_rn(p.softcap, hyperbolic_tangent(__fmul_rn(score, inverse)));
            if (slope == 0) continue;
            const int distance = abs(work.query(launch, row) + shift - (key + 8 * (i / 2) + i % 2));
            score = __fadd_rn(score, -__fmul_rn(slope, static_cast<float>(distance)));
        }
    }
}

/// Scores of keys that a row does not see become -inf. `key`: the thread's first of the 16; `rows`: of the warp.
__device__ __forceinline__ void mask_scores(float (&s)[2][4], const RowInfo* rows, int key, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const RowInfo row = rows[8 * r + lane / 4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = key + 8 * (i / 2) + i % 2;
            if (at < row.first || at > row.last) s[i / 2][2 * r + i % 2] = -INFINITY;
        }
    }
}

/// S = Q K^T of a warp's 16 keys. Even and odd steps of 16 dims have sums of their own, which halves the chain of MMAs
/// that wait for each other.
template <class T, int kHeadDim>
__device__ __forceinline__ void multiply_qk(float (&s)[2][4], const MatrixAddress<kHeadDim>& q,
                                            const MatrixAddress<kHeadDim>& k) {
    float sums[2][2][4] = {};
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        std::uint32_t a[4], b[4];  // A and B fragments: 16 rows x 16 dims, 16 keys x 16 dims
        ptx::ldmatrix_x4(a, q.at(0, 2 * step));
        ptx::ldmatrix_x4(b, k.at(0, 2 * step));
        ptx::mma<T>(sums[step % 2][0], a, b[0], b[1]);
        ptx::mma<T>(sums[step % 2][1], a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i / 4][i % 4] = __fadd_rn(sums[0][i / 4][i % 4], sums[1][i / 4][i % 4]);
}

/// O of a warp: 16 rows, and of every 64 dims the 16 of its slice. o[2 * i], o[2 * i + 1]: 8 dims each of the i-th 64.
template <int kHeadDim>
using Output = float[kHeadDim / 32][4];

/// O += P V for a tile of 64 keys. `p`: P as A fragments, [slice][lane].
///
/// kMasked: some rows see only some of the keys, `key` ... `key` + 63. A key that a row does not see adds nothing to
/// it, whatever its V holds: NaN and infinity of V are left out of the MMA, and added to the rows that see them.
template <class T, int kHeadDim, bool kMasked>
__device__ __forceinline__ void multiply_pv(Output<kHeadDim>& o, const uint4 (&p)[Config::kSlices][32],
                                            const MatrixAddress<kHeadDim>& v, const RowInfo* rows, int key, int lane) {
#pragma unroll
    for (int step = 0; step < Config::kSlices; ++step) {
        const uint4 four = p[step][lane];
        const std::uint32_t a[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int n = 0; n < kHeadDim / 32; n += 2) {
            std::uint32_t b[4];
            ptx::ldmatrix_x4_trans(b, v.at(16 * step, 4 * n));
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

/// Waits for the other three warps that have the same rows.
__device__ __forceinline__ void wait_for_slices(int row_group) {
    ptx::named_barrier_sync(1 + row_group, 32 * Config::kSlices);
}

/// Publishes the largest score of the slice for each row.
__device__ __forceinline__ void write_maxima(Exchange& exchange, const float (&s)[2][4], int slice, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float largest =
            quad_max(fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1])));
        if (lane % 4 == 0) exchange.maxima[8 * r + lane / 4][slice] = largest;
    }
}

/// Makes P of the scores of the slice, adds it to the sums, and publishes it. `rescale`: the factors of O.
template <class T>
__device__ __forceinline__ void write_p(Exchange& exchange, OnlineSoftmax<T>& softmax, float (&s)[2][4],
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
__device__ __forceinline__ void write_sums(Exchange& exchange, OnlineSoftmax<T>& softmax, int slice, int lane) {
    softmax.finish();
#pragma unroll
    for (int r = 0; r < 2; ++r)
        if (lane % 4 == 0) exchange.sums[8 * r + lane / 4][slice] = softmax.sum[r];
}

/// Writes a warp's part of O, and the first slice's maximum and sum, to the places of the rows in the workspace.
template <class T, int kHeadDim>
__device__ __forceinline__ void write_partials(const Output<kHeadDim>& o, const OnlineSoftmax<T>& softmax,
                                               const Exchange& exchange, const Launch& launch, const RowInfo* rows,
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
        const float4 sums = *reinterpret_cast<const float4*>(exchange.sums[row]);
        launch.ml[at] = {softmax.max[r], __fadd_rn(__fadd_rn(sums.x, sums.y), __fadd_rn(sums.z, sums.w))};
    }
}

/// The positions of a computing warp in the rings.
template <class Shape>
struct Positions {
    Position<Shape::kConfig.stages> k, v;
    Position<Shape::kConfig.works> work;
};

/// One split, by a computing warp. Without `real` it goes through the same instructions on whatever shared memory
/// holds, waits for no copy and writes no result: while the first copies are on their way, it brings the instructions
/// into the cache, which few keys would otherwise wait for.
template <class T, class Shape>
__device__ __forceinline__ void compute_split(Shared<Shape>& shared, const Buffers<Shape>& buffers,
                                              Positions<Shape>& at, const Launch& launch, const SplitWork& work,
                                              bool real, int warp, int lane) {
    constexpr int kHeadDim = Shape::kConfig.head_dim;
    const int slice = warp % Config::kSlices, row_group = warp / Config::kSlices, first_row = 16 * row_group;
    const int tiles = real ? work.tiles() : 1;
    if (real && work.rows <= first_row) {  // other warps have rows
        for (int i = 0; i < tiles; ++i) {
            shared.kv[0].skip(at.k, lane);
            shared.kv[1].skip(at.v, lane);
        }
        return;
    }
    Exchange(&exchange)[2] = shared.exchange[row_group];
    const auto queries =
        MatrixAddress<kHeadDim>::rows_first(real ? buffers.queries(at.work.stage) : buffers.memory, first_row, lane);
    const RowInfo* rows = shared.rows[at.work.stage] + first_row;
    const Scale scale = scale_of(launch);
    const int first = real ? work.tile : 0;
    const int full_begin = real ? work.full_begin : 0, full_end = real ? work.full_end : Config::kKeys;
    OnlineSoftmax<T> softmax;
    Output<kHeadDim> o = {};
    float s[2][4] = {}, rescale[2] = {1, 1};
#pragma unroll 1
    for (int i = -2;; ++i) {
        float next[2][4], next_rescale[2];
        if (i + 2 < tiles) {
            if (real) shared.kv[0].wait_full(at.k);
            const char* k = (real ? buffers.kv(0, at.k.stage) : buffers.memory) + 16 * slice * kHeadDim * 2;
            multiply_qk<T>(next, queries, MatrixAddress<kHeadDim>::chunks_first(k, lane));
            if (real) shared.kv[0].release(at.k, lane);
        }
        if (i + 1 >= 0 && i + 1 < tiles) {
            write_p(exchange[(i + 1) & 1], softmax, s, next_rescale, scale, slice, lane);
            if (i + 2 == tiles) write_sums(exchange[0], softmax, slice, lane);
        }
        if (i + 2 < tiles) {
            const int key = first + (i + 2) * Config::kKeys + 16 * slice, own = key + lane % 4 * 2;
            if (launch.natural) modify(next, launch, work, real ? work.rows : 0, first_row, own, lane);
            if (key < full_begin || key + 16 > full_end) mask_scores(next, rows, own, lane);
            write_maxima(exchange[i & 1], next, slice, lane);
        }
        if (i >= 0) {
#pragma unroll
            for (int n = 0; n < kHeadDim / 32; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) o[n][e] *= rescale[e / 2];
            }
            const int key = first + i * Config::kKeys;
            if (real) shared.kv[1].wait_full(at.v);
            const char* v = real ? buffers.kv(1, at.v.stage) : buffers.memory;
            const MatrixAddress<kHeadDim> address(v, lane % 16, 2 * slice + lane / 16);
            if (key >= full_begin && key + Config::kKeys <= full_end)
                multiply_pv<T, kHeadDim, false>(o, exchange[i & 1].p, address, rows, key, lane);
            else multiply_pv<T, kHeadDim, true>(o, exchange[i & 1].p, address, rows, key, lane);
            if (real) shared.kv[1].release(at.v, lane);
        }
        if (i + 1 == tiles) break;
        wait_for_slices(row_group);
#pragma unroll
        for (int j = 0; j < 8; ++j) s[j / 4][j % 4] = next[j / 4][j % 4];
        rescale[0] = next_rescale[0];
        rescale[1] = next_rescale[1];
    }
    write_partials<T, kHeadDim>(o, softmax, exchange[0], launch, rows, real ? work.rows - first_row : 0, slice, lane);
}

/// Sets the counters of `taken` to 0.
template <class T>
__global__ void reset_kernel(const __grid_constant__ Launch launch) {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
#endif
    for (int i = static_cast<int>(threadIdx.x); i < launch.groups; i += static_cast<int>(blockDim.x))
        launch.taken[i] = 0;
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.ctas)
    split_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    extern __shared__ __align__(128) char memory[];
    __shared__ __align__(16) char of_struct[sizeof(Shared<Shape>)];
    auto& shared = *reinterpret_cast<Shared<Shape>*>(of_struct);
    const Buffers<Shape> buffers{memory};
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
#endif
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = uniform(static_cast<int>(threadIdx.x / 32));
    if (threadIdx.x == 0) {
        shared.kv[0].init(32, kConfig.warps());
        shared.kv[1].init(32, kConfig.warps());
        shared.works.init(64, kConfig.warps());
        shared.numbers.init(1, 1);
    }
    // Columns past the end of K and V stay 0: no copy writes them.
    const ForwardParams& p = launch.params;
    if (p.head_dim != kConfig.head_dim || p.head_dim_v != kConfig.head_dim) {
        for (int i = static_cast<int>(threadIdx.x) * 16; i < 2 * kConfig.stages * kConfig.tile_bytes();
             i += kConfig.threads() * 16)
            *reinterpret_cast<uint4*>(memory + i) = uint4{};
    }
    __syncthreads();
    if (launch.own_lengths()) {
        const int first = static_cast<int>(blockIdx.x) % launch.groups * kMostMembers;
        count_items<Shape>(shared.ends, launch, first, min(static_cast<int>(p.batch) - first, kMostMembers));
    }
    if (warp >= kConfig.warps()) {
        load<T, Shape>(shared, buffers, launch, warp - kConfig.warps(), lane);
        return;
    }
    Positions<Shape> at;
    for (bool real = false;; real = true) {
        const SplitWork& work = shared.work[at.work.stage];
        if (real) {
            shared.works.wait_full(at.work);
            if (work.rows == 0) return;
        }
        compute_split<T, Shape>(shared, buffers, at, launch, work, real, warp, lane);
        if (!real) continue;
        shared.works.release(at.work, lane);
    }
}

}  // namespace tessera::cuda::decode
