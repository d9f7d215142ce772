// SPDX-License-Identifier: Apache-2.0
//
// dQ where the main kernel is split by roles: dQ = scale * dS K, queries outer, in registers. S and dP are multiplied
// once more for it; that costs less than adding dQ up in fp32 in the second-level cache did (README.md), and there is
// no order to wait for.
#pragma once

#include "cuda/fa3/backward/before/delta.cuh"
#include "cuda/fa3/backward/main/epilogue.cuh"

namespace tessera::cuda::fa3::backward {

/// A warpgroup: 64 queries.
template <class T, Config kConfig>
struct DqConsumer {
    static constexpr int kPairs = kConfig.block_kv / 2;  ///< scores of a thread

    const Launch& launch;
    DeltaShared<kConfig, true>& shared;
    const QueryTile<kConfig>& tile;
    int warpgroup;
    bool nonfinite_keys;  ///< NaN and infinities of K are to be taken out

    RingPosition<2> k{};
    RingPosition<kConfig.delta_stages()> v{};
    float minus_lse[2], delta[2], inverse_sum[2];  ///< RowStats of the thread's rows; delta times unit
    float unit = 1;                                ///< what dP is multiplied by for dS (score_gradient)
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
    __device__ __forceinline__ void wait_for_keys();
    __device__ __forceinline__ void skip(int count);
    __device__ __forceinline__ void exponentiate();
    __device__ __forceinline__ void make_ds(int n);
    __device__ __forceinline__ void multiply(Span keys);
    __device__ __forceinline__ void run();
    __device__ __forceinline__ void store();

    __device__ __forceinline__ void start_s() {
        start_product<T, kConfig, kConfig.head_dim>(s, uniform(row_descriptor(shared.q[warpgroup])),
                                                    uniform(row_descriptor(shared.k[k.stage()])));
    }
    __device__ __forceinline__ void start_dp() {
        start_product<T, kConfig, kConfig.head_dim_v>(dp, uniform(row_descriptor(shared.d_o[warpgroup])),
                                                      uniform(row_descriptor(shared.v[v.stage()])));
    }
    __device__ __forceinline__ void start_dq() {
        start_key_gradient<T, kConfig.head_dim, kConfig.block_kv>(
            dq, ds, uniform(column_descriptor(shared.k[k.stage()], kConfig.block_kv)));
    }
};

/// What is known of the thread's rows; rows past the end are without keys.
template <class T, Config kConfig>
__device__ __forceinline__ void DqConsumer<T, kConfig>::read_stats() {
    const RowStats& stats = launch.workspace.stats[tile.first_block + warpgroup];
    const bool exist = tile.has_stats(warpgroup);
    if constexpr (kHeld<T>) {
        unit = gradient_unit<T>(launch, tile.batch, tile.head / launch.params.forward.group, tile.share(launch)) /
               kWeightUnit<T>;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int place = RowStats::place(16 * warp() + lane() / 4 + 8 * r);
        minus_lse[r] = exist ? stats.minus_lse[place] : -INFINITY;
        delta[r] = exist ? stats.delta[place] : 0;
        if constexpr (kHeld<T>) delta[r] *= unit;
        inverse_sum[r] = exist ? stats.inverse_sum[place] : 0;
    }
}

/// Blocks of keys that the warpgroup's queries see.
template <class T, Config kConfig>
__device__ __forceinline__ Span DqConsumer<T, kConfig>::keys() const {
    static_assert(kConfig.block_q == Config::kRows);
    const int m = tile.query / kConfig.block_q + warpgroup;
    const Span span = m < tile.blocks.count_q ? tile.blocks.keys_of(m) : Span{0, 0};
    return span.begin < span.end ? span : Span{tile.n_begin, tile.n_begin};
}

/// The stage holds K. NaN and infinities become 0, as in the main kernel: both warpgroups do so, half of the rows each.
template <class T, Config kConfig>
__device__ __forceinline__ void DqConsumer<T, kConfig>::wait_for_keys() {
    wait_for(shared.k_ring.full[k.stage()], k.phase());
    if (!nonfinite_keys) return;
    constexpr int kKeys = kConfig.block_kv / Config::kConsumers;
    const int thread = static_cast<int>(threadIdx.x) % 128;
    for (auto& panel : shared.k[k.stage()]) clean<T, kKeys * kPanelRowBytes, 128>(panel[kKeys * warpgroup], thread);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kConsumersBarrier, 128 * Config::kConsumers);
}

/// Blocks that only the other warpgroup sees.
template <class T, Config kConfig>
__device__ __forceinline__ void DqConsumer<T, kConfig>::skip(int count) {
#pragma unroll 1
    for (; count > 0; --count, k.advance(), v.advance()) {
        wait_for_keys();
        wait_for(shared.v_ring.full[v.stage()], v.phase());
        __syncwarp();
        if (lane() == 0) {
            k.release(shared.k_ring);
            v.release(shared.v_ring);
        }
    }
}

/// P of S, which is there.
template <class T, Config kConfig>
__device__ __forceinline__ void DqConsumer<T, kConfig>::exponentiate() {
    ptx::warpgroup_fence_operand(s);
    if (agreed(inverse_sum[0] != 0 || inverse_sum[1] != 0)) {  // rare
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            s[i] = weight(s[i], launch.scale_log2, minus_lse[row_of(i)], inverse_sum[row_of(i)]);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) s[i] = ptx::exp2_approx(fmaf(s[i], launch.scale_log2, minus_lse[row_of(i)]));
}

/// dS of P and dP, which are there, against the keys of block n; into 16 bits.
template <class T, Config kConfig>
__device__ __forceinline__ void DqConsumer<T, kConfig>::make_ds(int n) {
    ptx::warpgroup_fence_operand(dp);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) dp[i] = score_gradient<T>(s[i], dp[i], delta[row_of(i)], unit);
    const Pairs& pairs = tile.blocks;
    const int key = n * kConfig.block_kv;
    const int last_query = min(first_query() + Config::kRows, pairs.len_q) - 1;  // rows past the end are not stored
    const bool full = key + kConfig.block_kv <= pairs.len_kv && key >= last_query + pairs.low &&
                      key + kConfig.block_kv - 1 <= first_query() + pairs.high;
    if (!full) {
        const int query = first_query() + 16 * warp() + lane() / 4;
        const int column = key + 2 * (lane() % 4);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const int from_query = column + column_of(i) - (query + 8 * row_of(i));
            const bool sees =
                from_query >= pairs.low && from_query <= pairs.high && column + column_of(i) < pairs.len_kv;
            if (!sees) dp[i] = 0;
        }
    }
#pragma unroll
    for (int i = 0; i < kPairs; i += 2) ds[i / 8][i / 2 % 4] = ptx::pack_finite<T>(dp[i], dp[i + 1]);
}

/// Over these blocks of keys, of which there are some.
template <class T, Config kConfig>
__device__ __forceinline__ void DqConsumer<T, kConfig>::multiply(Span keys) {
    wait_for_keys();
    start_s();
    wait_for(shared.v_ring.full[v.stage()], v.phase());
    start_dp();
    ptx::wgmma_wait<0>();  // with products under way here, ptxas would serialise those of the loop
    ptx::warpgroup_fence_operand(s);
    ptx::warpgroup_fence_operand(dp);
#pragma unroll 1
    for (int n = keys.begin; n < keys.end; ++n) {
        const bool last = n + 1 == keys.end;
        exponentiate();
        wait_for(shared.v_ring.full[v.stage()], v.phase());  // passed already: keeps the next wait behind (roles.cuh)
        ptx::wgmma_wait<0>();
        make_ds(n);
        if (lane() == 0) v.release(shared.v_ring);
        start_dq();
        const RingPosition<2> k_before = k;
        k.advance();
        v.advance();
        if (!last) wait_for_keys();
        start_s();  // of the next block; after the last, of whatever lies there
        if (!last) wait_for(shared.v_ring.full[v.stage()], v.phase());
        start_dp();
        ptx::wgmma_wait<1>();
        ptx::warpgroup_fence_operand(dq);
        ptx::warpgroup_fence_operand(ds);
        ptx::warpgroup_fence_operand(s);
        if (lane() == 0) k_before.release(shared.k_ring);
    }
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(s);
    ptx::warpgroup_fence_operand(dp);
}

template <class T, Config kConfig>
__device__ __forceinline__ void DqConsumer<T, kConfig>::run() {
    read_stats();
#pragma unroll
    for (float& element : dq) element = 0;
    wait_for(shared.q_full, 0);
    const Span own = keys();
    skip(own.begin - tile.n_begin);
    if (own.begin < own.end) multiply(own);
    skip(tile.n_end - own.end);
    store();
}

/// Through the shared memory of the warpgroup's own Q.
template <class T, Config kConfig>
__device__ __forceinline__ void DqConsumer<T, kConfig>::store() {
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);  // nobody multiplies from it any more
    const ForwardParams& p = launch.params.forward;
    const int query = first_query() + 16 * warp();
    const GradientRows to{launch.params.dq,
                          launch.dq,
                          launch.store_dq_by_tma,
                          p.cu_seqlens_q != nullptr ? 0 : tile.batch,
                          tile.head,
                          tile.first_q + query,
                          tile.blocks.len_q - query,
                          p.head_dim};
    const float factor = kHeld<T> ? p.scale / (unit * kWeightUnit<T>) : p.scale;
    PanelRows rows[kConfig.qk_panels()];
    set_rows(rows, shared.q[warpgroup], 16 * warp());
    store_gradient<T, kConfig.head_dim>(dq, factor, to, rows, lane());
    if (lane() == 0) ptx::tma_store_wait_read();
}

template <class T, class Shape>
__global__ void __launch_bounds__(Config::kThreads, 1) dq_product_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<DeltaShared<kConfig, true>*>(memory);
    const Start& start = *launch.workspace.start;
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();
    const QueryTile<kConfig> tile(launch, place_in_turn(launch));
    if (tile.query >= tile.blocks.len_q || start.broken != 0) return;
    const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);  // known to be uniform
    if (warpgroup == 0) {
        ptx::setmaxnreg_dec<Config::kProducerRegisters>();
        if (threadIdx.x == 0) load_for_queries(launch, shared, tile);
    } else {
        ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
        DqConsumer<T, kConfig>{launch, shared, tile, warpgroup - 1, launch.only_dq || start.nonfinite_keys != 0}.run();
    }
}

template <class T, class Shape>
cudaError_t start_dq_product(const Launch& launch, cudaStream_t stream) {
    static_assert(ShapesByRoles::kHas<Shape> && Shape::kConfig.roles(), "not in that list of config.h");
    constexpr int kBytes = sizeof(DeltaShared<Shape::kConfig, true>);
    static_assert(kBytes <= 227 * 1024);
    const ForwardParams& p = launch.params.forward;
    const std::int64_t tiles = (p.len_q + kDeltaBlockQ - 1) / kDeltaBlockQ;
    return start(dq_product_kernel<T, Shape>, p.batch * p.heads_q * tiles, Config::kThreads, kBytes, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
