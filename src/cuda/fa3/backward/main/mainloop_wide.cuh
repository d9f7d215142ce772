// SPDX-License-Identifier: Apache-2.0
//
// The main loop where dK and dV of 64 keys fill the registers of a warpgroup each: one makes P and dV, the other one dS
// and dK, of the same 64 keys. dQ has a kernel of its own (dq_product.cuh).
//
// The first multiplies the next block's scores before this block's gradient, and works P out beside the latter. The
// other one multiplies its gradient first: then Q is given back early, of which there are two stages at head_dim 256.
#pragma once

#include "cuda/fa3/backward/main/consumer.cuh"

namespace tessera::cuda::fa3::backward {

/// What both have.
template <class T, Config kConfig>
struct RoleThread : ConsumerThread<T, kConfig> {
    using Base = ConsumerThread<T, kConfig>;
    using Base::launch, Base::shared, Base::q, Base::d_o, Base::kPairs;

    /// Pairs that are hidden become 0.
    __device__ __forceinline__ void apply_mask(float (&values)[kPairs]) const {
        if (Base::is_full()) return;
        const PairMask mask(Base::block().blocks, Base::block().n * kConfig.block_kv + Base::row(),
                            Base::first_query() + Base::first_column());
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            if (!mask.sees(i)) values[i] = 0;
        }
    }
    /// The step's P^T in shared memory: 16 bytes of a thread beside those of its neighbours.
    __device__ __forceinline__ float4* weights() const {
        return reinterpret_cast<float4*>(shared.p[q.stage]) + threadIdx.x % 128;
    }
};

/// Makes P^T = exp2(S^T - LSE) and dV.
template <class T, Config kConfig>
struct WeightsConsumer : RoleThread<T, kConfig> {
    using Base = RoleThread<T, kConfig>;
    using Base::launch, Base::shared, Base::q, Base::d_o, Base::kPairs;

    float dv[kConfig.head_dim_v / 2];          ///< [64 keys][head_dim_v]
    float s[kPairs];                           ///< S^T, then P^T: [64 keys][64 queries]
    std::uint32_t p[kConfig.block_q / 16][4];  ///< P^T in 16 bits

    __device__ __forceinline__ void start_s() {
        start_scores<T, kConfig, kConfig.head_dim>(s, uniform(row_descriptor(shared.k[0])),
                                                   uniform(row_descriptor(shared.q[q.stage])));
    }
    __device__ __forceinline__ void start_dv() {
        start_key_gradient<T, kConfig.head_dim_v, kConfig.block_q>(
            dv, p, uniform(column_descriptor(shared.d_o[d_o.stage], kConfig.block_q)));
    }
    /// P^T of S^T, which is there.
    __device__ __forceinline__ void make_p(const float4 (&minus_lse)[Base::kEarly]) {
        ptx::warpgroup_fence_operand(s);
        Base::exponentiate(s, minus_lse);
        Base::apply_mask(s);
    }
    /// To the other warpgroup, in fp32. It has read what lay there: it gave back the Q of the same stage.
    __device__ __forceinline__ void hand_over() {
        float4* const out = Base::weights();
#pragma unroll
        for (int j = 0; j < kPairs / 4; ++j) {
            out[128 * j] = make_float4(s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]);
        }
        Base::arrive(shared.p_full[q.stage]);
    }
    __device__ __forceinline__ void run();
};

template <class T, Config kConfig>
__device__ __forceinline__ void WeightsConsumer<T, kConfig>::run() {
    int left = Base::count_steps();
#pragma unroll
    for (float& element : dv) element = 0;
    if (left == 0) return;
    wait_for(shared.k_full, 0);
    Base::clean_keys();
    Base::wait_for_q();
    start_s();
    float4 minus_lse[Base::kEarly];
    Base::read_flags();
    Base::read_early(minus_lse, &RowStats::minus_lse);
    ptx::wgmma_wait<0>();
    make_p(minus_lse);
    hand_over();
#pragma unroll 1
    while (true) {
        Base::pack(p, s);
        Base::wait_for_do();
        if (Base::some_nonfinite()) Base::clean_queries();
        Base::arrive(shared.q_ring.empty[q.stage]);
        --left;
        q.advance();
        if (left > 0) Base::wait_for_q();
        start_s();  // of the next step; after the last, of whatever lies there, and so is what follows from it
        start_dv();
        Base::read_flags();
        Base::read_early(minus_lse, &RowStats::minus_lse);
        ptx::wgmma_wait<1>();
        make_p(minus_lse);
        if (left > 0) hand_over();
        Base::wait_for_do();  // passed already: a loop here keeps ptxas from putting the next wait first
        ptx::wgmma_wait<0>();
        ptx::warpgroup_fence_operand(dv);
        ptx::warpgroup_fence_operand(p);
        Base::arrive(shared.do_ring.empty[d_o.stage]);
        d_o.advance();
        if (left == 0) break;
    }
}

/// Makes dS^T = P^T (dP^T - delta) and dK.
template <class T, Config kConfig>
struct ScoresConsumer : RoleThread<T, kConfig> {
    using Base = RoleThread<T, kConfig>;
    using Base::launch, Base::shared, Base::q, Base::d_o, Base::kPairs;

    float dk[kConfig.head_dim / 2];             ///< [64 keys][head_dim]
    float dp[kPairs];                           ///< dP^T, then dS^T: [64 keys][64 queries]
    std::uint32_t ds[kConfig.block_q / 16][4];  ///< dS^T in 16 bits

    __device__ __forceinline__ void start_dp() {
        start_scores<T, kConfig, kConfig.head_dim_v>(dp, uniform(row_descriptor(shared.v[0])),
                                                     uniform(row_descriptor(shared.d_o[d_o.stage])));
    }
    __device__ __forceinline__ void start_dk() {
        start_key_gradient<T, kConfig.head_dim, kConfig.block_q>(
            dk, ds, uniform(column_descriptor(shared.q[q.stage], kConfig.block_q)));
    }
    /// dS^T from dP^T, which is there, and P^T of the other warpgroup.
    __device__ __forceinline__ void make_ds(float4 (&deltas)[Base::kEarly]) {
        static_assert(Base::kEarly == kPairs / 8);
        ptx::warpgroup_fence_operand(dp);
        const float4* const weights = Base::weights();
        const float unit = Base::unit();
        hold_deltas<T>(deltas, unit);
#pragma unroll
        for (int chunk = 0; chunk < kPairs / 8; ++chunk) {
            const float4& delta = deltas[chunk];
#pragma unroll
            for (int j = 2 * chunk; j < 2 * chunk + 2; ++j) {
                const float4 p = weights[128 * j];
                dp[4 * j] = score_gradient<T>(p.x, dp[4 * j], of_element(delta, 4 * j), unit);
                dp[4 * j + 1] = score_gradient<T>(p.y, dp[4 * j + 1], of_element(delta, 4 * j + 1), unit);
                dp[4 * j + 2] = score_gradient<T>(p.z, dp[4 * j + 2], of_element(delta, 4 * j + 2), unit);
                dp[4 * j + 3] = score_gradient<T>(p.w, dp[4 * j + 3], of_element(delta, 4 * j + 3), unit);
            }
        }
        Base::apply_mask(dp);
    }
    __device__ __forceinline__ void run();
};

template <class T, Config kConfig>
__device__ __forceinline__ void ScoresConsumer<T, kConfig>::run() {
    int left = Base::count_steps();
#pragma unroll
    for (float& element : dk) element = 0;
    if (left == 0) return;
    wait_for(shared.k_full, 0);
    Base::clean_keys();
    Base::wait_for_q();
    wait_for(shared.v_full, 0);
    Base::wait_for_do();
    start_dp();
    float4 deltas[Base::kEarly];
    Base::read_flags();
    Base::read_early(deltas, &RowStats::delta);
    wait_for(shared.p_full[q.stage], q.phase);
    ptx::wgmma_wait<0>();
    make_ds(deltas);
#pragma unroll 1
    while (true) {
        Base::pack(ds, dp);
        if (Base::some_nonfinite()) Base::clean_queries();
        Base::arrive(shared.do_ring.empty[d_o.stage]);
        start_dk();
        const int q_before = q.stage;
        --left;
        q.advance();
        d_o.advance();
        if (left > 0) {
            Base::wait_for_q();
            Base::wait_for_do();
        }
        start_dp();  // of the next step; after the last, of whatever lies there
        Base::read_flags();
        Base::read_early(deltas, &RowStats::delta);
        ptx::wgmma_wait<1>();
        ptx::warpgroup_fence_operand(dk);
        ptx::warpgroup_fence_operand(ds);
        Base::arrive(shared.q_ring.empty[q_before]);
        if (left > 0) wait_for(shared.p_full[q.stage], q.phase);
        ptx::wgmma_wait<0>();
        ptx::warpgroup_fence_operand(dp);
        if (left == 0) break;
        make_ds(deltas);
    }
}

}  // namespace tessera::cuda::fa3::backward
