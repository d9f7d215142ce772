// SPDX-License-Identifier: Apache-2.0
//
// Algorithm 1 in fp32: every product is an FMA of fp32 numbers, every exponential is accurate. 16 x 16 threads; a
// thread has rows of the query tile 16 apart, keys of S 16 apart, and four columns of O in every 64.
#pragma once

#include <cfloat>
#include <new>

#include "cuda/fa2/work.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/tile/exponent_offset.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sink.cuh"

namespace tessera::cuda::fa2 {

template <ConfigFp32 kConfig>
struct LayoutFp32 {
    static constexpr int kHeadDim = kConfig.head_dim;
    static constexpr int kThreads = 256;
    static constexpr int kBlock = kConfig.block;  // queries, and keys
    static constexpr int kPer = kBlock / 16;      // rows of a thread, and keys
    static constexpr int kRow = kHeadDim + 4;     // floats from one row to the next, padded against bank conflicts
    static constexpr int kRowP = kBlock + 4;
    static constexpr int kFloats = 2 * kBlock * kRow + kBlock * kRowP;  // Q, then K or V, then P

    float* q;
    float* kv;
    float* p;

    __device__ explicit LayoutFp32(char* memory)
        : q(reinterpret_cast<float*>(memory)), kv(q + kBlock * kRow), p(kv + kBlock * kRow) {}
};

/// Loads rows [first_row, first_row + kBlock) of a head; rows and columns that do not exist become 0.
template <class Layout>
__device__ void load_fp32(float* to, const char* data, const Rows& rows, int first_row, int row_count, int dim) {
    for (int i = static_cast<int>(threadIdx.x); i < Layout::kBlock * Layout::kHeadDim; i += Layout::kThreads) {
        const int row = i / Layout::kHeadDim;
        const int column = i % Layout::kHeadDim;
        float value = 0;
        if (first_row + row < row_count && column < dim) {
            value = reinterpret_cast<const float*>(data)[(first_row + row) * rows.row + column * rows.column];
        }
        to[row * Layout::kRow + column] = value;
    }
}

/// m, l and O of one thread's rows.
template <class Layout>
struct RowsFp32 {
    float max[Layout::kPer];
    float sum[Layout::kPer];  // l, over the thread's keys
    float o[Layout::kPer][Layout::kHeadDim / 16];

    __device__ RowsFp32() {
#pragma unroll
        for (int i = 0; i < Layout::kPer; ++i) {
            max[i] = -INFINITY;
            sum[i] = 0;
#pragma unroll
            for (float& value : o[i]) value = 0;
        }
    }
};

/// Reduces over the 16 threads of a row.
template <class Combine>
__device__ __forceinline__ float over_row(float value, const Combine& combine) {
#pragma unroll
    for (int lane = 1; lane < 16; lane *= 2) value = combine(value, __shfl_xor_sync(kAllLanes, value, lane));
    return value;
}

template <class Layout>
struct MainloopFp32 {
    static constexpr int kPer = Layout::kPer;
    static constexpr int kBlock = Layout::kBlock;
    using Scores = float[kPer][kPer];  // [rows][keys]

    const ForwardParams& params;
    const Work& work;
    const Layout tile;
    const int row;     // the thread's first row in the query tile
    const int column;  // the thread's first key in the key tile

    __device__ __forceinline__ int query(int i) const { return work.q_begin + row + 16 * i; }

    /// S = Q K^T as a sum of sums over kDims dims. If all products are equal, every rounding goes the same way, and a
    /// plain sum over 96 dims and more is off by more than the LSE may be.
    __device__ void multiply_qk(Scores& s) const {
        constexpr int kDims = Layout::kHeadDim > 128 ? 8 : 4;
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
#pragma unroll
            for (int j = 0; j < kPer; ++j) s[i][j] = 0;
        }
#pragma unroll 4
        for (int d = 0; d < Layout::kHeadDim; d += kDims) {
            float4 k[kPer][kDims / 4];
#pragma unroll
            for (int j = 0; j < kPer; ++j) read_dims(k[j], tile.kv + (column + 16 * j) * Layout::kRow + d);
#pragma unroll
            for (int i = 0; i < kPer; ++i) {
                float4 q[kDims / 4];
                read_dims(q, tile.q + (row + 16 * i) * Layout::kRow + d);
#pragma unroll
                for (int j = 0; j < kPer; ++j) s[i][j] += product(q, k[j]);
            }
        }
    }
    template <int kFours>
    __device__ static void read_dims(float4 (&to)[kFours], const float* from) {
#pragma unroll
        for (int n = 0; n < kFours; ++n) to[n] = vector(from + 4 * n);
    }
    template <int kFours>
    __device__ static float product(const float4 (&q)[kFours], const float4 (&k)[kFours]) {
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kFours; ++n) {
            sum = fmaf(q[n].x, k[n].x, sum);
            sum = fmaf(q[n].y, k[n].y, sum);
            sum = fmaf(q[n].z, k[n].z, sum);
            sum = fmaf(q[n].w, k[n].w, sum);
        }
        return sum;
    }

    /// The score of a pair, in units of the natural logarithm; -inf if it is not visible.
    __device__ float score(float product, int query, int key) const {
        if (!work.band.sees(query, key) || query >= work.sequence.len_q) return -INFINITY;
        float s = __fmul_rn(product, params.scale);
        if (params.softcap > 0) s = params.softcap * tanhf(s / params.softcap);
        if (work.scores.slope != 0) {
            const int distance = abs(query + work.sequence.len_kv - work.sequence.len_q - key);
            s = fmaf(-work.scores.slope, static_cast<float>(distance), s);
        }
        if (work.scores.bias) {
            const std::int64_t at = query * params.bias.row + key * params.bias.column;
            s += reinterpret_cast<const float*>(work.scores.bias)[at];
        }
        return s;
    }

    /// Bit kPer * i + j is set if dropout keeps that element of P. The loop is not unrolled: the generator's code is
    /// long.
    __device__ std::uint32_t kept_by_dropout(int first_key) const {
        if (!params.drops()) return ~0U;
        std::uint32_t kept = 0;
#pragma unroll 1
        for (int n = 0; n < kPer * kPer; ++n) {
            const int key = first_key + column + 16 * (n % kPer);
            if (is_kept(params.keep, work.batch, work.head, query(n / kPer), key)) kept |= 1U << n;
        }
        return kept;
    }

    /// Turns S into P, in shared memory, and rescales O and l to the new maxima.
    __device__ void online_softmax(Scores& s, int first_key, RowsFp32<Layout>& rows) const {
        const std::uint32_t kept = kept_by_dropout(first_key);
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
            float found = rows.max[i];
#pragma unroll
            for (int j = 0; j < kPer; ++j) {
                s[i][j] = score(s[i][j], query(i), first_key + column + 16 * j);
                found = fmaxf(found, s[i][j]);
            }
            found = over_row(found, [](float a, float b) { return fmaxf(a, b); });
            const float m = found == -INFINITY ? 0.0F : found;  // no visible key yet: exp(-inf - 0) = 0
            const float rescale = expf(rows.max[i] - m);
            rows.max[i] = found;
            float part = 0;
#pragma unroll
            for (int j = 0; j < kPer; ++j) {
                float p = expf(s[i][j] - m);
                part += p;
                if ((kept >> (kPer * i + j) & 1) == 0) p = 0;
                tile.p[(row + 16 * i) * Layout::kRowP + column + 16 * j] = p * (1 / kExponentOffsetFactor<float>);
            }
            rows.sum[i] = fmaf(rows.sum[i], rescale, part);
#pragma unroll
            for (float& value : rows.o[i]) value *= rescale;
        }
    }

    /// O += P V. The tile is summed on its own first: a plain sum over 65,536 keys is off by 4e-6. kMasked: keys that a
    /// row does not see are left out, since 0 times Inf or NaN is NaN.
    template <bool kMasked>
    __device__ void multiply_pv(int first_key, RowsFp32<Layout>& rows) const {
        float part[kPer][Layout::kHeadDim / 16];
#pragma unroll
        for (auto& row_part : part) {
#pragma unroll
            for (float& value : row_part) value = 0;
        }
#pragma unroll 2
        for (int key = 0; key < kBlock; ++key) {
            float p[kPer];
            bool wanted[kPer];
#pragma unroll
            for (int i = 0; i < kPer; ++i) {
                p[i] = tile.p[(row + 16 * i) * Layout::kRowP + key];
                wanted[i] = !kMasked || work.band.sees(query(i), first_key + key);
            }
#pragma unroll
            for (int n = 0; n < Layout::kHeadDim / 64; ++n) {
                const float4 v = vector(tile.kv + key * Layout::kRow + 64 * n + 4 * column);
#pragma unroll
                for (int i = 0; i < kPer; ++i) {
                    if (!wanted[i]) continue;
                    part[i][4 * n] = fmaf(p[i], v.x, part[i][4 * n]);
                    part[i][4 * n + 1] = fmaf(p[i], v.y, part[i][4 * n + 1]);
                    part[i][4 * n + 2] = fmaf(p[i], v.z, part[i][4 * n + 2]);
                    part[i][4 * n + 3] = fmaf(p[i], v.w, part[i][4 * n + 3]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
#pragma unroll
            for (int n = 0; n < Layout::kHeadDim / 16; ++n) rows.o[i][n] += part[i][n];
        }
    }

    __device__ static __forceinline__ float4 vector(const float* from) {
        return *reinterpret_cast<const float4*>(from);
    }

    /// Takes the exponent offset off O. A result that overflows by rounding alone becomes the largest float. (That
    /// happens if all of V is the largest float and P sums to slightly over 1.)
    __device__ static float without_exponent_offset(float x) {
        constexpr float kRounding = 0x1p-16F;
        constexpr float kMost = FLT_MAX / kExponentOffsetFactor<float>;
        if (fabsf(x) > kMost && fabsf(x) <= kMost * (1 + kRounding)) return copysignf(FLT_MAX, x);
        return x * kExponentOffsetFactor<float>;
    }

    /// Writes O, normalised, and the LSE.
    __device__ void store(const RowsFp32<Layout>& rows) const {
        const std::int64_t first = work.sequence.first_q;
        char* o = params.o.data + head_offset(params.o, work.batch, first, work.head, sizeof(float));
        char* lse = params.lse.data + head_offset(params.lse, work.batch, first, work.head, sizeof(float));
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
            const float l = over_row(rows.sum[i], [](float a, float b) { return a + b; });
            if (query(i) >= work.sequence.len_q) continue;
            const float m = rows.max[i] == -INFINITY ? 0.0F : rows.max[i];
            const WithSink with = with_sink_of(params, work.head, m + logf(l));
            if (params.lse.data && column == 0) reinterpret_cast<float*>(lse)[query(i) * params.lse.row] = with.lse;
            const float factor = l == 0.0F ? 0.0F : params.keep_scale / l * with.factor;
#pragma unroll
            for (int n = 0; n < Layout::kHeadDim / 16; ++n) {
                const int dim = n / 4 * 64 + 4 * column + n % 4;
                if (dim >= params.head_dim_v) continue;
                reinterpret_cast<float*>(o)[query(i) * params.o.row + dim * params.o.column] =
                    without_exponent_offset(rows.o[i][n] * factor);
            }
        }
    }
};

template <class Shape>
__global__ void __launch_bounds__(LayoutFp32<Shape::kConfig>::kThreads)
    forward_fp32_kernel(const __grid_constant__ Launch launch) {
    using Layout = LayoutFp32<Shape::kConfig>;
    extern __shared__ __align__(128) char memory[];
    __shared__ alignas(Work) char work_memory[sizeof(Work)];
    const Work& work = *reinterpret_cast<const Work*>(work_memory);
    if (threadIdx.x == 0) new (work_memory) Work(launch, blockIdx.x, Layout::kBlock, Layout::kBlock, sizeof(float));
    __syncthreads();
    if (work.q_begin >= work.sequence.len_q) return;

    const ForwardParams& p = launch.params;
    const MainloopFp32<Layout> mainloop{p, work, Layout(memory), static_cast<int>(threadIdx.x / 16),
                                        static_cast<int>(threadIdx.x % 16)};
    const char* q = p.q.data + head_offset(p.q, work.batch, work.sequence.first_q, work.head, sizeof(float));
    load_fp32<Layout>(mainloop.tile.q, q, p.q, work.q_begin, work.sequence.len_q, p.head_dim);
    RowsFp32<Layout> rows;
    for (int i = 0; i < work.tiles.count(); ++i) {
        const int number = work.tiles.begin + i;
        const int first_key = number * Layout::kBlock;
        typename MainloopFp32<Layout>::Scores s;
        __syncthreads();  // all threads have read V of the previous tile
        load_fp32<Layout>(mainloop.tile.kv, work.k, p.k, first_key, work.sequence.len_kv, p.head_dim);
        __syncthreads();
        mainloop.multiply_qk(s);
        mainloop.online_softmax(s, first_key, rows);
        __syncthreads();
        load_fp32<Layout>(mainloop.tile.kv, work.v, p.v, first_key, work.sequence.len_kv, p.head_dim_v);
        __syncthreads();
        if (work.tiles.full(number)) mainloop.template multiply_pv<false>(first_key, rows);
        else mainloop.template multiply_pv<true>(first_key, rows);
    }
    mainloop.store(rows);
}

template <class Shape>
cudaError_t start_forward_fp32(const Launch& launch, cudaStream_t stream) {
    static_assert(ShapesFp32::kHas<Shape>);
    using Layout = LayoutFp32<Shape::kConfig>;
    constexpr int kSharedBytes = Layout::kFloats * static_cast<int>(sizeof(float));
    return start(forward_fp32_kernel<Shape>, launch.blocks, Layout::kThreads, kSharedBytes, launch, stream);
}

}  // namespace tessera::cuda::fa2
