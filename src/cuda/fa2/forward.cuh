// SPDX-License-Identifier: Apache-2.0
//
// FlashAttention-2 (Dao, 2023), algorithm 1: a thread block owns a tile of queries and goes over the tiles of keys that
// they see; O, the maximum m and the sum l stay in registers until the end. The next tile of K and V is copied while
// the products of this one run.
#pragma once

#include <new>

#include "cuda/fa2/epilogue.cuh"
#include "cuda/fa2/inputs.cuh"
#include "cuda/tile/softmax.cuh"
#include "cuda/tile/warp_product.cuh"

namespace tessera::cuda::fa2 {

/// One thread's share of O, m and l of its warp's rows.
template <class T, Config kConfig>
struct Accumulators {
    static constexpr int kRowTiles = kConfig.row_tiles;
    static constexpr int kDimTiles = kConfig.head_dim / 8;
    float o[kRowTiles][kDimTiles][4] = {};  // [16 rows][8 dims][4]
    RowPair<T> rows[kRowTiles];

    __device__ __forceinline__ void rescale(int m, const Raised& raised) {
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) o[m][n][e] *= raised.rescale[e / 2];
        }
    }

    /// Did Inf or NaN come in through V? One row of the thread is enough to know: a weight of 0 makes NaN of them.
    __device__ __forceinline__ bool poisoned() const {
        float probe = 0;  // x * 0 is NaN unless x is finite
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) probe = fmaf(o[0][n][0], 0.0F, fmaf(o[0][n][1], 0.0F, probe));
        return probe != probe;
    }
};

/// Which rows and columns a thread has to do with. Worked out where it is needed: in the loop registers are few.
struct Position {
    int first_row;  // of the warp in its tile of queries
    int lane;

    template <Config kConfig>
    __device__ static __forceinline__ Position of_thread() {
        const auto thread = static_cast<unsigned>(ptx::opaque(static_cast<int>(threadIdx.x)));
        return {static_cast<int>(thread / 32) * kConfig.rows_per_warp(), static_cast<int>(thread % 32)};
    }
    __device__ __forceinline__ int row() const { return first_row + lane / 4; }  // the thread's first
    __device__ __forceinline__ int column() const { return lane % 4 * 2; }       // of accumulators
};

/// What stays the same over the tiles of keys.
template <class T, Config kConfig>
struct Loop {
    static constexpr int kRowTiles = kConfig.row_tiles;
    static constexpr int kHeadDim = kConfig.head_dim;
    using Scores = float[kRowTiles][kConfig.block_kv / 8][4];  // S, then P: [16 rows][8 keys][4]

    const Inputs<T, kConfig> inputs;
    const Work& work;  // in shared memory: registers are few
    const HeadScores<T> head;
    const Scale scale;
    Queries<kHeadDim, kRowTiles, kConfig.q_in_registers> queries;
    const MatrixAddress<kHeadDim> k;  // in stage 0
    const MatrixAddress<kHeadDim> v;
    bool guarded = false;  // Inf and NaN of V are taken out of tiles that not every query sees whole

    struct Step;

    /// Before the first tile.
    __device__ __forceinline__ void begin() {
        const int first_key = work.tiles.first * kConfig.block_kv;
        inputs.load_k(first_key, 0);
        if constexpr (kConfig.stages > 1) inputs.load_v(first_key, 0);
    }

    /// One tile of keys, whatever it is like.
    __device__ __forceinline__ void step(int index, Accumulators<T, kConfig>& out) {
        const int stage = index % kConfig.stages;
        const int first_key = (work.tiles.first + index) * kConfig.block_kv;
        wait_for_tile();
        if constexpr (kConfig.stages == 1) {
            inputs.load_v(first_key, 0);
        } else if (index + 1 < work.tiles.count) {
            inputs.load_k(first_key + kConfig.block_kv, 1 - stage);
            inputs.load_v(first_key + kConfig.block_kv, 1 - stage);
        }
        const bool wanted = sees(first_key);
        Scores s;
        Step weights;
        if (wanted) {
            multiply_qk<T>(s, queries, k.moved(stage * kConfig.stage_bytes()));
            score<true>(s, first_key);
            if (!raise(s, weights, out)) raise_large(s, weights, out);
        }
        if constexpr (kConfig.stages == 1) {
            wait_for_tile();
            if (index + 1 < work.tiles.count) inputs.load_k(first_key + kConfig.block_kv, 0);
        }
        if (guarded && !work.tiles.full(work.tiles.first + index)) {
            clean<T, kConfig.block_kv, kHeadDim, kConfig.threads()>(inputs.v_tile(stage));
            __syncthreads();
        }
        if (wanted) weigh_and_add(s, first_key, stage, weights, out, [](int) {});
    }

    /// Tiles [begin, end) of the work, of which every query sees all: no mask, and the next tile is brought in between
    /// the products, by threads that know where to read on. Returns the first tile that is still to be done, by step():
    /// `end`, or, for this warp, one that needs more than is done here.
    __device__ __forceinline__ int run(int begin, int end, Accumulators<T, kConfig>& out) {
        using Keys = typename Inputs<T, kConfig>::KeyLoader;
        constexpr bool kAhead = kConfig.stages > 1;  // both K and V are brought for the next tile; else V for this one
        int first_key = (work.tiles.first + begin) * kConfig.block_kv;
        typename Keys::Stream k_stream = inputs.k_stream(first_key + kConfig.block_kv);
        typename Keys::Stream v_stream = inputs.v_stream(kAhead ? first_key + kConfig.block_kv : first_key);
        const int count = work.tiles.count;
#pragma unroll 1
        for (int index = begin; index < end; ++index, first_key += kConfig.block_kv) {
            const int stage = index % kConfig.stages;
            const bool more = index + 1 < count;
            wait_for_tile();
            Scores s;
            const std::uint32_t k_tile = ptx::shared_address(inputs.k_tile(kAhead ? 1 - stage : 0));
            const std::uint32_t v_tile = k_tile + kConfig.kv_bytes();
            multiply_qk<T>(s, queries, k.moved(stage * kConfig.stage_bytes()), [&](int step) {
                constexpr int kSteps = kHeadDim / 16;
#pragma unroll
                for (int part = step * Keys::kParts / kSteps; part < (step + 1) * Keys::kParts / kSteps; ++part) {
                    if constexpr (kAhead) k_stream.start(k_tile, part, inputs.k_layout(), more);
                    v_stream.start(v_tile, part, inputs.v_layout(), more || !kAhead);
                }
            });
            ptx::cp_async_commit();
            Step weights;
            score<false>(s, first_key);
            if (!raise(s, weights, out)) return index;
            if constexpr (!kAhead) wait_for_tile();
            weigh_and_add(s, first_key, stage, weights, out, [&](int tile) {
                constexpr int kSteps = kConfig.block_kv / 8;
                if constexpr (!kAhead) {
#pragma unroll
                    for (int part = tile * Keys::kParts / kSteps; part < (tile + 1) * Keys::kParts / kSteps; ++part) {
                        k_stream.start(k_tile, part, inputs.k_layout(), more);
                    }
                }
            });
            if constexpr (!kAhead) ptx::cp_async_commit();
        }
        return end;
    }

    /// What was on its way is there for all threads, and all are done with what they worked on before.
    __device__ static __forceinline__ void wait_for_tile() {
        ptx::cp_async_wait<0>();
        __syncthreads();
    }

    /// O += P V. `between`(i) is called before columns 8 * i ... of P.
    template <class Between>
    __device__ __forceinline__ void weigh_and_add(Scores& s, int first_key, int stage, const Step& weights,
                                                  Accumulators<T, kConfig>& out, const Between& between) {
        float part[kRowTiles][2] = {};
        multiply_pv<T, kHeadDim>(out.o, s, v.moved(stage * kConfig.stage_bytes()), [&](int tile) {
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) weigh(s[m][tile], first_key + 8 * tile, m, weights, part[m]);
            between(tile);
        });
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) out.rows[m].add(weights.raised[m], part[m]);
    }

    /// Does any row of the warp see any key of the tile? The others keep what they have, to the last bit.
    __device__ __forceinline__ bool sees(int first_key) const {
        const int first_query = work.q_begin + Position::of_thread<kConfig>().first_row;
        return work.visible.first(first_query) < first_key + kConfig.block_kv &&
               work.visible.last(first_query + kConfig.rows_per_warp() - 1) >= first_key;
    }

    /// What the exponentials of a tile need.
    struct Step {
        Raised raised[kRowTiles];
        float log2_scale;
    };

    /// Products become scores.
    template <bool kMasked>
    __device__ __forceinline__ void score(Scores& s, int first_key) const {
        if constexpr (!kMasked && !kConfig.general) return;
        const Position position = Position::of_thread<kConfig>();
        const int query = work.q_begin + position.row();
        const int key = first_key + position.column();
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            if constexpr (kConfig.general) head.template transform<kMasked>(s[m], work.visible, query + 16 * m, key);
            else hide(s[m], work.visible, query + 16 * m, key);
        }
    }

    /// O is brought to the new maxima. False: a row's maximum is too large for fused exponents, nothing was done.
    __device__ __forceinline__ bool raise(const Scores& s, Step& step, Accumulators<T, kConfig>& out) const {
        RowPair<T> rows[kRowTiles];
        bool large = false;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            rows[m] = out.rows[m];
            step.raised[m] = rows[m].raise(rows[m].maxima(s[m]), scale);
            large |= step.raised[m].any_large();
        }
        if (__any_sync(0xFFFFFFFF, large)) return false;
        step.log2_scale = scale.log2;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            out.rows[m] = rows[m];
            if (__any_sync(0xFFFFFFFF, step.raised[m].any())) out.rescale(m, step.raised[m]);  // 1 changes nothing
        }
        return true;
    }

    /// The same for all rows.
    __device__ __forceinline__ void raise_large(Scores& s, Step& step, Accumulators<T, kConfig>& out) const {
        step.log2_scale = 1;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            step.raised[m] = out.rows[m].raise(out.rows[m].maxima(s[m]), scale);
            out.rows[m].subtract(s[m], scale, step.raised[m]);
            out.rescale(m, step.raised[m]);
        }
    }

    /// Scores of 16 rows x 8 keys become weights.
    __device__ __forceinline__ void weigh(float (&s)[4], int first_key, int m, const Step& step,
                                          float (&part)[2]) const {
        RowPair<T>::weigh(s, step.log2_scale, step.raised[m], part);
        if constexpr (kConfig.general) {
            if (!head.drops()) return;
            const Position position = Position::of_thread<kConfig>();
            head.drop(s, work.q_begin + position.row() + 16 * m, first_key + position.column(), position.lane);
        }
    }
};

template <class T, Config kConfig>
__device__ __forceinline__ void write_lse(const Launch& launch, const Work& work, const Loop<T, kConfig>& loop,
                                          const Accumulators<T, kConfig>& out) {
    const Rows& lse = launch.params.lse;
    const Position position = Position::of_thread<kConfig>();
    if (lse.data == nullptr || position.column() != 0) return;
    char* to = lse.data + head_offset(lse, work.batch, work.member.first_q, work.head, sizeof(float));
#pragma unroll
    for (int m = 0; m < kConfig.row_tiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = work.q_begin + position.row() + 16 * m + 8 * r;
            if (row >= work.member.len_q) continue;
            *reinterpret_cast<float*>(to + row * lse.row * std::int64_t{sizeof(float)}) =
                out.rows[m].lse(r, loop.scale);
        }
    }
}

/// A warp's rows of O, from the shared memory of Q.
template <class T, Config kConfig>
__device__ __forceinline__ void write_o(const Launch& launch, const Work& work, const Loop<T, kConfig>& loop) {
    constexpr std::int64_t kSize = sizeof(T);
    const Rows& o = launch.params.o;
    const Target target{o.data + head_offset(o, work.batch, work.member.first_q, work.head, sizeof(T)),
                        o.row * kSize,
                        o.column * kSize,
                        work.member.len_q,
                        launch.params.head_dim_v,
                        launch.vector_o};
    const Position position = Position::of_thread<kConfig>();
    store<kConfig.head_dim, kConfig.rows_per_warp()>(loop.inputs.shared, target, work.q_begin, position.first_row,
                                                     position.lane, [&](uint4& chunk, int row, int column) {
                                                         if (!loop.guarded) return;
                                                         restore<T>(chunk, work.v, loop.inputs.v_layout(), work.tiles,
                                                                    kConfig.block_kv, work.visible, row, column);
                                                     });
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.blocks_per_sm)
    forward_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    extern __shared__ __align__(128) char memory[];
    const ForwardParams& p = launch.params;
    // What all threads share, and need between two tiles only, is kept out of their registers.
    __shared__ alignas(Work) char work_memory[sizeof(Work)];
    const Work& work = *reinterpret_cast<const Work*>(work_memory);
    if (threadIdx.x == 0) new (work_memory) Work(launch, blockIdx.x, kConfig.block_q(), kConfig.block_kv, sizeof(T));
    __syncthreads();
    if (work.q_begin >= work.member.len_q) return;
    const KeyTiles& tiles = work.tiles;
    const Inputs<T, kConfig> inputs{launch, work, memory};
    const Position position = Position::of_thread<kConfig>();
    Loop<T, kConfig> loop{.inputs = inputs,
                          .work = work,
                          .head = HeadScores<T>(p, work.member, work.batch, work.head),
                          .scale = kConfig.general ? Scale{} : Scale{p.scale, p.scale * kLog2E},
                          .queries = {memory, position.first_row, position.lane},
                          .k = MatrixAddress<kConfig.head_dim>::chunks_first(inputs.k_tile(0), position.lane),
                          .v = MatrixAddress<kConfig.head_dim>::rows_first(inputs.v_tile(0), 0, position.lane)};
    if (tiles.count > 0) inputs.load_q();
    if constexpr (kConfig.q_in_registers) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        loop.queries.read_all();
    }
    Accumulators<T, kConfig> out;
    for (;;) {
        if (tiles.count > 0) loop.begin();
#pragma unroll 1
        for (int i = 0; i < tiles.count; ++i) {
            if (i == tiles.run_begin) i = loop.run(i, tiles.run_end, out);
            if (i < tiles.count) loop.step(i, out);
        }
        // Hidden Inf and NaN of V are rare: only when some have come through is the work done again without them.
        if (loop.guarded || tiles.all_full() || !__syncthreads_or(out.poisoned())) break;
        loop.guarded = true;
        out = {};
    }

    float factor[kConfig.row_tiles][2];
#pragma unroll
    for (int m = 0; m < kConfig.row_tiles; ++m) {
        out.rows[m].finish();
#pragma unroll
        for (int r = 0; r < 2; ++r) factor[m][r] = out.rows[m].inverse_sum(r) * p.keep_scale;
    }
    const Position again = Position::of_thread<kConfig>();
    stage<T, kConfig.head_dim>(memory, out.o, factor, again.first_row, again.lane);
    __syncwarp();
    write_lse(launch, work, loop, out);
    write_o(launch, work, loop);
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
