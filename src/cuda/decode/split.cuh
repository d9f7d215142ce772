// SPDX-License-Identifier: Apache-2.0
//
// Splits of the keys of one kv head for a tile of rows: O, maximum and sum of P of each row over the keys of a split. A
// tile of 64 keys is shared by four warps, 16 keys each, that have sums of their own until the end of the split. Two
// more warps load (load.cuh).
#pragma once

#include <cfloat>

#include "cuda/decode/load.cuh"
#include "cuda/tile/softcap.cuh"
#include "cuda/tile/warp_gemms.cuh"

namespace tessera::cuda::decode {

/// Scales the scores of 16 keys, then softcap and ALiBi. `key`: the thread's first. `rows`: those of `work`, or 0 if
/// `work` is not known yet.
template <class Shape>
__device__ __forceinline__ void modify(float (&s)[Shape::kConfig.row_tiles][2][4], const Launch& launch,
                                       const SplitWork& work, int rows, int first_row, int key, int lane) {
    const ForwardParams& p = launch.params;
    const float inverse = p.softcap > 0 ? fminf(ptx::reciprocal_approx(p.softcap), FLT_MAX) : 0;
    const int shift = work.member.sequence.len_kv - work.member.sequence.len_q;
#pragma unroll
    for (int m = 0; m < Shape::kConfig.row_tiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + 16 * m + 8 * r + lane / 4;
            const float slope = row < rows ? p.alibi_slope(work.batch, work.head(launch, row)) : 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& score = s[m][i / 2][2 * r + i % 2];
                score = __fmul_rn(score, p.scale);
                if (p.softcap > 0) score = __fmul_rn(p.softcap, hyperbolic_tangent(__fmul_rn(score, inverse)));
                if (slope == 0) continue;
                const int distance = abs(work.query(launch, row) + shift - (key + 8 * (i / 2) + i % 2));
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
                                                   const MatrixAddress<Shape::kConfig.head_dim>& v, const RowInfo* rows,
                                                   int key, int lane) {
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
                        const RowInfo& row = rows[16 * m + 8 * (e / 2) + lane / 4];
                        if (key + j >= row.first && key + j <= row.last) o[m][n + half][e] += sum[e];
                    }
                }
            }
        }
    }
}

/// Waits for the other three warps that have the same rows.
__device__ __forceinline__ void wait_for_key_warps(int row_warp) {
    ptx::named_barrier_sync(1 + row_warp, 32 * Config::kKeyWarps);
}

/// Adds the sums of the four warps of each row in their order, and writes them to the row's place in the workspace.
template <class T, class Shape>
__device__ __forceinline__ void write_partials(
    const float (&o)[Shape::kConfig.row_tiles][Shape::kConfig.head_dim / 8][4],
    OnlineSoftmax<T> (&softmax)[Shape::kConfig.row_tiles], Shared<Shape>& shared, const Buffers<Shape>& buffers,
    const Launch& launch, const RowInfo* rows, int count, const Scale& scale, int warp, int lane) {
    constexpr Config kConfig = Shape::kConfig;
    constexpr int kHeadDim = kConfig.head_dim, kTiles = kConfig.row_tiles, kPitch = kConfig.sum_pitch();
    const int key_warp = warp % Config::kKeyWarps, row_warp = warp / Config::kKeyWarps;
    const int first_row = row_warp * 16 * kTiles;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
        softmax[m].finish();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + 16 * m + 8 * r + lane / 4;
            if (row >= count) continue;
            if (lane % 4 == 0) shared.ml[key_warp][row] = {softmax[m].max[r], softmax[m].sum[r]};
            float* to = buffers.sums(key_warp) + row * kPitch + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n)
                *reinterpret_cast<float2*>(to + 8 * n) = {o[m][n][2 * r], o[m][n][2 * r + 1]};
        }
    }
    wait_for_key_warps(row_warp);
    // A thread adds four columns of a row.
    constexpr int kThreads = 32 * Config::kKeyWarps, kLanes = kHeadDim / 4;
    const int thread = 32 * key_warp + lane, column = thread % kLanes * 4;
    const int end = min(count, first_row + 16 * kTiles);
#pragma unroll 1
    for (int row = first_row + thread / kLanes; row < end; row += kThreads / kLanes) {
        const std::int64_t at = rows[row].partial;
        if (at < 0) continue;
        float maximum = -INFINITY;
        float2 ml[Config::kKeyWarps];
#pragma unroll
        for (int w = 0; w < Config::kKeyWarps; ++w) {
            ml[w] = shared.ml[w][row];
            maximum = fmaxf(maximum, ml[w].x);
        }
        float4 parts[Config::kKeyWarps];
#pragma unroll
        for (int w = 0; w < Config::kKeyWarps; ++w)
            parts[w] = *reinterpret_cast<const float4*>(buffers.sums(w) + row * kPitch + column);
        float4 sum{};
        float sum_of_p = 0;
#pragma unroll
        for (int w = 0; w < Config::kKeyWarps; ++w) {
            const float factor = rescale_of<T>(ml[w].x, maximum, scale);
            sum = {__fmaf_rn(parts[w].x, factor, sum.x), __fmaf_rn(parts[w].y, factor, sum.y),
                   __fmaf_rn(parts[w].z, factor, sum.z), __fmaf_rn(parts[w].w, factor, sum.w)};
            sum_of_p = __fmaf_rn(ml[w].y, factor, sum_of_p);
        }
        *reinterpret_cast<float4*>(launch.o + at * kHeadDim + column) = sum;
        if (column == 0) launch.ml[at] = {maximum, sum_of_p};
    }
    wait_for_key_warps(row_warp);  // the sums are read
}

/// One split, by a computing warp. Without `real` it goes through the same instructions on whatever the buffer of sums
/// holds, waits for nothing and writes nothing: while the first copies are on their way, it brings the instructions
/// into the cache, which few keys would otherwise wait for.
template <class T, class Shape>
__device__ __forceinline__ void compute_split(Shared<Shape>& shared, const Buffers<Shape>& buffers,
                                              Position<Shape::kConfig.stages>& stage, int slot, const Launch& launch,
                                              const SplitWork& work, bool real, int warp, int lane) {
    constexpr Config kConfig = Shape::kConfig;
    constexpr int kHeadDim = kConfig.head_dim, kTiles = kConfig.row_tiles;
    const int key_warp = warp % Config::kKeyWarps, first_row = warp / Config::kKeyWarps * 16 * kTiles;
    Queries<kHeadDim, kTiles, false> queries(
        real ? buffers.queries(slot) : reinterpret_cast<const char*>(buffers.sums(0)), first_row, lane);
    const RowInfo* rows = shared.rows[slot] + first_row;
    const Scale scale = scale_of(launch);
    OnlineSoftmax<T> softmax[kTiles];
    float o[kTiles][kHeadDim / 8][4] = {};
    const int first = real ? work.tile : 0, end = real ? work.end : Config::kKeys;
    const int full_begin = real ? work.full_begin : 0, full_end = real ? work.full_end : Config::kKeys;
#pragma unroll 1
    for (int key = first + 16 * key_warp; key - 16 * key_warp < end; key += Config::kKeys) {
        const bool full = key >= full_begin && key + 16 <= full_end;
        float s[kTiles][2][4];
        const char* k = real ? buffers.k(stage.stage) : reinterpret_cast<const char*>(buffers.sums(0));
        const char* v = real ? buffers.v(stage.stage) : k;
        if (real) shared.k.wait_full(stage);
        multiply_qk<T>(s, queries, MatrixAddress<kHeadDim>::chunks_first(k + 16 * key_warp * kHeadDim * 2, lane));
        if (real) shared.k.release(stage, lane);
        if (launch.natural) modify<Shape>(s, launch, work, real ? work.rows : 0, first_row, key + lane % 4 * 2, lane);
        if (!full) {
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const RowInfo row = rows[16 * m + 8 * r + lane / 4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int at = key + 8 * (i / 2) + lane % 4 * 2 + i % 2;
                        if (at < row.first || at > row.last) s[m][i / 2][2 * r + i % 2] = -INFINITY;
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
        if (real) shared.v.wait_full(stage);
        const auto address = MatrixAddress<kHeadDim>::rows_first(v, 16 * key_warp, lane);
        if (full) add_rows_of_v<T, kHeadDim>(o, a, address, 0);
        else multiply_masked_pv<T, Shape>(o, a, address, rows, key, lane);
        if (!real) break;
        shared.v.release(stage, lane);
        stage.next();
    }
    write_partials<T, Shape>(o, softmax, shared, buffers, launch, shared.rows[slot], real ? work.rows : 0, scale, warp,
                             lane);
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
        shared.k.init(32, kConfig.warps());
        shared.v.init(32, kConfig.warps());
        shared.works.init(64, kConfig.warps());
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
    if (warp == kConfig.warps()) {
        load_keys<Shape>(shared, buffers, launch, lane);
        return;
    }
    if (warp > kConfig.warps()) {
        load_works_and_values<T, Shape>(shared, buffers, launch, lane);
        return;
    }
    Position<kConfig.stages> stage;
    Position<kConfig.works> slot;
    for (bool real = false;; real = true) {
        const SplitWork& work = shared.work[slot.stage];
        if (real) {
            shared.works.wait_full(slot);
            if (work.rows == 0) return;
        }
        compute_split<T, Shape>(shared, buffers, stage, slot.stage, launch, work, real, warp, lane);
        if (!real) continue;
        shared.works.release(slot, lane);
        slot.next();
    }
}

}  // namespace tessera::cuda::decode
