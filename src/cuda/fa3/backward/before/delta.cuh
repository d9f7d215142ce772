// SPDX-License-Identifier: Apache-2.0
//
// Before the main kernel: delta[i] = (sum over j of P dP) / (sum of P) - dLSE[i], queries outer (dO . O would do, if O
// were not rounded: docs/decisions/delta-of-rounded-output.md). And what else the main kernel wants to know of rows.
#pragma once

#include <algorithm>
#include <cmath>

#include "cuda/fa3/backward/before/query_tile.cuh"
#include "cuda/fa3/backward/main/mainloop_128.cuh"
#include "cuda/fa3/backward/main/nonfinite.cuh"
#include "cuda/fa3/backward/main/producer.cuh"
#include "cuda/host/constants.hpp"
#include "cuda/shared/start.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/sequence.cuh"

namespace tessera::cuda::fa3::backward {

/// |LSE| up to which an fp32 number holds it well enough (docs/numerics.md).
inline constexpr float kOrdinaryLse = 256;

/// Shared memory of a block of a kernel whose queries are outer, as of delta_kernel.
template <Config kConfig, bool kTwoOfK>
struct alignas(1024) DeltaShared {
    static constexpr int kKStages = kTwoOfK ? 2 : kConfig.delta_stages();
    static constexpr int kVStages = kConfig.delta_stages();
    static constexpr int kBlocks = kDeltaBlockQ / kConfig.block_q;
    using PanelQ = std::uint16_t[kConfig.block_q][kPanelColumns];
    using PanelKv = std::uint16_t[kConfig.block_kv][kPanelColumns];

    PanelQ q[kBlocks][kConfig.qk_panels()];
    PanelQ d_o[kBlocks][kConfig.v_panels()];
    PanelKv k[kKStages][kConfig.qk_panels()];
    PanelKv v[kVStages][kConfig.v_panels()];
    ptx::Mbarrier q_full;
    Ring<kKStages> k_ring;
    Ring<kVStages> v_ring;
    int some_nonfinite[Config::kConsumers], some_large[Config::kConsumers];
    int tile;  ///< delta_kernel: the number of the next one

    __device__ void init_barriers() {
        ptx::mbarrier_init(q_full, 1);
        k_ring.init(4 * Config::kConsumers);
        v_ring.init(4 * Config::kConsumers);
        ptx::fence_mbarrier_init();
    }
    /// They may be initialised again.
    __device__ void end_barriers() {
        ptx::mbarrier_inval(q_full);
        k_ring.end();
        v_ring.end();
    }
};

/// One thread: all copies.
template <Config kConfig, class OfShared>
__device__ __forceinline__ void load_for_queries(const Launch& launch, OfShared& shared,
                                                 const QueryTile<kConfig>& tile) {
    const ForwardParams& p = launch.params.forward;
    const int batch = p.cu_seqlens_q != nullptr ? 0 : tile.batch;
    ptx::mbarrier_arrive_expect(shared.q_full, sizeof(shared.q) + sizeof(shared.d_o));
    for (int m = 0; m < OfShared::kBlocks; ++m) {
        const int row = tile.first_q + tile.query + m * kConfig.block_q;
        copy_in(shared.q[m], launch.q, row, tile.head, batch, shared.q_full, ptx::CacheHint::evict_first);
        copy_in(shared.d_o[m], launch.d_o, row, tile.head, batch, shared.q_full, ptx::CacheHint::evict_first);
    }
    RingPosition<OfShared::kKStages> k;
    RingPosition<OfShared::kVStages> v;
    for (int n = tile.n_begin; n < tile.n_end; ++n, k.advance(), v.advance()) {
        const int row = tile.first_kv + n * kConfig.block_kv;
        const int kv_head = tile.head / p.group;
        wait_for(shared.k_ring.empty[k.stage()], k.phase() ^ 1);
        ptx::mbarrier_arrive_expect(shared.k_ring.full[k.stage()], sizeof(shared.k[0]));
        copy_in(shared.k[k.stage()], launch.k, row, kv_head, batch, shared.k_ring.full[k.stage()],
                ptx::CacheHint::evict_last);
        wait_for(shared.v_ring.empty[v.stage()], v.phase() ^ 1);
        ptx::mbarrier_arrive_expect(shared.v_ring.full[v.stage()], sizeof(shared.v[0]));
        copy_in(shared.v[v.stage()], launch.v, row, kv_head, batch, shared.v_ring.full[v.stage()],
                ptx::CacheHint::evict_last);
    }
}

/// S = Q K^T or dP = dO V^T, started: [64 queries][kBlockKv].
template <class T, Config kConfig, int kDim>
__device__ __forceinline__ void start_product(float (&s)[kConfig.block_kv / 2], std::uint64_t queries,
                                              std::uint64_t keys) {
    constexpr int kBlockKv = kConfig.block_kv;
    constexpr int kQueryPanel = kConfig.block_q * kPanelRowBytes >> 4;
    constexpr int kKeyPanel = kBlockKv * kPanelRowBytes >> 4;
    ptx::warpgroup_fence_operand(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int column = 0; column < kDim; column += 16) {
        const int panel = column / kPanelColumns;
        const int step = column % kPanelColumns / 16 * kStepColumns;
        ptx::wgmma_ss<kBlockKv, T>(s, queries + panel * kQueryPanel + step, keys + panel * kKeyPanel + step,
                                   column > 0);
    }
    ptx::wgmma_commit();
}

template <class T, Config kConfig>
struct DeltaConsumer {
    static constexpr int kPairs = kConfig.block_kv / 2;  ///< scores of a thread

    const Launch& launch;
    DeltaShared<kConfig, false>& shared;
    const QueryTile<kConfig>& tile;
    int warpgroup;

    float minus_lse[2];  ///< in units of log2; of large rows, the largest score so far
    bool large[2];       ///< an fp32 number can't hold the logarithm of the sum beside the maximum
    float s[kPairs];
    float dp[kPairs];
    double sum[2] = {0, 0};      ///< of P; this thread's share
    double product[2] = {0, 0};  ///< of P dP
    float largest[2] = {0, 0};   ///< of |dP|, in fp16

    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    /// The thread's first row of the warpgroup's 64.
    __device__ __forceinline__ static int row() { return static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane() / 4; }
    /// Row r of the sequence.
    __device__ __forceinline__ int query(int r) const { return tile.query + 64 * warpgroup + row() + 8 * r; }

    __device__ __forceinline__ float of_row(const Rows& rows, int r) const {
        const int batch = launch.params.forward.cu_seqlens_q != nullptr ? 0 : tile.batch;
        return reinterpret_cast<const float*>(
            rows.data)[batch * rows.batch + tile.head * rows.head + (std::int64_t{tile.first_q} + query(r)) * rows.row];
    }
    __device__ __forceinline__ void run();
    __device__ __forceinline__ void apply_mask(float (&values)[kPairs], int first_key, float hidden) const;
    __device__ __forceinline__ void exponentiate();
    __device__ __forceinline__ void add_weights();
    __device__ __forceinline__ void add_products();
    __device__ __forceinline__ void store(bool some_nonfinite);
};

/// Values of pairs that are not visible become `hidden`.
template <class T, Config kConfig>
__device__ __forceinline__ void DeltaConsumer<T, kConfig>::apply_mask(float (&values)[kPairs], int first_key,
                                                                      float hidden) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int shift = first_key + 2 * (lane() % 4);
        const int first = query(r) + tile.blocks.low - shift;
        const int last = min(query(r) + tile.blocks.high, tile.blocks.len_kv - 1) - shift;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            if (row_of(i) == r && (column_of(i) < first || column_of(i) > last)) values[i] = hidden;
        }
    }
}

/// From scores to P. Of large rows, to weights beside the largest score so far, as the forward's online softmax does.
template <class T, Config kConfig>
__device__ __forceinline__ void DeltaConsumer<T, kConfig>::exponentiate() {
    if (__any_sync(kAllLanes, large[0] || large[1])) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float most = -INFINITY;
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                if (row_of(i) == r) most = fmaxf(most, __fmul_rn(s[i], launch.scale_log2));
            }
            most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
            most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
            if (!large[r]) continue;
            const float before = -minus_lse[r];
            most = fmaxf(most, before);
            minus_lse[r] = -most;
            const float rescale = most == -INFINITY ? 0.0F : ptx::exp2_approx(before - most);
            sum[r] *= rescale;
            product[r] *= rescale;
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                if (row_of(i) != r) continue;
                s[i] =
                    most == -INFINITY ? 0.0F : ptx::exp2_approx(__fadd_rn(__fmul_rn(s[i], launch.scale_log2), -most));
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        const float p = ptx::exp2_approx(fmaf(s[i], launch.scale_log2, minus_lse[row_of(i)]));
        s[i] = large[row_of(i)] ? s[i] : p;
    }
}

template <class T, Config kConfig>
__device__ __forceinline__ void DeltaConsumer<T, kConfig>::add_weights() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float weights[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < kPairs / 2; ++i) weights[i % 2] += s[i / 2 * 4 + 2 * r + i % 2];
        sum[r] += weights[0] + weights[1];
    }
}

template <class T, Config kConfig>
__device__ __forceinline__ void DeltaConsumer<T, kConfig>::add_products() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float products[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < kPairs / 2; ++i) {
            const int element = i / 2 * 4 + 2 * r + i % 2;
            products[i % 2] = fmaf(s[element], dp[element], products[i % 2]);
        }
        product[r] += products[0] + products[1];
    }
    if constexpr (kHeld<T>) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            // What the dropout has taken has no dP: times keep_scale, which may be 2^30, it would be the head's limit.
            const float of_pair = kConfig.general && s[i] == 0 ? 0.0F : fabsf(dp[i]);
            largest[row_of(i)] = fmaxf(largest[row_of(i)], of_pair);
        }
    }
}

template <class T, Config kConfig>
__device__ __forceinline__ void DeltaConsumer<T, kConfig>::run() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float lse = query(r) < tile.blocks.len_q ? of_row(launch.params.forward.lse, r) : -INFINITY;
        large[r] = fabsf(lse) > kOrdinaryLse && lse != -INFINITY;
        minus_lse[r] = lse == -INFINITY ? -INFINITY : large[r] ? INFINITY : -lse * kLog2E;
    }
    wait_for(shared.q_full, 0);
    const int thread = static_cast<int>(threadIdx.x) % 128;
    auto& q_panels = shared.q[64 * warpgroup / kConfig.block_q];
    auto& do_panels = shared.d_o[64 * warpgroup / kConfig.block_q];
    const int row_of_block = 64 * warpgroup % kConfig.block_q;
    bool some_nonfinite = false;
    for (auto& panel : q_panels)
        some_nonfinite |= any_nonfinite<T, 64 * kPanelRowBytes, 128>(panel[row_of_block], thread);
    for (auto& panel : do_panels)
        some_nonfinite |= any_nonfinite<T, 64 * kPanelRowBytes, 128>(panel[row_of_block], thread);
    const std::uint64_t q = uniform(row_descriptor(q_panels[0][row_of_block]));
    const std::uint64_t d_o = uniform(row_descriptor(do_panels[0][row_of_block]));
    const ForwardParams& params = launch.params.forward;
    const HeadScores<T> head(params, Sequence{0, 0, tile.blocks.len_q, tile.blocks.len_kv}, tile.batch, tile.head);
    RingPosition<kConfig.delta_stages()> at;
#pragma unroll 1
    for (int n = tile.n_begin; n < tile.n_end; ++n) {
        wait_for(shared.k_ring.full[at.stage()], at.phase());
        start_product<T, kConfig, kConfig.head_dim>(s, q, uniform(row_descriptor(shared.k[at.stage()])));
        wait_for(shared.v_ring.full[at.stage()], at.phase());
        start_product<T, kConfig, kConfig.head_dim_v>(dp, d_o, uniform(row_descriptor(shared.v[at.stage()])));
        ptx::wgmma_wait<1>();
        ptx::warpgroup_fence_operand(s);
        if (lane() == 0) at.release(shared.k_ring);
        const int first_key = n * kConfig.block_kv;
        const bool full = tile.blocks.full(tile.query + 64 * warpgroup, 64, first_key, kConfig.block_kv);
        const int first_column = 2 * (lane() % 4);
        if constexpr (kConfig.general) {
            auto& fragments = reinterpret_cast<float(&)[kPairs / 4][4]>(s);
            head.template transform<false>(fragments, Band32(Band{}), query(0), first_key + first_column);
        }
        if (!full) apply_mask(s, first_key, -INFINITY);
        exponentiate();
        add_weights();
        if constexpr (kConfig.general) {
            auto& fragments = reinterpret_cast<float(&)[kPairs / 4][4]>(s);
            if (head.drops()) head.drop(fragments, query(0), first_key + first_column, lane());
        }
        ptx::wgmma_wait<0>();
        ptx::warpgroup_fence_operand(dp);
        if (lane() == 0) at.release(shared.v_ring);
        at.advance();
        if (!full) apply_mask(dp, first_key, 0);
        add_products();
    }
    store(some_nonfinite);
}

template <class T, Config kConfig>
__device__ __forceinline__ void DeltaConsumer<T, kConfig>::store(bool some_nonfinite) {
    if (__any_sync(kAllLanes, some_nonfinite) && lane() == 0) shared.some_nonfinite[warpgroup] = 1;
    if (__any_sync(kAllLanes, large[0] || large[1]) && lane() == 0) shared.some_large[warpgroup] = 1;
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
    if (!tile.has_stats(warpgroup)) return;
    RowStats& stats = launch.workspace.stats[tile.first_block * kConfig.row_stats() + warpgroup];
    float limit = 0;  // over |dS| of the thread's rows
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        for (int mask = 1; mask <= 2; mask *= 2) {
            sum[r] += __shfl_xor_sync(kAllLanes, sum[r], mask);
            product[r] += __shfl_xor_sync(kAllLanes, product[r], mask);
            if constexpr (kHeld<T>) largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAllLanes, largest[r], mask));
        }
        if (lane() % 4 != 0 || (launch.o_residual.data != nullptr && !large[r])) continue;
        float delta = 0;
        if (minus_lse[r] != -INFINITY) {  // the row sees keys
            delta = static_cast<float>(product[r] / sum[r]) * launch.params.forward.keep_scale;
            if (launch.params.dlse.data != nullptr) delta -= of_row(launch.params.dlse, r);
            if (!isfinite(delta)) delta = NAN;  // of all keys that the row sees, whatever their dP is
        }
        const int place = RowStats::place(row() + 8 * r);
        stats.minus_lse[place] = minus_lse[r];
        stats.delta[place] = delta;
        stats.inverse_sum[place] = large[r] ? static_cast<float>(1 / sum[r]) : 0.0F;
        if constexpr (kHeld<T>) {  // P is held times a power of two
            if (large[r]) stats.inverse_sum[place] = static_cast<float>(kWeightUnit<T> / sum[r]);
            else stats.minus_lse[place] = minus_lse[r] + kWeightExponent<T>;
            const float own = fmaf(largest[r], launch.params.forward.keep_scale, fabsf(delta));
            if (minus_lse[r] != -INFINITY) limit = fmaxf(limit, finite_or_0(own));
        }
    }
    if constexpr (kHeld<T>) {
        if (launch.o_residual.data == nullptr) raise_limit(tile.limits(launch).sum, limit);
    }
    const int thread = static_cast<int>(threadIdx.x) % 128;
    if (thread == 0) {
        stats.some_large = shared.some_large[warpgroup];
        stats.some_nonfinite = shared.some_nonfinite[warpgroup];
    }
    if (thread == 0) clear_counters(launch, tile.first_block + tile.block_of(warpgroup));
}

template <class T, class Shape>
__global__ void __launch_bounds__(Config::kThreads, 1) delta_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<DeltaShared<kConfig, false>*>(memory);
    if (launch.o_residual.data != nullptr && launch.workspace.start->some_large == 0) return;
    if (threadIdx.x == 0) shared.tile = static_cast<int>(blockIdx.x);
#pragma unroll 1
    while (true) {
        __syncthreads();
        // Nothing is kept in registers over a tile.
        const int number = shared.tile;
        const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
        if (number >= query_tiles(launch.params.forward)) return;
        const QueryTile<kConfig> tile(launch, place_by_heads(launch, number));
        __syncthreads();
        if (thread == 0) shared.tile = number + static_cast<int>(gridDim.x);
        if (thread == 0 && falls(launch.params.forward, tile.batch)) launch.workspace.start->broken = 1;
        if (tile.query >= tile.blocks.len_q || done_from_output(launch, tile)) continue;
        if (thread == 0) {
            shared.init_barriers();
            for (int w = 0; w < Config::kConsumers; ++w) shared.some_nonfinite[w] = shared.some_large[w] = 0;
        }
        __syncthreads();
        const int warpgroup = thread / 128;
        if (warpgroup == 0) {
            ptx::setmaxnreg_dec<Config::kDeltaProducerRegisters>();
            if (thread == 0) load_for_queries(launch, shared, tile);
            ptx::setmaxnreg_inc<Config::kDeltaRegisters>();
        } else {
            ptx::setmaxnreg_inc<Config::kDeltaConsumerRegisters>();
            DeltaConsumer<T, kConfig>{launch, shared, tile, warpgroup - 1}.run();
            ptx::setmaxnreg_dec<Config::kDeltaRegisters>();
        }
        __syncthreads();
        if (ptx::opaque(static_cast<int>(threadIdx.x)) == 0) shared.end_barriers();
    }
}

template <class T, class Shape>
cudaError_t start_delta(const Launch& launch, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of config.h");
    constexpr int kBytes = sizeof(DeltaShared<Shape::kConfig, false>);
    static_assert(kBytes <= 227 * 1024);
    // With the residual of O it has nothing to do, but for rare rows: thread blocks for each tile would take 10 us to
    // start.
    const std::int64_t tiles = query_tiles(launch.params.forward);
    const std::int64_t blocks =
        launch.o_residual.data != nullptr ? std::min<std::int64_t>(tiles, launch.multiprocessors) : tiles;
    return start(delta_kernel<T, Shape>, blocks, Config::kThreads, kBytes, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
