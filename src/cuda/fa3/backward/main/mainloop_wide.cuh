// SPDX-License-Identifier: Apache-2.0
//
// The main loop at head_dim over 128, where dK or dV of 64 keys fills the registers of a warpgroup: one warpgroup
// computes P and dV, the other one dS and dK, of the same 64 keys. dQ has a kernel of its own (after/dq_kernel.cuh).
//
// The dV warpgroup starts the next step's S before this step's dV, and computes P beside the latter. The dK warpgroup
// starts dK first, so that Q is released early: at head_dim 256 it has two stages only.
#pragma once

#include "cuda/fa3/backward/main/consumer.cuh"

namespace tessera::cuda::fa3::backward {

/// Base class of the threads of the dV and dK warpgroups.
template <class T, Config kConfig>
struct SplitThread : ConsumerThread<T, kConfig> {
    using Base = ConsumerThread<T, kConfig>;
    using Base::launch, Base::shared, Base::q, Base::d_o, Base::kPairs;

    /// Tells the dQ kernel that K has NaN or infinities. S is computed from them unchanged; apply_mask() sets masked P
    /// and dS to 0.
    __device__ __forceinline__ void report_nonfinite_keys() const {
        if (any_lane(Base::some_of_keys_nonfinite())) launch.workspace.state->nonfinite_keys = 1;
    }
    /// Sets masked pairs to 0.
    __device__ __forceinline__ void apply_mask(float (&values)[kPairs]) const {
        if (Base::is_unmasked()) return;
        const PairMask mask(Base::block().schedule, Base::block().n * kConfig.block_kv + Base::row(),
                            Base::first_query() + Base::first_column());
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            if (!mask.sees(i)) values[i] = 0;
        }
    }
    /// This thread's part of the step's P^T in shared memory: 16 bytes of a thread beside those of its neighbours.
    __device__ __forceinline__ float4* shared_p() const {
        return reinterpret_cast<float4*>(shared.p[q.index()]) + threadIdx.x % 128;
    }
};

/// Computes P^T = exp2(S^T - LSE) and dV.
template <class T, Config kConfig>
struct DvConsumer : SplitThread<T, kConfig> {
    using Base = SplitThread<T, kConfig>;
    using Base::launch, Base::shared, Base::q, Base::d_o, Base::kPairs;

    float dv[kConfig.head_dim_v / 2];          ///< [64 keys][head_dim_v]
    float s[kPairs];                           ///< S^T, then P^T: [64 keys][64 queries]
    std::uint32_t p[kConfig.block_q / 16][4];  ///< P^T in 16 bits

    __device__ __forceinline__ void start_s() {
        start_scores<T, kConfig, kConfig.head_dim>(s, uniform(row_descriptor(shared.k[0])),
                                                   uniform(row_descriptor(shared.q[q.index()])));
    }
    __device__ __forceinline__ void start_dv() {
        start_gradient<T, kConfig.head_dim_v, kConfig.block_q>(
            dv, p, uniform(column_descriptor(shared.d_o[d_o.index()], kConfig.block_q)));
    }
    /// Computes P^T from S^T, which is complete.
    __device__ __forceinline__ void make_p(const float4 (&minus_lse)[Base::kChunks]) {
        ptx::warpgroup_fence_operand(s);
        Base::exponentiate(s, minus_lse, {});
        Base::apply_mask(s);
    }
    /// Passes P^T to the dK warpgroup, in fp32. That warpgroup has released the stage's Q, so it has read its last P^T.
    __device__ __forceinline__ void pass_p() {
        float4* const out = Base::shared_p();
#pragma unroll
        for (int j = 0; j < kPairs / 4; ++j) {
            out[128 * j] = make_float4(s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]);
        }
        Base::arrive(shared.p_full[q.index()]);
    }
    __device__ __forceinline__ void run();
};

template <class T, Config kConfig>
__device__ __forceinline__ void DvConsumer<T, kConfig>::run() {
    int left = Base::count_steps();
#pragma unroll
    for (float& element : dv) element = 0;
    if (left == 0) return;
    wait_for(shared.k_full, 0);
    Base::report_nonfinite_keys();
    Base::wait_for_q();
    start_s();
    float4 minus_lse[Base::kChunks];
    Base::read_flags();
    Base::read_stats(minus_lse, &RowStats::minus_lse);
    ptx::wgmma_wait<0>();
    make_p(minus_lse);
    pass_p();
#pragma unroll 1
    while (true) {
        Base::pack(p, s);
        Base::wait_for_do();
        if (Base::some_nonfinite()) Base::zero_nonfinite_queries();
        Base::arrive(shared.q_ring.empty[q.index()]);
        --left;
        q.advance();
        if (left > 0) Base::wait_for_q();
        start_s();  // for the next step; after the last one it reads stale data, and P is not used
        start_dv();
        Base::read_flags();
        Base::read_stats(minus_lse, &RowStats::minus_lse);
        ptx::wgmma_wait<1>();
        make_p(minus_lse);
        if (left > 0) pass_p();
        Base::wait_for_do();  // returns at once; its loop keeps ptxas from moving the next wait up
        ptx::wgmma_wait<0>();
        ptx::warpgroup_fence_operand(dv);
        ptx::warpgroup_fence_operand(p);
        Base::arrive(shared.do_ring.empty[d_o.index()]);
        d_o.advance();
        if (left == 0) break;
    }
}

/// Computes dS^T = P^T (dP^T - delta) and dK.
template <class T, Config kConfig>
struct DkConsumer : SplitThread<T, kConfig> {
    using Base = SplitThread<T, kConfig>;
    using Base::launch, Base::shared, Base::q, Base::d_o, Base::kPairs;

    float dk[kConfig.head_dim / 2];             ///< [64 keys][head_dim]
    float dp[kPairs];                           ///< dP^T, then dS^T: [64 keys][64 queries]
    std::uint32_t ds[kConfig.block_q / 16][4];  ///< dS^T in 16 bits

    __device__ __forceinline__ void start_dp() {
        start_scores<T, kConfig, kConfig.head_dim_v>(dp, uniform(row_descriptor(shared.v[0])),
                                                     uniform(row_descriptor(shared.d_o[d_o.index()])));
    }
    __device__ __forceinline__ void start_dk() {
        start_gradient<T, kConfig.head_dim, kConfig.block_q>(
            dk, ds, uniform(column_descriptor(shared.q[q.index()], kConfig.block_q)));
    }
    /// Computes dS^T from dP^T, which is complete, and P^T of the dV warpgroup.
    __device__ __forceinline__ void make_ds(float4 (&deltas)[Base::kChunks]) {
        static_assert(Base::kChunks == kPairs / 8);
        ptx::warpgroup_fence_operand(dp);
        const float4* const shared_p = Base::shared_p();
        const float factor = Base::ds_factor();
        scale_deltas<T>(deltas, factor);
#pragma unroll
        for (int chunk = 0; chunk < kPairs / 8; ++chunk) {
            const float4& delta = deltas[chunk];
#pragma unroll
            for (int j = 2 * chunk; j < 2 * chunk + 2; ++j) {
                const float4 p = shared_p[128 * j];
                dp[4 * j] = score_gradient<T>(p.x, dp[4 * j], element_of(delta, 4 * j), factor);
                dp[4 * j + 1] = score_gradient<T>(p.y, dp[4 * j + 1], element_of(delta, 4 * j + 1), factor);
                dp[4 * j + 2] = score_gradient<T>(p.z, dp[4 * j + 2], element_of(delta, 4 * j + 2), factor);
                dp[4 * j + 3] = score_gradient<T>(p.w, dp[4 * j + 3], element_of(delta, 4 * j + 3), factor);
            }
        }
        Base::apply_mask(dp);
    }
    __device__ __forceinline__ void run();
};

template <class T, Config kConfig>
__device__ __forceinline__ void DkConsumer<T, kConfig>::run() {
    int left = Base::count_steps();
#pragma unroll
    for (float& element : dk) element = 0;
    if (left == 0) return;
    wait_for(shared.k_full, 0);
    Base::report_nonfinite_keys();
    Base::wait_for_q();
    wait_for(shared.v_full, 0);
    Base::wait_for_do();
    start_dp();
    float4 deltas[Base::kChunks];
    Base::read_flags();
    Base::read_stats(deltas, &RowStats::delta);
    wait_for(shared.p_full[q.index()], q.phase());
    ptx::wgmma_wait<0>();
    make_ds(deltas);
#pragma unroll 1
    while (true) {
        Base::pack(ds, dp);
        if (Base::some_nonfinite()) Base::zero_nonfinite_queries();
        Base::arrive(shared.do_ring.empty[d_o.index()]);
        start_dk();
        const int last_q = q.index();
        --left;
        q.advance();
        d_o.advance();
        if (left > 0) {
            Base::wait_for_q();
            Base::wait_for_do();
        }
        start_dp();  // for the next step; after the last one it reads stale data
        Base::read_flags();
        Base::read_stats(deltas, &RowStats::delta);
        ptx::wgmma_wait<1>();
        ptx::warpgroup_fence_operand(dk);
        ptx::warpgroup_fence_operand(ds);
        Base::arrive(shared.q_ring.empty[last_q]);
        if (left > 0) wait_for(shared.p_full[q.index()], q.phase());
        ptx::wgmma_wait<0>();
        ptx::warpgroup_fence_operand(dp);
        if (left == 0) break;
        make_ds(deltas);
    }
}

}  // namespace tessera::cuda::fa3::backward
