// SPDX-License-Identifier: Apache-2.0
//
// Algorithm 1 in fp32, by three bf16 parts on the tensor cores (tile/parts.cuh). A warp has 16 rows of the query tile.
// The next tile of K is copied to shared memory during P V, and V during Q K^T.
#pragma once

#include <cfloat>
#include <new>

#include "cuda/fa2/work.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/tile/exponent_offset.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/parts.cuh"
#include "cuda/tile/sink.cuh"

namespace tessera::cuda::fa2 {

/// m, l and O of two rows of a thread, 8 apart.
template <ConfigFp32 kConfig>
struct RowsFp32 {
    float max[2] = {-INFINITY, -INFINITY};
    float sum[2] = {0, 0};  // l, the thread's part
    float o[kConfig.head_dim / 8][4] = {};

    /// Turns scores into P times 2^-kExponentOffset, and rescales O and l to the new maxima.
    template <int kTiles>
    __device__ __forceinline__ void online_softmax(float (&s)[kTiles][4]) {
        float m[2];
        float rescale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float found = max[r];
#pragma unroll
            for (int j = 0; j < kTiles; ++j) found = fmaxf(found, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
            found = quad_max(found);
            m[r] = found == -INFINITY ? 0.0F : found;  // no visible key yet: exp(-inf - 0) = 0
            rescale[r] = ptx::exp2_approx((max[r] - m[r]) * kLog2E);
            max[r] = found;
        }
        float part[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                // The difference first: it is exact near the maximum, where weights are large.
                const float p = ptx::exp2_approx(__fmul_rn(__fadd_rn(s[j][e], -m[e / 2]), kLog2E));
                part[e / 2] = __fadd_rn(part[e / 2], p);
                s[j][e] = __fmul_rn(p, 1 / kExponentOffsetFactor<float>);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = __fadd_rn(__fmul_rn(sum[r], rescale[r]), part[r]);
        if (!any_lane(rescale[0] != 1 || rescale[1] != 1)) return;
#pragma unroll
        for (auto& columns : o) {
#pragma unroll
            for (int e = 0; e < 4; ++e) columns[e] = __fmul_rn(columns[e], rescale[e / 2]);
        }
    }
};

template <ConfigFp32 kConfig>
struct MainloopFp32 {
    static constexpr int kHeadDim = kConfig.head_dim;
    static constexpr int kBlockKv = kConfig.block_kv;
    using Queries = PartTile<kConfig.block_q(), kHeadDim, kConfig.threads()>;
    using Keys = PartTile<kBlockKv, kHeadDim, kConfig.threads()>;
    using Scores = float[kBlockKv / 8][4];
    using Out = RowsFp32<kConfig>;
    static constexpr bool kCopies = kHeadDim <= 128;
    static constexpr int kSharedBytes = kConfig.shared_bytes();

    const Launch& launch;
    const Work& work;
    char* shared;              // Q, K, V
    TileExtremes& extremes_q;  // in shared memory, since registers are few

    __device__ __forceinline__ char* k_tile() const { return shared + Queries::kBytes; }
    __device__ __forceinline__ char* v_tile() const { return k_tile() + Keys::kBytes; }
    __device__ static __forceinline__ int lane() { return ptx::opaque(static_cast<int>(threadIdx.x)) % 32; }
    __device__ static __forceinline__ int first_row() { return ptx::opaque(static_cast<int>(threadIdx.x)) / 32 * 16; }
    __device__ __forceinline__ int query() const { return work.q_begin + first_row() + lane() / 4; }

    __device__ __forceinline__ SourceFp32 q() const {
        const ForwardParams& p = launch.params;
        const std::int64_t offset = head_offset(p.q, work.batch, work.sequence.first_q, work.head, sizeof(float));
        return {p.q, offset, work.sequence.len_q, p.head_dim, launch.vector_q};
    }
    __device__ __forceinline__ SourceFp32 k() const {
        const ForwardParams& p = launch.params;
        return {p.k, work.k - p.k.data, work.sequence.len_kv, p.head_dim, launch.vector_k};
    }
    __device__ __forceinline__ SourceFp32 v() const {
        const ForwardParams& p = launch.params;
        return {p.v, work.v - p.v.data, work.sequence.len_kv, p.head_dim_v, launch.vector_v};
    }

    /// Goes over all key tiles, in ascending order.
    __device__ __forceinline__ void run(Out& out) const {
        const int count = work.tiles.count();
        if (count == 0) return;
        if constexpr (kCopies) Keys::start_copy(k_tile(), k(), first_key(0));
        const TileExtremes of_q(Queries::load(shared, q(), work.q_begin));
        if (threadIdx.x == 0) extremes_q = of_q;
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < count; ++i) step(i, i + 1 < count, out);
    }

    /// Writes O, normalised, and the LSE.
    __device__ __forceinline__ void store(const Out& out) const {
        const ForwardParams& p = launch.params;
        const std::int64_t first = work.sequence.first_q;
        char* o = p.o.data + head_offset(p.o, work.batch, first, work.head, sizeof(float));
        char* lse = p.lse.data + head_offset(p.lse, work.batch, first, work.head, sizeof(float));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float l = quad_sum(out.sum[r]);
            const int row = query() + 8 * r;
            if (row >= work.sequence.len_q) continue;
            const float m = out.max[r] == -INFINITY ? 0.0F : out.max[r];
            const WithSink with = with_sink_of(p, work.head, m + logf(l));
            if (p.lse.data && lane() % 4 == 0) reinterpret_cast<float*>(lse)[row * p.lse.row] = with.lse;
            const float factor = l == 0.0F ? 0.0F : p.keep_scale / l * with.factor;
            float* const to = reinterpret_cast<float*>(o) + row * p.o.row;
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
                const int column = 8 * n + lane() % 4 * 2;
                const float2 x = {without_exponent_offset(out.o[n][2 * r] * factor),
                                  without_exponent_offset(out.o[n][2 * r + 1] * factor)};
                if (launch.vector_o && column < p.head_dim_v) *reinterpret_cast<float2*>(to + column) = x;
                if (launch.vector_o) continue;
                if (column < p.head_dim_v) to[column * p.o.column] = x.x;
                if (column + 1 < p.head_dim_v) to[(column + 1) * p.o.column] = x.y;
            }
        }
    }

 private:
    __device__ __forceinline__ int first_key(int index) const { return (work.tiles.begin + index) * kBlockKv; }

    /// Brings a tile of K or V: what has been copied, after which `start_next` starts the next copy, or, where
    /// registers do not suffice for that, straight from global memory.
    template <class StartNext>
    __device__ __forceinline__ Extremes bring(char* tile, const SourceFp32& source, int key,
                                              const StartNext& start_next) const {
        if constexpr (!kCopies) return Keys::load(tile, source, key);
        Extremes extremes;
        ptx::cp_async_wait<0>();
        Keys::split_copy(tile, extremes, start_next);
        return extremes;
    }

    __device__ __forceinline__ void step(int index, bool more, Out& out) const {
        const int key = first_key(index);
        const bool full = work.tiles.full(work.tiles.begin + index);
        Scores s;
        const Extremes of_k = bring(k_tile(), k(), key, [&] { Keys::start_copy(v_tile(), v(), key); });
        const bool repairs = __syncthreads_or(extremes_q.fails_with(of_k)) != 0;
        multiply_qk(s, key, full, repairs, out);
        const Extremes of_v = bring(v_tile(), v(), key, [&] {
            if (more) Keys::start_copy(k_tile(), k(), first_key(index + 1));
        });
        const bool cleans = __syncthreads_or(of_v.any_nonfinite()) != 0;  // 0 * NaN is NaN
        if (cleans) {
            Keys::clean(v_tile());
            __syncthreads();
        }
        multiply_pv(s, out);
        if (cleans) {
            add_nonfinite(out.o, v(), query(), lane() % 4 * 2, key, key + kBlockKv, 1.0F,
                          [&](int row, int other) { return work.band.sees(row, other); });
        }
    }

    /// Q K^T, and the softmax: P in `s`.
    __device__ __forceinline__ void multiply_qk(Scores& s, int key, bool full, bool repairs, Out& out) const {
        multiply_rows<Queries, Keys,
                      kHeadDim == 64    ? 4
                      : kHeadDim == 128 ? 2
                                        : 1>(s, Queries::Address::rows_first(shared, first_row(), lane()),
                                             Keys::Address::chunks_first(k_tile(), lane()));
        const int column = key + lane() % 4 * 2;
        if (repairs) {
            repair_products(
                s, q(), k(), [&](int i) { return query() + 8 * row_of(i); },
                [&](int i) { return column + column_of(i); }, [](int) { return false; });
        }
        const HeadScores<float> scores{launch.params, work.sequence, work.batch, work.head, work.scores};
        if (full) scores.template transform<false>(s, work.band, query(), column);
        else scores.template transform<true>(s, work.band, query(), column);
        out.online_softmax(s);
        if (scores.drops()) scores.drop(s, query(), key, lane());
    }

    __device__ __forceinline__ void multiply_pv(const Scores& s, Out& out) const {
        constexpr int kSteps = kBlockKv / 16;
        PartFragments p[kSteps];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) split(p[step], s[2 * step], s[2 * step + 1]);
        add_columns<Keys>(out.o, p, Keys::Address::rows_first(v_tile(), 0, lane()));
    }

    /// Takes the exponent offset off O. A result that overflows by rounding alone becomes the largest float. (That
    /// happens if all of V is the largest float and P sums to slightly over 1.)
    __device__ static __forceinline__ float without_exponent_offset(float x) {
        constexpr float kRounding = 0x1p-16F;
        constexpr float kMost = FLT_MAX / kExponentOffsetFactor<float>;
        if (fabsf(x) > kMost && fabsf(x) <= kMost * (1 + kRounding)) return copysignf(FLT_MAX, x);
        return fmaf(x, kExponentOffsetFactor<float>, 0.0F);  // + 0: -0 becomes +0
    }
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.blocks_per_sm)
    forward_fp32_kernel(const __grid_constant__ Launch launch) {
    constexpr ConfigFp32 kConfig = Shape::kConfig;
    extern __shared__ __align__(128) char memory[];
    __shared__ alignas(Work) char work_memory[sizeof(Work)];
    const Work& work = *reinterpret_cast<const Work*>(work_memory);
    if (threadIdx.x == 0) {
        new (work_memory) Work(launch, blockIdx.x, kConfig.block_q(), kConfig.block_kv, sizeof(float));
    }
    __syncthreads();
    if (work.q_begin >= work.sequence.len_q) return;
    __shared__ TileExtremes extremes_q;
    const MainloopFp32<kConfig> mainloop{launch, work, memory, extremes_q};
    RowsFp32<kConfig> out;
    mainloop.run(out);
    mainloop.store(out);
}

template <class Shape>
cudaError_t start_forward_fp32(const Launch& launch, cudaStream_t stream) {
    static_assert(ShapesFp32::kHas<Shape>);
    constexpr ConfigFp32 kConfig = Shape::kConfig;
    constexpr int kSharedBytes = MainloopFp32<kConfig>::kSharedBytes;
    return start(forward_fp32_kernel<Shape>, launch.blocks, kConfig.threads(), kSharedBytes, launch, stream);
}

}  // namespace tessera::cuda::fa2
