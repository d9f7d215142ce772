// SPDX-License-Identifier: Apache-2.0
//
// FlashAttention-2 (Dao, 2023), algorithm 1: a thread block owns a tile of queries and goes over the tiles of keys that
// they see; O, the maximum m and the sum l stay in registers until the end. The next tile of K and V is copied while
// the products of this one run.
#pragma once

#include "cuda/fa2/epilogue.cuh"
#include "cuda/fa2/inputs.cuh"
#include "cuda/tile/softmax.cuh"
#include "cuda/tile/warp_product.cuh"

namespace tessera::cuda::fa2 {

/// One thread's share of O, m and l of its warp's rows.
template <class T, Config kConfig>
struct Accumulators {
    static constexpr int kRowTiles = kConfig.row_tiles;
    float o[kRowTiles][kConfig.head_dim / 8][4] = {};  // [16 rows][8 dims][4]
    RowPair<T, !kConfig.general> rows[kRowTiles];

    __device__ __forceinline__ void rescale(int m, const float (&factor)[2]) {
#pragma unroll
        for (int n = 0; n < kConfig.head_dim / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) o[m][n][e] *= factor[e / 2];
        }
    }
};

/// What stays the same over the tiles of keys.
template <class T, Config kConfig>
struct Loop {
    const Inputs<T, kConfig>& inputs;
    const KeyTiles& tiles;
    const Visible visible;
    const HeadScores<T> head;
    const Scale scale;
    const int lane;
    const int query;  // of the thread's first row
    Queries<kConfig.head_dim, kConfig.row_tiles, kConfig.q_in_registers> queries;
    bool cleaned = false;  // a tile of V held Inf or NaN

    /// One tile of keys.
    template <bool kMasked>
    __device__ __forceinline__ void step(int index, Accumulators<T, kConfig>& out) {
        constexpr int kRowTiles = kConfig.row_tiles;
        constexpr int kHeadDim = kConfig.head_dim;
        const int stage = index % kConfig.stages();
        const int first_key = tiles.at(index) * kConfig.block_kv;
        ptx::cp_async_wait<0>();
        __syncthreads();  // this tile is there for all, and all are done with the one before
        if (index + 1 < tiles.count) inputs.load_kv(tiles.at(index + 1) * kConfig.block_kv, 1 - stage);

        bool met = false;
        if constexpr (kMasked) met = clean<T, kConfig.block_kv, kHeadDim, kConfig.threads()>(inputs.v_tile(stage));
        float s[kRowTiles][kConfig.block_kv / 8][4];  // S, then P: [16 rows][8 keys][4]
        multiply_qk<T>(s, queries, MatrixAddress<kHeadDim>::chunks_first(inputs.k_tile(stage), lane));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) weigh<kMasked>(s[m], query + 16 * m, first_key + lane % 4 * 2, m, out);
        if constexpr (kMasked) cleaned |= __syncthreads_or(met) != 0;
        multiply_pv<T, kHeadDim>(out.o, s, MatrixAddress<kHeadDim>::rows_first(inputs.v_tile(stage), 0, lane));
    }

    /// S of 16 rows becomes P; O is brought to the new maximum.
    template <bool kMasked, int kTiles>
    __device__ __forceinline__ void weigh(float (&s)[kTiles][4], int row, int key, int m,
                                          Accumulators<T, kConfig>& out) {
        if constexpr (kConfig.general) head.template transform<kMasked>(s, visible, row, key);
        else if constexpr (kMasked) hide(s, visible, row, key);
        float factor[2];
        out.rows[m].absorb(s, scale, factor);
        if constexpr (kConfig.general) {
            if (head.keep_threshold != 0) head.drop(s, row, key, lane);
        }
        out.rescale(m, factor);
    }
};

template <class T, Config kConfig>
__device__ __forceinline__ void write_lse(const Launch& launch, const Work& work, Accumulators<T, kConfig>& out,
                                          const Scale& scale, int query, int lane) {
    const Rows& lse = launch.params.lse;
    if (lse.data == nullptr || lane % 4 != 0) return;
    char* to = lse.data + head_offset(lse, work.batch, work.member.first_q, work.head, sizeof(float));
#pragma unroll
    for (int m = 0; m < kConfig.row_tiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = query + 16 * m + 8 * r;
            if (row >= work.member.len_q) continue;
            *reinterpret_cast<float*>(to + row * lse.row * std::int64_t{sizeof(float)}) = out.rows[m].lse(r, scale);
        }
    }
}

template <class T, Config kConfig>
__device__ __forceinline__ void write_o(const Launch& launch, const Work& work, const Loop<T, kConfig>& loop,
                                        Accumulators<T, kConfig>& out, int warp) {
    constexpr int kHeadDim = kConfig.head_dim;
    constexpr std::int64_t kSize = sizeof(T);
    const Rows& o = launch.params.o;
    const int first_row = warp * kConfig.rows_per_warp();
    float factor[kConfig.row_tiles][2];
#pragma unroll
    for (int m = 0; m < kConfig.row_tiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) factor[m][r] = out.rows[m].inverse_sum(r) * launch.params.keep_scale;
    }
    stage<T, kHeadDim>(loop.inputs.shared, out.o, factor, first_row, loop.lane);
    __syncwarp();
    const Target target{o.data + head_offset(o, work.batch, work.member.first_q, work.head, sizeof(T)),
                        o.row * kSize,
                        o.column * kSize,
                        work.member.len_q,
                        launch.params.head_dim_v,
                        launch.vector_o};
    store<kHeadDim, kConfig.rows_per_warp()>(
        loop.inputs.shared, target, work.q_begin, first_row, loop.lane, [&](const uint4& chunk, int row, int column) {
            if (!loop.cleaned) return chunk;
            return restore<T>(chunk, loop.inputs.v, loop.tiles, kConfig.block_kv, loop.visible, row, column);
        });
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.blocks_per_sm)
    forward_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    extern __shared__ __align__(128) char memory[];
    const ForwardParams& p = launch.params;
    const Work work(launch, blockIdx.x, kConfig.block_q());
    const int q_end = work.q_end(kConfig.block_q());
    if (work.q_begin >= q_end) return;
    const KeyTiles tiles(work.band, work.q_begin, q_end, kConfig.block_kv);
    const Inputs<T, kConfig> inputs(launch, work, memory);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Loop<T, kConfig> loop{.inputs = inputs,
                          .tiles = tiles,
                          .visible = Visible(work.band),
                          .head = HeadScores<T>(p, work.member, work.batch, work.head),
                          .scale = kConfig.general ? Scale{} : Scale{p.scale, p.scale * kLog2E},
                          .lane = lane,
                          .query = work.q_begin + warp * kConfig.rows_per_warp() + lane / 4,
                          .queries = {memory, warp * kConfig.rows_per_warp(), lane}};
    Accumulators<T, kConfig> out;
    if (tiles.count > 0) {
        inputs.load_q(work.q_begin);
        inputs.load_kv(tiles.at(0) * kConfig.block_kv, 0);
        if constexpr (kConfig.q_in_registers) {
            ptx::cp_async_wait<1>();
            __syncthreads();
            loop.queries.read_all();
        }
    }
    for (int i = 0; i < tiles.partial; ++i) loop.template step<true>(i, out);
    for (int i = tiles.partial; i < tiles.count; ++i) loop.template step<false>(i, out);

#pragma unroll
    for (int m = 0; m < kConfig.row_tiles; ++m) out.rows[m].finish();
    write_lse(launch, work, out, loop.scale, loop.query, lane);
    write_o(launch, work, loop, out, warp);
}

template <class T, class Shape>
cudaError_t start_forward(const Launch& launch, cudaStream_t stream) {
    constexpr Config kConfig = Shape::kConfig;
    const auto kernel = forward_kernel<T, Shape>;
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kConfig.shared_bytes());
    if (status != cudaSuccess) return status;
    const std::int64_t blocks = launch.params.batch * launch.params.heads_q * launch.q_blocks;
    kernel<<<static_cast<unsigned>(blocks), kConfig.threads(), kConfig.shared_bytes(), stream>>>(launch);
    return cudaGetLastError();
}

}  // namespace tessera::cuda::fa2
