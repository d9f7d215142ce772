// SPDX-License-Identifier: Apache-2.0
//
// The main loop of a consumer warpgroup: 64 keys, over the blocks of queries that see them.
#pragma once

#include "cuda/fa3/backward/elements.cuh"
#include "cuda/fa3/backward/features.cuh"
#include "cuda/fa3/backward/products.cuh"
#include "cuda/fa3/backward/special.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/tma.cuh"

namespace tessera::cuda::fa3::backward {

/// The same condition in all lanes, known to the compiler as such.
__device__ __forceinline__ bool agreed(bool condition) { return __any_sync(kAllLanes, condition); }

template <class T, Config kConfig>
struct Consumer {
    static constexpr int kPairs = Config::kBlockQ / 2;  ///< scores of a thread

    const Launch& launch;
    Shared<kConfig>& shared;
    int warpgroup;  ///< 0, 1

    Turn<kConfig.q_stages> q{};
    std::uint32_t steps = 0;  ///< that are done
    std::uint32_t kept = 0;   ///< by dropout: a bit for each of the thread's pairs

    float dk[kConfig.head_dim / 2];             ///< [64 keys][head_dim]
    float dv[kConfig.head_dim_v / 2];           ///< [64 keys][head_dim_v]
    float s[kPairs];                            ///< S^T, then P^T: [64 keys][kBlockQ]
    float dp[kPairs];                           ///< dP^T, then dS^T
    std::uint32_t p[Config::kBlockQ / 16][4];   ///< P^T in 16 bits
    std::uint32_t ds[Config::kBlockQ / 16][4];  ///< dS^T in 16 bits
    float dq[kConfig.dq_columns() / 2];         ///< [kBlockQ][dq_columns]

    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    /// The warp's number in the warpgroup; the producer's warps come before the consumers'.
    __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / 32 % 4; }
    /// The thread's first row of the block's keys.
    __device__ __forceinline__ int row() const { return 64 * warpgroup + 16 * warp() + lane() / 4; }

    /// The thread's first column of a tile.
    __device__ __forceinline__ static int first_column() { return 2 * (lane() % 4); }
    /// The step's first query.
    __device__ __forceinline__ int first_query() const { return shared.block_q[q.stage] * Config::kBlockQ; }
    /// Are all pairs of this warpgroup visible in a step?
    __device__ __forceinline__ bool is_full() const {
        return agreed(shared.block.blocks.full(first_query(), Config::kBlockQ,
                                               shared.block.n * Config::kBlockKv + 64 * warpgroup, 64));
    }

    __device__ __forceinline__ void run();
    __device__ __forceinline__ void make_ds(int q_before);
    __device__ __forceinline__ void exponentiate();
    __device__ __forceinline__ void exponentiate_with_features();
    __device__ __forceinline__ void clean_keys();
    __device__ __forceinline__ void clean_queries();
    template <bool kMasked>
    __device__ __forceinline__ void score_gradients();
    __device__ __forceinline__ void store_ds();
    __device__ __forceinline__ void store_dq();

    __device__ __forceinline__ std::uint64_t k_operand() const {
        return uniform(row_descriptor(&shared.k[0][64 * warpgroup]));
    }
    __device__ __forceinline__ std::uint64_t v_operand() const {
        return uniform(row_descriptor(&shared.v[0][64 * warpgroup]));
    }
    /// K as the second factor of dQ: this warpgroup's columns.
    __device__ __forceinline__ std::uint64_t k_columns() const {
        constexpr int kColumns = kConfig.dq_columns();
        const int column = kColumns * warpgroup;
        return uniform(column_descriptor(&shared.k[column / kSlabColumns][0][column % kSlabColumns], Config::kBlockKv));
    }
    __device__ __forceinline__ void start_s() {
        start_scores<T, kConfig.head_dim>(s, k_operand(), uniform(row_descriptor(shared.q[q.stage])));
    }
    __device__ __forceinline__ void start_dp() {
        wait_for(shared.do_ring.full[steps % 2], steps / 2 % 2);
        start_scores<T, kConfig.head_dim_v>(dp, v_operand(), uniform(row_descriptor(shared.d_o[steps % 2])));
    }
    __device__ __forceinline__ void start_dv() {
        start_key_gradient<T, kConfig.head_dim_v>(dv, p,
                                                  uniform(column_descriptor(shared.d_o[steps % 2], Config::kBlockQ)));
    }
    __device__ __forceinline__ void start_dk(int q_stage) {
        start_key_gradient<T, kConfig.head_dim>(dk, ds, uniform(column_descriptor(shared.q[q_stage], Config::kBlockQ)));
    }
    __device__ __forceinline__ void start_dq() {
        backward::start_dq<T, kConfig.dq_columns()>(dq, uniform(row_descriptor(shared.ds[steps % 2])), k_columns());
    }
    /// One arrival of the warp, when all its lanes are here.
    __device__ __forceinline__ static void arrive(ptx::Mbarrier& barrier) {
        __syncwarp();
        if (lane() == 0) ptx::mbarrier_arrive(barrier);
    }
};

/// P of a score (scaled by scale_log2, to units of log2) of a column: of queries whose LSE is large, from the largest
/// score and the sum.
__device__ __forceinline__ float weight(float score, float scale_log2, const RowStats& stats, int column) {
    const float inverse_sum = stats.inverse_sum[column];
    const float minus_lse = stats.minus_lse[column];
    const float ordinary = fmaf(score, scale_log2, minus_lse);
    const float beside_most = __fadd_rn(__fmul_rn(score, scale_log2), minus_lse);
    return ptx::exp2_approx(inverse_sum == 0 ? ordinary : beside_most) * (inverse_sum == 0 ? 1.0F : inverse_sum);
}

/// P^T from S^T.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::exponentiate() {
    const RowStats& stats = shared.stats[q.stage];
    if (agreed(stats.some_large != 0)) {  // rare
#pragma unroll
        for (int i = 0; i < kPairs; ++i) s[i] = weight(s[i], launch.scale_log2, stats, column_of(i) + first_column());
        return;
    }
#pragma unroll
    for (int j = 0; j < kPairs / 4; ++j) {
        const auto pair = reinterpret_cast<const float2&>(stats.minus_lse[8 * j + first_column()]);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) {
            s[i] = ptx::exp2_approx(fmaf(s[i], launch.scale_log2, i % 2 == 0 ? pair.x : pair.y));
        }
    }
}

/// P^T in 16 bits from S^T, with dropout; in s, P^T times the derivative of the softcap.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::exponentiate_with_features() {
    const ForwardParams& params = launch.params.forward;
    const RowStats& stats = shared.stats[q.stage];
    const KeyBlock& block = shared.block;
    const Features features(params, block.blocks, block.batch, shared.head[q.stage]);
    const int key = block.n * Config::kBlockKv + row();
    const int query = first_query() + first_column();
    const bool full = is_full();
    const PairMask mask(block.blocks, key, query);
    kept = features.drops() ? features.template kept<kPairs>(query, key, lane()) : ~0U;
#pragma unroll
    for (int i = 0; i < kPairs; i += 2) {
        float weights[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float& score = s[i + e];
            const float derivative = features.transform(score, query + column_of(i + e), key + 8 * row_of(i));
            float p_of_pair = weight(score, launch.scale_log2, stats, column_of(i + e) + first_column());
            if (!full && !mask.sees(i + e)) p_of_pair = 0;
            weights[e] = (kept >> (i + e) & 1) != 0 ? p_of_pair * params.keep_scale : 0.0F;
            score = p_of_pair * derivative;
        }
        p[i / 8][i / 2 % 4] = ptx::pack<T>(weights[0], weights[1]);
    }
}

/// dS^T from P^T and dP^T; both into 16 bits. kMasked: some pair may be hidden.
template <class T, Config kConfig>
template <bool kMasked>
__device__ __forceinline__ void Consumer<T, kConfig>::score_gradients() {
    const RowStats& stats = shared.stats[q.stage];
    const float keep_scale = launch.params.forward.keep_scale;
    const PairMask mask(shared.block.blocks, shared.block.n * Config::kBlockKv + row(), first_query() + first_column());
#pragma unroll
    for (int j = 0; j < kPairs / 4; ++j) {
        const auto delta = reinterpret_cast<const float2&>(stats.delta[8 * j + first_column()]);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) {
            if constexpr (kConfig.general) dp[i] = (kept >> i & 1) != 0 ? dp[i] * keep_scale : 0.0F;
            dp[i] = s[i] * (dp[i] - (i % 2 == 0 ? delta.x : delta.y));
            if (kMasked && !mask.sees(i)) s[i] = dp[i] = 0;
        }
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i += 2) {
            if constexpr (!kConfig.general) p[i / 8][i / 2 % 4] = ptx::pack<T>(s[i], s[i + 1]);
            ds[i / 8][i / 2 % 4] = ptx::pack<T>(dp[i], dp[i + 1]);
        }
    }
}

/// NaN and infinities of K become 0: what they make of scores is in LSE and delta, and dQ is to have no others.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::clean_keys() {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    for (auto& slab : shared.k) clean<T, 64 * kSlabRowBytes, 128>(slab[64 * warpgroup], thread);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
}

/// The same of Q and dO, in tiles with hidden pairs. What was taken out of dO is put back at the end (restore_lost).
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::clean_queries() {
    const int first_key = shared.block.n * Config::kBlockKv;
    if (agreed(shared.block.blocks.full(first_query(), Config::kBlockQ, first_key, Config::kBlockKv))) return;
    shared.lost = 1;
    constexpr int kThreads = 128 * Config::kConsumers;
    const int thread = static_cast<int>(threadIdx.x) - 128;
    ptx::named_barrier_sync(kConsumersBarrier, kThreads);  // both warpgroups have made S and dP of it
    clean<T, sizeof(shared.q[0]), kThreads>(shared.q[q.stage], thread);
    clean<T, sizeof(shared.d_o[0]), kThreads>(shared.d_o[steps % 2], thread);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kConsumersBarrier, kThreads);
}

/// dS, transposed on its way into shared memory: rows are queries there.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::store_ds() {
    const auto slab = ptx::shared_address(shared.ds[steps % 2][warpgroup]);
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x));  // not to be kept in registers over the loop
    const int query = thread % 32 / 16 * 8 + thread % 8;
    const int chunk = thread / 32 % 4 * 2 + thread / 8 % 2;
#pragma unroll
    for (int step = 0; step < Config::kBlockQ / 16; ++step) {
        ptx::stmatrix_x4_trans(slab + swizzled(16 * step + query, chunk), ds[step][0], ds[step][1], ds[step][2],
                               ds[step][3]);
    }
    ptx::fence_proxy_async();
}

/// This warpgroup's half of dQ, for add_dq(): 16 bytes of a thread beside those of its neighbours.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::store_dq() {
    wait_for(shared.dq_empty[warpgroup], (steps & 1) ^ 1, warpgroup);
    auto* out = reinterpret_cast<float4*>(shared.dq[warpgroup]) + threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < kConfig.dq_columns() / 8; ++j) {
        out[128 * j] = make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
    }
    ptx::fence_proxy_async();
    arrive(shared.dq_full[warpgroup]);
}

/// From S^T, which is there, to P^T and dS^T. dK of the step before runs beside the exponentials. In general shapes P^T
/// has become part of dV then: registers are short.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::make_ds(int q_before) {
    const bool some_special = agreed(shared.stats[q.stage].some_special != 0);
    if constexpr (!kConfig.general) {
        start_dp();
        exponentiate();
        ptx::wgmma_wait<1>();
    } else {
        ptx::wgmma_wait<0>();
    }
    ptx::keep_in_place(dk);
    ptx::keep_in_place(ds);
    if (steps > 0) arrive(shared.q_ring.empty[q_before]);
    if constexpr (kConfig.general) {
        exponentiate_with_features();
        wait_for(shared.do_ring.full[steps % 2], steps / 2 % 2);
        if (some_special) clean_queries();
        start_dv();
        start_dp();
    }
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(dp);
    if constexpr (kConfig.general) {
        ptx::keep_in_place(dv);
        ptx::keep_in_place(p);
    }
    if (is_full()) score_gradients<false>();
    else score_gradients<true>();
    if (!kConfig.general && some_special) clean_queries();
}

template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::run() {
    int left = Steps(shared.block.blocks, shared.block.n, launch.params.forward.group).count();
    left = __shfl_sync(kAllLanes, left, 0);  // known to be the same in all lanes
#pragma unroll
    for (float& element : dk) element = 0;
#pragma unroll
    for (float& element : dv) element = 0;
    if (left == 0) return;
    wait_for(shared.kv_full, 0);
    clean_keys();
    wait_for(shared.q_ring.full[0], 0);
    start_s();
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(s);
    int q_before = -1;  // the stage of Q that dK of the step before is multiplied from
#pragma unroll 1
    while (true) {
        make_ds(q_before);
        store_ds();
        if constexpr (!kConfig.general) start_dv();
        --left;
        q_before = q.stage;
        q.advance();
        if (left > 0) wait_for(shared.q_ring.full[q.stage], q.phase);
        start_s();  // of the next step; after the last, of whatever lies there
        // Both halves of dS are there. The other stage of dS is free: who comes here has multiplied the dQ before.
        ptx::named_barrier_sync(kConsumersBarrier, 128 * Config::kConsumers);
        if constexpr (!kConfig.general) {
            ptx::wgmma_wait<1>();
            ptx::keep_in_place(dv);
            ptx::keep_in_place(p);
        }
        arrive(shared.do_ring.empty[steps % 2]);
        start_dq();
        start_dk(q_before);
        ptx::wgmma_wait<1>();
        ptx::keep_in_place(s);
        ptx::keep_in_place(dq);
        store_dq();
        ++steps;
        if (left == 0) break;
    }
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(dk);
    ptx::keep_in_place(ds);
}

}  // namespace tessera::cuda::fa3::backward
