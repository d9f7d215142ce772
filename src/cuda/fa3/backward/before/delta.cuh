// SPDX-License-Identifier: Apache-2.0
//
// Runs before the main kernel: RowStats with delta[i] = (sum over j of P dP) / (sum over j of P) - dLSE[i]. The outer
// loop is over queries. (delta = dO . O would need an O that is not rounded:
// docs/decisions/delta-of-rounded-output.md.)
#pragma once

#include <algorithm>
#include <cmath>

#include "cuda/fa3/backward/common/fp16_scale.cuh"
#include "cuda/fa3/backward/common/mma.cuh"
#include "cuda/fa3/backward/common/nonfinite.cuh"
#include "cuda/fa3/backward/common/pair.cuh"
#include "cuda/fa3/backward/common/query_outer.cuh"
#include "cuda/host/constants.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/head_bias.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/sink.cuh"

namespace tessera::cuda::fa3::backward {

template <class T, Config kConfig>
struct DeltaConsumer {
    static constexpr int kPairs = kConfig.block_kv / 2;  ///< scores of a thread

    const Launch& launch;
    QueryOuterShared<kConfig, false>& shared;
    const QueryTile<kConfig>& tile;
    int warpgroup;

    /// Factor from scores to units of log2.
    __device__ __forceinline__ float scale_log2() const {
        return kConfig.scores == Scores::plain ? launch.scale_log2 : float{kLog2E};
    }
    __device__ __forceinline__ float scale_natural() const {
        return kConfig.scores == Scores::plain ? launch.params.forward.scale : 1.0F;
    }

    float minus_lse[2];  ///< as in RowStats; in rows with a large |LSE|, of the scores so far
    bool large[2];       ///< the row has a large |LSE|
    float s[kPairs];
    float dp[kPairs];
    double sum_p[2] = {0, 0};     ///< sum of P over this thread's pairs of a row
    double sum_p_dp[2] = {0, 0};  ///< sum of P dP over the same pairs
    float max_dp[2] = {0, 0};     ///< fp16: the largest |dP|

    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    /// The thread's first row of the warpgroup's 64.
    __device__ __forceinline__ static int row() { return static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane() / 4; }
    /// The query of row r in the sequence.
    __device__ __forceinline__ int query(int r) const { return tile.query + 64 * warpgroup + row() + 8 * r; }

    __device__ __forceinline__ float of_row(const Rows& rows, int r) const {
        const int batch = launch.params.forward.cu_seqlens_q != nullptr ? 0 : tile.batch;
        return reinterpret_cast<const float*>(
            rows.data)[batch * rows.batch + tile.head * rows.head + (std::int64_t{tile.first_q} + query(r)) * rows.row];
    }
    __device__ __forceinline__ void run();
    __device__ __forceinline__ void apply_mask(float (&values)[kPairs], int first_key, float masked) const;
    __device__ __forceinline__ void add_bias(int key);
    __device__ __forceinline__ void exponentiate();
    __device__ __forceinline__ void add_p();
    __device__ __forceinline__ void add_p_dp();
    __device__ __forceinline__ void store(bool some_nonfinite);
};

/// Sets masked pairs to `masked`.
template <class T, Config kConfig>
__device__ __forceinline__ void DeltaConsumer<T, kConfig>::apply_mask(float (&values)[kPairs], int first_key,
                                                                      float masked) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int shift = first_key + 2 * (lane() % 4);
        const int first = query(r) + tile.schedule.low - shift;
        const int last = min(query(r) + tile.schedule.high, tile.schedule.last_key) - shift;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            if (row_of(i) == r && (column_of(i) < first || column_of(i) > last)) values[i] = masked;
        }
    }
}

/// Turns elements of Q K^T into scores with a bias, rounded as the main kernel rounds them. `key`: the thread's first.
template <class T, Config kConfig>
__device__ __forceinline__ void DeltaConsumer<T, kConfig>::add_bias(int key) {
    const ForwardParams& p = launch.params.forward;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        const char* const row = bias_row(p.bias, tile.batch, tile.head, min(query(row_of(i)), p.len_q - 1));
        dp[i] = bias_element<T>(p.bias, row, min(key + column_of(i), p.len_kv - 1));
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) s[i] = fmaf(s[i], p.scale, dp[i]);
}

/// Turns scores into P; in large rows into exp(score - the largest score so far), as the forward's online softmax does.
template <class T, Config kConfig>
__device__ __forceinline__ void DeltaConsumer<T, kConfig>::exponentiate() {
    if (any_lane(large[0] || large[1])) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float most = -INFINITY;
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                if (row_of(i) == r) most = fmaxf(most, __fmul_rn(s[i], scale_natural()));
            }
            most = quad_max(most);
            if (!large[r]) continue;
            const float before = -minus_lse[r];
            most = fmaxf(most, before);
            minus_lse[r] = -most;
            const float rescale = most == -INFINITY ? 0.0F : ptx::exp2_approx(exponent_beside(before, -most));
            sum_p[r] *= rescale;
            sum_p_dp[r] *= rescale;
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                if (row_of(i) != r) continue;
                const float score = __fmul_rn(s[i], scale_natural());
                s[i] = most == -INFINITY ? 0.0F : ptx::exp2_approx(exponent_beside(score, -most));
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        const float p = ptx::exp2_approx(fmaf(s[i], scale_log2(), minus_lse[row_of(i)]));
        s[i] = large[row_of(i)] ? s[i] : p;
    }
}

template <class T, Config kConfig>
__device__ __forceinline__ void DeltaConsumer<T, kConfig>::add_p() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sums[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < kPairs / 2; ++i) sums[i % 2] += s[i / 2 * 4 + 2 * r + i % 2];
        sum_p[r] += sums[0] + sums[1];
    }
}

template <class T, Config kConfig>
__device__ __forceinline__ void DeltaConsumer<T, kConfig>::add_p_dp() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sums[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < kPairs / 2; ++i) {
            const int element = i / 2 * 4 + 2 * r + i % 2;
            sums[i % 2] = fmaf(s[element], dp[element], sums[i % 2]);
        }
        sum_p_dp[r] += sums[0] + sums[1];
    }
    if constexpr (kFp16Scaled<T>) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            // Ignore dropped pairs: dP * keep_scale (up to 2^30) would blow up the bound of the head split.
            const float of_pair = kConfig.scores != Scores::plain && s[i] == 0 ? 0.0F : fabsf(dp[i]);
            max_dp[row_of(i)] = fmaxf(max_dp[row_of(i)], of_pair);
        }
    }
}

template <class T, Config kConfig>
__device__ __forceinline__ void DeltaConsumer<T, kConfig>::run() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float lse = query(r) < tile.schedule.len_q ? of_row(launch.params.forward.lse, r) : -INFINITY;
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
    const HeadScores<T> head(params, Sequence{0, 0, tile.schedule.len_q, tile.schedule.len_kv()}, tile.batch,
                             tile.head);
    PipelineState<kConfig.delta_stages()> at;
#pragma unroll 1
    for (int n = tile.n_begin; n < tile.n_end; ++n) {
        wait_for(shared.k_ring.full[at.index()], at.phase());
        start_query_scores<T, kConfig, kConfig.head_dim>(s, q, uniform(row_descriptor(shared.k[at.index()])));
        wait_for(shared.v_ring.full[at.index()], at.phase());
        const auto start_dp = [&] {
            start_query_scores<T, kConfig, kConfig.head_dim_v>(dp, d_o, uniform(row_descriptor(shared.v[at.index()])));
        };
        constexpr bool kHasBias = kConfig.scores == Scores::bias;  // it is added in the registers of dP
        if constexpr (!kHasBias) start_dp();
        ptx::wgmma_wait<kHasBias ? 0 : 1>();
        ptx::warpgroup_fence_operand(s);
        if (lane() == 0) shared.k_ring.consumer_release(at);
        const int first_key = n * kConfig.block_kv;
        const bool full = tile.schedule.unmasked(tile.query + 64 * warpgroup, 64, first_key, kConfig.block_kv);
        const int first_column = 2 * (lane() % 4);
        if constexpr (kHasBias) {
            add_bias(first_key + first_column);
        } else if constexpr (kConfig.scores != Scores::plain) {
            auto& fragments = reinterpret_cast<float(&)[kPairs / 4][4]>(s);
            const int first = first_key + first_column;
            if (kConfig.scores != Scores::general || head.bias == nullptr) {
                head.template transform<false>(fragments, Band32(Band{}), query(0), first);
            } else {  // hidden keys may have no bias
                const Band32 band(tile.schedule.low, tile.schedule.high, tile.schedule.last_key);
                head.template transform<true>(fragments, band, query(0), first);
            }
        }
        if (!full) apply_mask(s, first_key, -INFINITY);
        exponentiate();
        add_p();
        if constexpr (kConfig.scores != Scores::plain && !kHasBias) {
            auto& fragments = reinterpret_cast<float(&)[kPairs / 4][4]>(s);
            if (head.drops()) head.drop(fragments, query(0), first_key + first_column, lane());
        }
        if constexpr (kHasBias) start_dp();
        ptx::wgmma_wait<0>();
        ptx::warpgroup_fence_operand(dp);
        if (lane() == 0) shared.v_ring.consumer_release(at);
        at.advance();
        if (!full) apply_mask(dp, first_key, 0);
        add_p_dp();
    }
    store(some_nonfinite);
}

template <class T, Config kConfig>
__device__ __forceinline__ void DeltaConsumer<T, kConfig>::store(bool some_nonfinite) {
    if (any_lane(some_nonfinite) && lane() == 0) shared.some_nonfinite[warpgroup] = 1;
    if (any_lane(large[0] || large[1]) && lane() == 0) shared.some_large[warpgroup] = 1;
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
    if (!tile.has_stats(warpgroup)) return;
    RowStats& stats = launch.workspace.stats[tile.first_block * kConfig.row_stats() + warpgroup];
    float bound = 0;  // fp16: for |dS| of the thread's rows
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        for (int mask = 1; mask <= 2; mask *= 2) {
            sum_p[r] += __shfl_xor_sync(kAllLanes, sum_p[r], mask);
            sum_p_dp[r] += __shfl_xor_sync(kAllLanes, sum_p_dp[r], mask);
            if constexpr (kFp16Scaled<T>) max_dp[r] = fmaxf(max_dp[r], __shfl_xor_sync(kAllLanes, max_dp[r], mask));
        }
        // The sink has a part of the sum of P, and its dP is 0. Far above the scores, in rows with a large |LSE|, its
        // part is cut: with an infinite sum inverse_sum would be 0, which marks other rows.
        constexpr float kMostOfSink = 100;
        const float sink = sink_of(launch.params.forward, tile.head);
        const float of_sink = large[r] ? exponent_beside(sink, minus_lse[r]) : fmaf(sink, kLog2E, minus_lse[r]);
        sum_p[r] += ptx::exp2_approx(of_sink > kMostOfSink ? kMostOfSink : of_sink);
        if (lane() % 4 != 0 || (launch.output.residual.data != nullptr && !large[r])) continue;
        float delta = 0;
        if (minus_lse[r] != -INFINITY) {  // the row sees keys
            delta = static_cast<float>(sum_p_dp[r] / sum_p[r]) * launch.params.forward.keep_scale;
            if (launch.params.dlse.data != nullptr) delta -= of_row(launch.params.dlse, r);
            if (!isfinite(delta)) delta = NAN;  // makes dS NaN for all keys that the row sees, whatever their dP
        }
        const int slot = RowStats::slot(row() + 8 * r);
        stats.minus_lse[slot] = minus_lse[r];
        stats.delta[slot] = delta;
        stats.inverse_sum[slot] = large[r] ? static_cast<float>(1 / sum_p[r]) : 0.0F;
        if constexpr (kFp16Scaled<T>) {  // P times kPScale
            if (large[r]) stats.inverse_sum[slot] = static_cast<float>(kPScale<T> / sum_p[r]);
            else stats.minus_lse[slot] = minus_lse[r] + kPScaleExponent<T>;
            const float own = fmaf(max_dp[r], launch.params.forward.keep_scale, fabsf(delta));
            if (minus_lse[r] != -INFINITY) bound = fmaxf(bound, finite_or_0(own));
        }
    }
    if constexpr (kFp16Scaled<T>) {
        if (launch.output.residual.data == nullptr) raise_bound(tile.ds_bounds(launch).addend, bound);
    }
    const int thread = static_cast<int>(threadIdx.x) % 128;
    if (thread == 0) {
        stats.some_large = shared.some_large[warpgroup];
        stats.some_nonfinite = shared.some_nonfinite[warpgroup];
        stats.slope = launch.params.forward.alibi_slope(tile.batch, tile.head);
    }
    if (thread == 0) clear_dq_semaphores(launch, tile.first_block + tile.block_of(warpgroup));
}

/// With o_residual: are there no large rows in this tile?
template <Config kConfig>
__device__ __forceinline__ bool delta_is_done(const Launch& launch, const QueryTile<kConfig>& tile) {
    if (launch.output.residual.data == nullptr) return false;
    for (int w = 0; w < Config::kConsumers; ++w) {
        if (!tile.has_stats(w)) continue;
        if (launch.workspace.stats[tile.first_block * kConfig.row_stats() + w].some_large != 0) return false;
    }
    return true;
}

template <class T, class Shape>
__global__ void __launch_bounds__(Config::kThreads, 1) delta_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<QueryOuterShared<kConfig, false>*>(memory);
    if (launch.output.residual.data != nullptr && launch.workspace.state->some_large == 0) return;
    if (threadIdx.x == 0) shared.tile = static_cast<int>(blockIdx.x);
#pragma unroll 1
    while (true) {
        __syncthreads();
        // During a tile only its number is kept, in shared memory; more values would spill.
        const int number = shared.tile;
        const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
        if (number >= query_tile_count(launch)) return;
        const QueryTile<kConfig> tile(launch, tile_by_head(launch, number));
        __syncthreads();
        if (thread == 0) shared.tile = number + static_cast<int>(gridDim.x);
        if (!tile.exists() || delta_is_done(launch, tile)) continue;
        if (thread == 0) {
            shared.init_barriers();
            for (int w = 0; w < Config::kConsumers; ++w) shared.some_nonfinite[w] = shared.some_large[w] = 0;
        }
        __syncthreads();
        const int warpgroup = thread / 128;
        if (warpgroup == 0) {
            ptx::setmaxnreg_dec<Config::kDeltaProducerRegisters>();
            if (thread == 0) load_query_tile(launch, shared, tile);
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
cudaError_t launch_delta(const Launch& launch, cudaStream_t stream) {
    static_assert(DeltaShapes::kHas<Shape>, "not in that list of backward_config.h");
    constexpr int kBytes = sizeof(QueryOuterShared<Shape::kConfig, false>);
    static_assert(kBytes <= 227 * 1024);
    // With o_residual only large rows are left, which are rare. A CTA for each tile would take 10 us to start
    // (head_dim 64, 4,096 tiles).
    const std::int64_t tiles = query_tile_count(launch);
    const std::int64_t ctas =
        launch.output.residual.data != nullptr ? std::min<std::int64_t>(tiles, launch.multiprocessors) : tiles;
    return start(delta_kernel<T, Shape>, ctas, Config::kThreads, kBytes, launch, stream);
}

}  // namespace tessera::cuda::fa3::backward
