// SPDX-License-Identifier: Apache-2.0
//
// FlashAttention-3 forward (Shah et al. 2024, Algorithm 1 and section 3): Q tiles outer, K/V blocks inner, as in
// FlashAttention-2; a producer warp fills shared memory by the copy engine; two or three consumer warpgroups take turns
// on the tensor cores (ping-pong, section 3.1), and within one, the scores of the next block are multiplied while the
// softmax of this one runs (section 3.2). The grid is persistent: the next Q, K and V arrive while O leaves.
#pragma once

#include "cuda/fa3/epilogue.cuh"
#include "cuda/fa3/producer.cuh"
#include "cuda/fa3/shared.cuh"
#include "cuda/fa3/softmax.cuh"
#include "cuda/fa3/work.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace tessera::cuda::fa3 {

/// The same value in all lanes, known to the compiler as such: descriptors then live in uniform registers, and nothing
/// stands between two products.
__device__ __forceinline__ std::uint64_t uniform(std::uint64_t descriptor) {
    const std::uint32_t low = __shfl_sync(kAllLanes, static_cast<std::uint32_t>(descriptor), 0);
    const std::uint32_t high = __shfl_sync(kAllLanes, static_cast<std::uint32_t>(descriptor >> 32), 0);
    return static_cast<std::uint64_t>(high) << 32 | low;
}

/// S = Q K^T, started: [64][block_kv] of this warpgroup.
template <class T, Config kConfig>
__device__ __forceinline__ void start_scores(float (&s)[kConfig.block_kv / 2], std::uint64_t q, std::uint64_t k) {
    constexpr int kQSlab = 64 * kSlabRowBytes >> 4;
    constexpr int kKSlab = kConfig.block_kv * kSlabRowBytes >> 4;
    ptx::keep_in_place(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int slab = 0; slab < kConfig.head_dim / kSlabColumns; ++slab) {
#pragma unroll
        for (int step = 0; step < kSlabColumns / 16; ++step) {
            ptx::wgmma_ss<kConfig.block_kv, T>(s, q + slab * kQSlab + step * kStepColumns,
                                               k + slab * kKSlab + step * kStepColumns, slab + step > 0);
        }
    }
    ptx::wgmma_commit();
}

/// O += P V, started: [64][head_dim_v] of this warpgroup.
template <class T, Config kConfig>
__device__ __forceinline__ void start_output(float (&o)[kConfig.head_dim_v / 2],
                                             const std::uint32_t (&p)[kConfig.block_kv / 16][4], std::uint64_t v) {
    ptx::keep_in_place(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kConfig.block_kv / 16; ++step) {
        ptx::wgmma_rs<kConfig.head_dim_v, T>(o, p[step], v + step * kStepRows, true);
    }
    ptx::wgmma_commit();
}

/// P in 16 bits: the accumulators of S, read as the A operand of the next product.
template <class T, int kSteps>
__device__ __forceinline__ void pack_weights(const float (&s)[8 * kSteps], std::uint32_t (&p)[kSteps][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p[step][i] = ptx::pack<T>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
    }
}

/// The order in which warpgroups come to the tensor cores: each passes the turn to the next.
template <int kWarpgroups>
struct Turns {
    int warpgroup;

    static constexpr int kFirstBarrier = 1;  // 0 is __syncthreads
    __device__ __forceinline__ void start() const {
        if (warpgroup == kWarpgroups - 1) pass();
    }
    __device__ __forceinline__ void take() const { ptx::named_barrier_sync(kFirstBarrier + warpgroup, 256); }
    __device__ __forceinline__ void pass() const {
        ptx::named_barrier_arrive(kFirstBarrier + (warpgroup + 1) % kWarpgroups, 256);
    }
};

/// One consumer warpgroup: 64 queries of each tile.
template <class T, Config kConfig>
struct Consumer {
    const Launch& launch;
    Shared<kConfig>& shared;
    int warpgroup;  ///< 0 .. consumers - 1
    int thread;     ///< 0 .. 127

    RingPosition<kConfig.q_stages> q{};
    RingPosition<kConfig.kv_stages> k{}, v{};
    std::uint32_t clean_phase = 0;  ///< a bit for each stage
    OutputStage<kConfig> output{};

    __device__ __forceinline__ int lane() const { return thread % 32; }
    __device__ __forceinline__ int row_in_tile() const { return 64 * warpgroup + 16 * (thread / 32) + lane() / 4; }
    __device__ __forceinline__ std::uint64_t q_operand() const {
        return row_descriptor(shared.q[q.stage()][warpgroup]);
    }
    __device__ __forceinline__ std::uint64_t k_operand() const { return row_descriptor(shared.k[k.stage()]); }
    __device__ __forceinline__ std::uint64_t v_operand() const {
        return column_descriptor(shared.v[v.stage()], kConfig.block_kv);
    }
    __device__ __forceinline__ void release_k() {
        if (lane() == 0) k.release(shared.k_ring);
        k.advance();
    }
    __device__ __forceinline__ void release_v() {
        if (lane() == 0) v.release(shared.v_ring);
        v.advance();
    }
    /// V is there and, where a row may not see all of it, free of NaN. Returns whether one was taken out.
    __device__ __forceinline__ bool wait_v(bool partial) {
        v.wait_full(shared.v_ring);
        if (!partial) return false;
        wait(shared.v_clean[v.stage()], clean_phase >> v.stage() & 1);
        clean_phase ^= 1U << v.stage();
        bool dirty = false;
        for (int w = 0; w < kGuardWarps; ++w) dirty |= shared.v_dirty[v.stage()][w] != 0;
        return dirty;
    }

    __device__ __forceinline__ void run();
    __device__ __forceinline__ void tile(int index);
    __device__ __forceinline__ void finish_tile(float (&o)[kConfig.head_dim_v / 2], const RowState<T>& rows, bool dirty,
                                                int index);
};

template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::run() {
    const Turns<kConfig.consumers> turns{warpgroup};
    turns.start();
    TileReader reader{shared.tiles};
    for (int index = reader.next(lane()); index != kNoTile; index = reader.next(lane())) {
        const Work<kConfig.block_q(), kConfig.block_kv> work(launch, index);
        if (!work.exists()) continue;
        if (work.has_keys()) tile(index);
        else store_empty_rows<T, kConfig>(launch.params, work, row_in_tile(), lane());
    }
    output.finish(lane());
}

template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::tile(int index) {
    const Work<kConfig.block_q(), kConfig.block_kv> work(launch, index);
    constexpr int kBlockKv = kConfig.block_kv;
    const Turns<kConfig.consumers> turns{warpgroup};
    const float scale_log2 = launch.params.scale * kLog2E;
    float s[kBlockKv / 2];                 // [64 rows][block_kv] of the warpgroup
    std::uint32_t p[kBlockKv / 16][4];     // the same in 16 bits
    float o[kConfig.head_dim_v / 2] = {};  // [64 rows][head_dim_v]
    RowState<T> rows;
    bool dirty = false;

    q.wait_full(shared.q_ring);
    const std::uint64_t q_tile = uniform(q_operand());
    k.wait_full(shared.k_ring);
    start_scores<T, kConfig>(s, q_tile, k_operand());
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(s);
    release_k();
    bool partial = work.partial(work.n_end - 1);
    if (partial) hide(s, work, row_in_tile(), (work.n_end - 1) * kBlockKv, lane());
    rows.absorb(s, scale_log2);
    pack_weights<T>(s, p);
    output.release(shared.q_ring, lane());

#pragma unroll 1
    for (int n = work.n_end - 2; n >= work.n_begin; --n) {
        const std::uint64_t k_block = uniform(k_operand());
        const std::uint64_t v_block = uniform(v_operand());
        k.wait_full(shared.k_ring);
        dirty |= wait_v(partial);
        turns.take();
        start_scores<T, kConfig>(s, q_tile, k_block);
        start_output<T, kConfig>(o, p, v_block);
        turns.pass();
        ptx::wgmma_wait<1>();
        ptx::keep_in_place(s);
        release_k();
        partial = work.partial(n);
        if (partial) hide(s, work, row_in_tile(), n * kBlockKv, lane());
        const float2 rescale = rows.absorb(s, scale_log2);
        // Never true. It is here for its place: the exponentials, on which it depends, are to come before the wait,
        // while P V runs; left alone, the assembler moves them behind it.
        if (rows.sum[0] < 0 || rows.sum[1] < 0) *static_cast<volatile int*>(&shared.never) = 1;
        ptx::wgmma_wait<0>();
        ptx::keep_in_place(o);
        release_v();
        pack_weights<T>(s, p);
        if (__any_sync(kAllLanes, rescale.x != 1.0F || rescale.y != 1.0F)) {  // seldom: most blocks raise no maximum
#pragma unroll
            for (int i = 0; i < kConfig.head_dim_v / 2; ++i) o[i] *= row_of(i) == 0 ? rescale.x : rescale.y;
        }
    }

    dirty |= wait_v(partial);
    start_output<T, kConfig>(o, p, v_operand());
    rows.finish();
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(o);
    release_v();
    finish_tile(o, rows, dirty, index);
}

template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::finish_tile(float (&o)[kConfig.head_dim_v / 2],
                                                                  const RowState<T>& rows, bool dirty, int index) {
    // Worked out again rather than kept: the main loop has no registers to spare.
    const Work<kConfig.block_q(), kConfig.block_kv> work(launch, ptx::opaque(index));
    const float inverse[2] = {rows.inverse_sum(0), rows.inverse_sum(1)};
#pragma unroll
    for (int i = 0; i < kConfig.head_dim_v / 2; ++i) o[i] *= inverse[row_of(i)];
    if (dirty) restore_lost<T, kConfig>(o, launch.params, work, row_in_tile(), lane());
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);  // nobody reads this Q any more
    store_lse(launch.params, work, rows, row_in_tile(), lane());
    output.template store<T>(o, launch, work, shared.q[q.stage()][warpgroup], q.stage(), row_in_tile(), lane());
    if constexpr (kConfig.q_stages == 1) output.release(shared.q_ring, lane());
    q.advance();
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1) forward_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<Shared<kConfig>*>(memory);
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    const int thread = static_cast<int>(threadIdx.x) % 128;
    if (warpgroup == 0) {
        ptx::give_registers<kConfig.producer_registers()>();
        if (thread == 0) produce<kConfig>(launch, shared);
        else if (thread >= 32) guard<T, kConfig>(launch, shared, thread - 32);
    } else {
        ptx::take_registers<kConfig.consumer_registers()>();
        Consumer<T, kConfig>{launch, shared, warpgroup - 1, thread}.run();
    }
}

template <class T, class Shape>
cudaError_t start_forward(const Launch& launch, int blocks, cudaStream_t stream) {
    constexpr auto kernel = forward_kernel<T, Shape>;
    constexpr int kBytes = sizeof(Shared<Shape::kConfig>);
    static_assert(kBytes <= 227 * 1024);
    if (const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
        status != cudaSuccess) {
        return status;
    }
    kernel<<<static_cast<unsigned>(blocks), Shape::kConfig.threads(), kBytes, stream>>>(launch);
    return cudaGetLastError();
}

}  // namespace tessera::cuda::fa3
