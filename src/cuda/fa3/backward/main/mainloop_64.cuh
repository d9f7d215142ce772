// SPDX-License-Identifier: Apache-2.0
//
// The main loop at head_dim 64: Algorithm 2 as in mainloop_128.cuh, with a dedicated warpgroup for dQ. An element costs
// as much arithmetic as at head_dim 128 and half the MMA time. Warpgroups that meet in every step would compute at the
// same time, and issue MMAs at the same time. Here the two that have keys never meet. So the exponentials of one
// overlap with the MMAs of the other. A step has 128 queries, in two halves of 64.
//
// Two warpgroups (KeyConsumer), 64 keys each, compute S, P, dP, dS, dV and dK. For each half, run():
//
//   make_ds()               S^T is complete. Starts dP^T, and computes P^T beside it and beside the previous half's dK.
//                           Then computes dS^T, and stores it to one of the four stages of ds_ring
//   start_s()               starts S^T of the next half. K is the A operand, in registers: 32 KiB less shared memory to
//                           read in a step
//   start_dv(), start_dk()  start dV += P^T dO and dK += dS^T Q. Then waits for S and dV
//
// The third one (DqConsumer) has all 128 keys. When both have stored their dS of a half, it computes dQ = dS K, and
// store_dq() leaves it to the producer thread that adds it up.
//
// All three release Q, the two release dO. A stage of ds_ring is full when both have stored to it, and empty when the
// third has read it.
#pragma once

#include "cuda/fa3/backward/main/consumer.cuh"
#include "cuda/fa3/backward/main/dq_accumulate.cuh"

namespace tessera::cuda::fa3::backward {

/// The halves of a step.
template <class T, Config kConfig>
struct HalfStepThread : ConsumerThread<T, kConfig> {
    static constexpr int kHalf = Config::kRows;  ///< queries
    static_assert(kConfig.block_q == 2 * kHalf && kConfig.head_dim == kPanelColumns &&
                  kConfig.scores != Scores::general);

    /// Stage and phase of ds_ring.
    __device__ __forceinline__ std::uint32_t ds_stage(int half) const {
        return this->steps % Config::kDsStages * 2 + static_cast<std::uint32_t>(half);
    }
    __device__ __forceinline__ std::uint32_t ds_phase() const { return this->steps / Config::kDsStages % 2; }
};

/// Computes S, P, dP, dS, dV and dK of 64 keys.
template <class T, Config kConfig>
struct KeyConsumer : HalfStepThread<T, kConfig> {
    using Base = HalfStepThread<T, kConfig>;
    using Base::arrive, Base::d_o, Base::kChunks, Base::kHalf, Base::kPairs, Base::ds_phase, Base::ds_stage, Base::q,
        Base::shared, Base::steps, Base::warpgroup;
    static constexpr bool kCapped = kConfig.scores == Scores::capped;

    std::uint32_t k[kConfig.head_dim / 16][4];  ///< K: [64 keys][head_dim]
    float dk[kConfig.head_dim / 2];             ///< [64 keys][head_dim]
    float dv[kConfig.head_dim_v / 2];           ///< [64 keys][head_dim_v]
    float s[kPairs];                            ///< S^T, then P^T: [64 keys][64 queries]
    float dp[kPairs];                           ///< dP^T, then dS^T
    std::uint32_t p[kHalf / 16][4];             ///< P^T in 16 bits
    std::uint32_t ds[kHalf / 16][4];            ///< dS^T in 16 bits
    bool nonfinite;                             ///< K holds NaN or infinities

    /// Loads K into registers.
    __device__ __forceinline__ void load_keys() {
        load_rows(k, shared.k[0], kHalf * warpgroup);
        std::uint32_t found = 0;
#pragma unroll
        for (const auto& words : k) {
#pragma unroll
            for (const std::uint32_t pair : words) found |= cuda::nonfinite<T>(pair);
        }
        nonfinite = Base::any_in_warpgroup(found != 0);
    }
    __device__ __forceinline__ bool nonfinite_in_keys() const { return nonfinite; }
    __device__ __forceinline__ void start_s(int half = 0) {
        start_scores_of_registers<T, kConfig.head_dim>(s, k,
                                                       uniform(row_descriptor(&shared.q[q.index()][0][kHalf * half])));
    }
    __device__ __forceinline__ void start_dp(int half) {
        start_scores<T, kConfig, kConfig.head_dim_v, kHalf>(
            dp, uniform(row_descriptor(&shared.v[0][64 * warpgroup])),
            uniform(row_descriptor(&shared.d_o[d_o.index()][0][kHalf * half])));
    }
    __device__ __forceinline__ void start_dv(int half) {
        start_gradient<T, kConfig.head_dim_v, kHalf>(
            dv, p, uniform(column_descriptor(&shared.d_o[d_o.index()][0][kHalf * half], kConfig.block_q)));
    }
    __device__ __forceinline__ void start_dk(int q_stage, int half) {
        start_gradient<T, kConfig.head_dim, kHalf>(
            dk, ds, uniform(column_descriptor(&shared.q[q_stage][0][kHalf * half], kConfig.block_q)));
    }
    __device__ __forceinline__ void make_ds(int half, int last_q);
    __device__ __forceinline__ void run();
};

/// Computes dS^T from S^T of a half, which is complete, and stores it to shared memory. dK of the previous half and
/// dP^T overlap with the exponentials. `last_q`: stage of the Q that dK of the last step reads.
template <class T, Config kConfig>
__device__ __forceinline__ void KeyConsumer<T, kConfig>::make_ds(int half, int last_q) {
    const bool some_nonfinite = Base::some_nonfinite();
    const bool full = Base::is_unmasked();
    float4 stats[kChunks];  // LSE, then delta
    // The mask of dropout is drawn first, in registers that LSE would take.
    constexpr bool kReadsEarly = kConfig.scores != Scores::dropout && !kCapped;
    Base::add_bias(s, half);  // before dP^T, whose registers it takes
    if constexpr (kReadsEarly) Base::read_stats(stats, &RowStats::minus_lse, half);
    if (half == 0) Base::wait_for_do();
    start_dp(half);
    const auto mod = Base::step_score_mod(half);
    if constexpr (!kCapped) {
        if constexpr (!kReadsEarly) Base::read_stats(stats, &RowStats::minus_lse, half);
        Base::exponentiate(s, stats, mod, half);
        Base::read_stats(stats, &RowStats::delta, half);
    }
    ptx::wgmma_wait<1>();
    ptx::warpgroup_fence_operand(dk);
    ptx::warpgroup_fence_operand(ds);
    if (half == 0 && steps > 0) arrive(shared.q_ring.empty[last_q]);
    if constexpr (kCapped) cap_scores(Base::launch.softcap, s);  // in the registers of the last dS
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(dp);
    if (full) Base::template score_gradients<false>(s, dp, stats, mod, half);
    else Base::template score_gradients<true>(s, dp, stats, mod, half);
    Base::pack(ds, dp);
    Base::pack_kept(p, s, mod);
    if (some_nonfinite) Base::zero_nonfinite_queries(half);
    wait_for(shared.ds_ring.empty[ds_stage(half)], ds_phase() ^ 1);
    Base::store_ds(ds, Base::ds_address(warpgroup) + kHalf * kPanelRowBytes * half);
}

template <class T, Config kConfig>
__device__ __forceinline__ void KeyConsumer<T, kConfig>::run() {
    int left = Base::count_steps();
    prologue(*this);
    if (left == 0) return;
    int last_q = 0;
#pragma unroll 1
    while (true) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            make_ds(half, last_q);
            const int q_stage = q.index();
            if (half == 1) {
                --left;
                last_q = q.index();
                q.advance();
                if (left > 0) Base::wait_for_q();
            }
            start_s(1 - half);  // for the next half; after the last one it reads stale data
            ptx::fence_proxy_async();
            arrive(shared.ds_ring.full[ds_stage(half)]);
            start_dv(half);
            start_dk(q_stage, half);
            if (half == 1) Base::read_flags();
            ptx::wgmma_wait<1>();
            ptx::warpgroup_fence_operand(s);
            ptx::warpgroup_fence_operand(dv);
            ptx::warpgroup_fence_operand(p);
        }
        arrive(shared.do_ring.empty[d_o.index()]);
        ++steps;
        d_o.advance();
        if (left == 0) break;
    }
}

/// Computes dQ of the CTA's 128 keys.
template <class T, Config kConfig>
struct DqConsumer : HalfStepThread<T, kConfig> {
    using Base = HalfStepThread<T, kConfig>;
    using Base::arrive, Base::kHalf, Base::ds_phase, Base::ds_stage, Base::q, Base::shared, Base::steps;

    float dq[kConfig.dq_columns() / 2];  ///< [64 queries][head_dim]

    __device__ __forceinline__ void start_dq(int half) {
        backward::start_dq<T, kConfig, kConfig.dq_columns()>(
            dq, uniform(row_descriptor(&shared.ds[steps % Config::kDsStages][0][kHalf * half])),
            uniform(column_descriptor(shared.k[0], kConfig.block_kv)));
    }
    template <bool kWritesDq>
    __device__ __forceinline__ void run();
};

template <class T, Config kConfig>
template <bool kWritesDq>
__device__ __forceinline__ void DqConsumer<T, kConfig>::run() {
    int left = Base::count_steps();
    if (left == 0) return;
    wait_for(shared.k_full, 0);
#pragma unroll 1
    for (; left > 0; --left) {
        Base::wait_for_q();
        if constexpr (!kWritesDq) arrive(shared.q_ring.empty[q.index()]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Base::warpgroup = half;  // the half of dQ that it adds to
            wait_for(shared.ds_ring.full[ds_stage(half)], ds_phase());
            start_dq(half);
            if constexpr (!kWritesDq) Base::wait_for_dq_buffer();
            ptx::wgmma_wait<0>();
            ptx::warpgroup_fence_operand(dq);
            arrive(shared.ds_ring.empty[ds_stage(half)]);
            if constexpr (kWritesDq) {
                store_or_write_dq(*this, dq, q.index());
            } else {
                store_dq(*this, dq);
                signal_dq(*this);
            }
        }
        if constexpr (kWritesDq)
            arrive(shared.q_ring.empty[q.index()]);  // write_dq() reads block_q and head of the stage
        ++steps;
        q.advance();
    }
    if constexpr (kWritesDq) {
        if (any_lane(nonfinite_keys_met(Base::launch) == 0)) return;
        for (int half = 0; half < 2; ++half) store_nan_of_written_dq(*this, half);
    }
}

}  // namespace tessera::cuda::fa3::backward
