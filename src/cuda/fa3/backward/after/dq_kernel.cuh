// SPDX-License-Identifier: Apache-2.0
//
// Runs after the main kernel at head_dim over 128: dQ = scale * dS K in registers, with the outer loop over queries. S
// and dP are recomputed for it. That costs less than adding dQ up in fp32 in the L2 cache (TRIED.md), and no CTA waits
// for another one.
#pragma once

#include "cuda/fa3/backward/common/mma.cuh"
#include "cuda/fa3/backward/common/nonfinite.cuh"
#include "cuda/fa3/backward/common/pair.cuh"
#include "cuda/fa3/backward/common/query_outer.cuh"
#include "cuda/fa3/backward/common/store_gradient.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::fa3::backward {

/// A warpgroup: 64 queries of the tile.
template <class T, Config kConfig>
struct DqTileConsumer {
    static constexpr int kPairs = kConfig.block_kv / 2;  ///< scores of a thread

    const Launch& launch;
    QueryOuterShared<kConfig, true>& shared;
    const QueryTile<kConfig>& tile;
    int warpgroup;
    bool nonfinite_keys;  ///< K may hold NaN or infinities, which are to be set to 0 for dQ

    PipelineState<2> k{};
    PipelineState<kConfig.delta_stages()> v{};
    float minus_lse[2], delta[2], inverse_sum[2];  ///< RowStats of the thread's rows; delta times ds_factor
    float ds_factor = 1;                           ///< what dP is multiplied by for dS (score_gradient)
    float dq[kConfig.head_dim / 2];                ///< [64 queries][head_dim]
    float s[kPairs];                               ///< S, then P: [64 queries][64 keys]
    float dp[kPairs];                              ///< dP, then dS
    std::uint32_t ds[kConfig.block_kv / 16][4];    ///< dS in 16 bits

    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) % 128 / 32; }
    /// The warpgroup's first query.
    __device__ __forceinline__ int first_query() const { return tile.query + Config::kRows * warpgroup; }

    __device__ __forceinline__ void read_stats();
    __device__ __forceinline__ Span keys() const;
    __device__ __forceinline__ void wait_for_keys() { wait_for(shared.k_ring.full[k.index()], k.phase()); }
    __device__ __forceinline__ void zero_nonfinite_keys();
    __device__ __forceinline__ void skip(int count);
    __device__ __forceinline__ void exponentiate();
    __device__ __forceinline__ void make_ds(int n);
    __device__ __forceinline__ void loop(Span keys);
    __device__ __forceinline__ void run();
    __device__ __forceinline__ void store();

    __device__ __forceinline__ void start_s() {
        start_query_scores<T, kConfig, kConfig.head_dim>(s, uniform(row_descriptor(shared.q[warpgroup])),
                                                         uniform(row_descriptor(shared.k[k.index()])));
    }
    __device__ __forceinline__ void start_dp() {
        start_query_scores<T, kConfig, kConfig.head_dim_v>(dp, uniform(row_descriptor(shared.d_o[warpgroup])),
                                                           uniform(row_descriptor(shared.v[v.index()])));
    }
    __device__ __forceinline__ void start_dq() {
        start_gradient<T, kConfig.head_dim, kConfig.block_kv>(
            dq, ds, uniform(column_descriptor(shared.k[k.index()], kConfig.block_kv)));
    }
};

/// Reads the RowStats of the thread's rows; rows past the end are rows without keys.
template <class T, Config kConfig>
__device__ __forceinline__ void DqTileConsumer<T, kConfig>::read_stats() {
    const RowStats& stats = launch.workspace.stats[tile.first_block + warpgroup];
    const bool exist = tile.has_stats(warpgroup);
    if constexpr (kFp16Scaled<T>) {
        ds_factor =
            ds_scale<T>(launch, tile.batch, tile.head / launch.params.forward.group, tile.split(launch)) / kPScale<T>;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int slot = RowStats::slot(16 * warp() + lane() / 4 + 8 * r);
        minus_lse[r] = exist ? stats.minus_lse[slot] : -INFINITY;
        delta[r] = exist ? stats.delta[slot] : 0;
        if constexpr (kFp16Scaled<T>) delta[r] *= ds_factor;
        inverse_sum[r] = exist ? stats.inverse_sum[slot] : 0;
    }
}

/// Key blocks that the warpgroup's queries see.
template <class T, Config kConfig>
__device__ __forceinline__ Span DqTileConsumer<T, kConfig>::keys() const {
    static_assert(kConfig.block_q == Config::kRows);
    const int m = tile.query / kConfig.block_q + warpgroup;
    const Span span = m < tile.schedule.count_q ? tile.schedule.key_blocks_of(m) : Span{0, 0};
    return span.begin < span.end ? span : Span{tile.n_begin, tile.n_begin};
}

/// Sets NaN and infinities of K to 0, half of the rows in each warpgroup, when both have computed S from it.
template <class T, Config kConfig>
__device__ __forceinline__ void DqTileConsumer<T, kConfig>::zero_nonfinite_keys() {
    if (!nonfinite_keys) return;
    constexpr int kKeys = kConfig.block_kv / Config::kConsumers;
    constexpr int kThreads = 128 * Config::kConsumers;
    const int thread = static_cast<int>(threadIdx.x) % 128;
    bool found = false;
    for (const auto& panel : shared.k[k.index()])
        found |= any_nonfinite<T, kKeys * kPanelRowBytes, 128>(panel[kKeys * warpgroup], thread);
    if (!any_lane(ptx::named_barrier_any(kConsumersBarrier, kThreads, found))) return;
    if (thread == 0) shared.some_nonfinite[warpgroup] = 1;
    for (auto& panel : shared.k[k.index()])
        zero_nonfinite<T, kKeys * kPanelRowBytes, 128>(panel[kKeys * warpgroup], thread);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kConsumersBarrier, kThreads);
}

/// Releases key blocks that only the other warpgroup sees.
template <class T, Config kConfig>
__device__ __forceinline__ void DqTileConsumer<T, kConfig>::skip(int count) {
#pragma unroll 1
    for (; count > 0; --count, k.advance(), v.advance()) {
        wait_for_keys();
        zero_nonfinite_keys();
        wait_for(shared.v_ring.full[v.index()], v.phase());
        __syncwarp();
        if (lane() == 0) {
            shared.k_ring.consumer_release(k);
            shared.v_ring.consumer_release(v);
        }
    }
}

/// Computes P from S, which is complete.
template <class T, Config kConfig>
__device__ __forceinline__ void DqTileConsumer<T, kConfig>::exponentiate() {
    ptx::warpgroup_fence_operand(s);
    if (any_lane(inverse_sum[0] != 0 || inverse_sum[1] != 0)) {  // rare
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            s[i] = probability<kConfig.scores>(s[i], launch, minus_lse[row_of(i)], inverse_sum[row_of(i)]);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) s[i] = ptx::exp2_approx(fmaf(s[i], launch.scale_log2, minus_lse[row_of(i)]));
}

/// Computes dS in 16 bits for key block n, from P and dP, which are complete.
template <class T, Config kConfig>
__device__ __forceinline__ void DqTileConsumer<T, kConfig>::make_ds(int n) {
    ptx::warpgroup_fence_operand(dp);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) dp[i] = score_gradient<T>(s[i], dp[i], delta[row_of(i)], ds_factor);
    const SequenceSchedule& sequence = tile.schedule;
    const int len_kv = sequence.len_kv();
    const int key = n * kConfig.block_kv;
    const int last_query = min(first_query() + Config::kRows, sequence.len_q) - 1;  // rows past the end are not stored
    const bool full = key + kConfig.block_kv <= len_kv && key >= last_query + sequence.low &&
                      key + kConfig.block_kv - 1 <= first_query() + sequence.high;
    if (!full) {
        const int query = first_query() + 16 * warp() + lane() / 4;
        const int column = key + 2 * (lane() % 4);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const int from_query = column + column_of(i) - (query + 8 * row_of(i));
            const bool sees =
                from_query >= sequence.low && from_query <= sequence.high && column + column_of(i) < len_kv;
            if (!sees) dp[i] = 0;
        }
    }
#pragma unroll
    for (int i = 0; i < kPairs; i += 2) ds[i / 8][i / 2 % 4] = ptx::pack_finite<T>(dp[i], dp[i + 1]);
}

/// The loop over these key blocks, of which there is one at least.
template <class T, Config kConfig>
__device__ __forceinline__ void DqTileConsumer<T, kConfig>::loop(Span keys) {
    wait_for_keys();
    start_s();
    wait_for(shared.v_ring.full[v.index()], v.phase());
    start_dp();
    ptx::wgmma_wait<0>();  // with MMAs under way here, ptxas would serialize those of the loop
    ptx::warpgroup_fence_operand(s);
    ptx::warpgroup_fence_operand(dp);
#pragma unroll 1
    for (int n = keys.begin; n < keys.end; ++n) {
        const bool last = n + 1 == keys.end;
        exponentiate();
        wait_for(shared.v_ring.full[v.index()], v.phase());  // returns at once; see mainloop_wide.cuh
        ptx::wgmma_wait<0>();
        make_ds(n);
        if (lane() == 0) shared.v_ring.consumer_release(v);
        zero_nonfinite_keys();
        start_dq();
        const PipelineState<2> last_k = k;
        k.advance();
        v.advance();
        if (!last) wait_for_keys();
        start_s();  // for the next block; after the last one it reads stale data
        if (!last) wait_for(shared.v_ring.full[v.index()], v.phase());
        start_dp();
        ptx::wgmma_wait<1>();
        ptx::warpgroup_fence_operand(dq);
        ptx::warpgroup_fence_operand(ds);
        ptx::warpgroup_fence_operand(s);
        if (lane() == 0) shared.k_ring.consumer_release(last_k);
    }
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(s);
    ptx::warpgroup_fence_operand(dp);
}

template <class T, Config kConfig>
__device__ __forceinline__ void DqTileConsumer<T, kConfig>::run() {
    read_stats();
#pragma unroll
    for (float& element : dq) element = 0;
    wait_for(shared.q_full, 0);
    const Span own = keys();
    skip(own.begin - tile.n_begin);
    if (own.begin < own.end) loop(own);
    skip(tile.n_end - own.end);
    store();
}

/// Stores dQ through the shared memory of the warpgroup's Q.
template <class T, Config kConfig>
__device__ __forceinline__ void DqTileConsumer<T, kConfig>::store() {
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);  // no warp reads Q any more
    const ForwardParams& p = launch.params.forward;
    const int query = first_query() + 16 * warp();
    const GradientRows to{
        launch.params.dq, launch.maps.dq,       launch.gradients.tma_dq,     p.cu_seqlens_q != nullptr ? 0 : tile.batch,
        tile.head,        tile.first_q + query, tile.schedule.len_q - query, p.head_dim};
    const float factor = kFp16Scaled<T> ? p.scale / (ds_factor * kPScale<T>) : p.scale;
    PanelRows rows[kConfig.qk_panels()];
    set_rows(rows, shared.q[warpgroup], 16 * warp());
    store_gradient<T, kConfig.head_dim>(dq, factor, to, rows, lane());
    if (lane() == 0) ptx::tma_store_wait_read();
    if (!nonfinite_keys || !any_lane(shared.some_nonfinite[warpgroup] != 0) || to.rows.data == nullptr) return;
    if (lane() == 0) ptx::tma_store_wait();
    __syncwarp();
    const DqPart part{to.batch, to.head, tile.first_q, tile.first_kv, query, 16, 0, kConfig.head_dim};
    store_nan_of_keys<T>(launch, tile.schedule, part, lane(), 32);
}

template <class T, class Shape>
__global__ void __launch_bounds__(Config::kThreads, 1) dq_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<QueryOuterShared<kConfig, true>*>(memory);
    const CallState& state = *launch.workspace.state;
    if (threadIdx.x == 0) {
        shared.init_barriers();
        for (int& some : shared.some_nonfinite) some = 0;
    }
    __syncthreads();
    const QueryTile<kConfig> tile(launch, launch.query_tiles.decode(static_cast<int>(blockIdx.x)));
    if (!tile.exists() || state.cu_seqlens_decreased != 0) return;
    const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
    if (warpgroup == 0) {
        ptx::setmaxnreg_dec<Config::kProducerRegisters>();
        if (threadIdx.x == 0) load_query_tile(launch, shared, tile);
    } else {
        ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
        DqTileConsumer<T, kConfig>{launch, shared, tile, warpgroup - 1,
                                   launch.gradients.only_dq || state.nonfinite_keys != 0}
            .run();
    }
}

template <class T, class Shape>
cudaError_t launch_dq_kernel(const Launch& launch, cudaStream_t stream) {
    static_assert(ShapesSplitDvDk::kHas<Shape> && Shape::kConfig.splits_dv_dk(),
                  "not in that list of backward_config.h");
    constexpr int kBytes = sizeof(QueryOuterShared<Shape::kConfig, true>);
    static_assert(kBytes <= 227 * 1024);
    return start(dq_kernel<T, Shape>, query_tile_count(launch), Config::kThreads, kBytes, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
