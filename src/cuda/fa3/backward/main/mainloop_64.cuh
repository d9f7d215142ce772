// SPDX-License-Identifier: Apache-2.0
//
// The main loop at head_dim 64: Algorithm 2 as in mainloop.cuh, with dQ in the hands of a third consumer warpgroup. An
// element costs as much arithmetic as at head_dim 128 and half the products, and warpgroups that meet in every step
// compute at the same time and multiply at the same time. Here the two that have keys never meet: the exponentials of
// one run beside the products of the other. A step has 128 queries, taken 64 at a time.
//
// Two warpgroups (KeysConsumer), 64 keys each, make S, P, dP, dS, dV and dK. For 64 queries, run():
//
//   make_ds()               S^T is there. dP^T is started, and P^T made beside it and beside dK of the 64 before. Then
//                           dS^T, which is stored to one of the four places of ds_ring
//   start_s()               the next 64 scores. K is the A operand, in registers: 32 KiB less to read in a step
//   start_dv(), start_dk()  dV += P^T dO and dK += dS^T Q. S and dV are waited for
//
// The third (QueriesConsumer), all 128 keys: when both have left their dS of 64 queries, it multiplies dQ = dS K, and
// put_dq() leaves it to the producer's warp that adds it up.
//
// Q is given back by all three, dO by the two. A place of ds_ring is full when both have stored to it, and empty when
// the third has multiplied it.
#pragma once

#include "cuda/fa3/backward/main/consumer.cuh"

namespace tessera::cuda::fa3::backward {

/// What both have: where half of a step's queries are.
template <class T, Config kConfig>
struct HalvesThread : ConsumerThread<T, kConfig> {
    static constexpr int kHalf = Config::kRows;  ///< queries
    static_assert(kConfig.block_q == 2 * kHalf && kConfig.head_dim == kPanelColumns && !kConfig.general);

    /// The place of half of the step's queries in ds_ring.
    __device__ __forceinline__ std::uint32_t place(int half) const {
        return this->steps % Config::kStages * 2 + static_cast<std::uint32_t>(half);
    }
    __device__ __forceinline__ std::uint32_t phase() const { return this->steps / Config::kStages % 2; }
};

/// Makes S, P, dP, dS, dV and dK of 64 keys.
template <class T, Config kConfig>
struct KeysConsumer : HalvesThread<T, kConfig> {
    using Base = HalvesThread<T, kConfig>;
    using Base::arrive, Base::d_o, Base::kEarly, Base::kHalf, Base::kPairs, Base::phase, Base::place, Base::q,
        Base::shared, Base::steps, Base::warpgroup;

    std::uint32_t k[kConfig.head_dim / 16][4];  ///< K: [64 keys][head_dim]
    float dk[kConfig.head_dim / 2];             ///< [64 keys][head_dim]
    float dv[kConfig.head_dim_v / 2];           ///< [64 keys][head_dim_v]
    float s[kPairs];                            ///< S^T, then P^T: [64 keys][64 queries]
    float dp[kPairs];                           ///< dP^T, then dS^T
    std::uint32_t p[kHalf / 16][4];             ///< P^T in 16 bits
    std::uint32_t ds[kHalf / 16][4];            ///< dS^T in 16 bits
    bool nonfinite;                             ///< there are NaN or infinities in K

    /// K in registers.
    __device__ __forceinline__ void fetch_keys() {
        load_rows(k, shared.k[0], kHalf * warpgroup);
        std::uint32_t found = 0;
#pragma unroll
        for (const auto& words : k) {
#pragma unroll
            for (const std::uint32_t pair : words) found |= cuda::nonfinite<T>(pair);
        }
        nonfinite = Base::agreed_in_warpgroup(found != 0);
    }
    __device__ __forceinline__ bool nonfinite_in_keys() const { return nonfinite; }
    /// Of K in shared memory; and K in registers.
    __device__ __forceinline__ void clean_keys() {
        Base::clean_keys();
        load_rows(k, shared.k[0], kHalf * warpgroup);
    }
    __device__ __forceinline__ void start_s(int half = 0) {
        start_scores_of_registers<T, kConfig.head_dim>(s, k,
                                                       uniform(row_descriptor(&shared.q[q.stage][0][kHalf * half])));
    }
    __device__ __forceinline__ void start_dp(int half) {
        start_scores<T, kConfig, kConfig.head_dim_v, kHalf>(
            dp, uniform(row_descriptor(&shared.v[0][64 * warpgroup])),
            uniform(row_descriptor(&shared.d_o[d_o.stage][0][kHalf * half])));
    }
    __device__ __forceinline__ void start_dv(int half) {
        start_key_gradient<T, kConfig.head_dim_v, kHalf>(
            dv, p, uniform(column_descriptor(&shared.d_o[d_o.stage][0][kHalf * half], kConfig.block_q)));
    }
    __device__ __forceinline__ void start_dk(int q_stage, int half) {
        start_key_gradient<T, kConfig.head_dim, kHalf>(
            dk, ds, uniform(column_descriptor(&shared.q[q_stage][0][kHalf * half], kConfig.block_q)));
    }
    __device__ __forceinline__ void make_ds(int half, int q_before);
    __device__ __forceinline__ void run();
};

/// From S^T of 64 queries, which is there, to their dS^T in shared memory. dK of the 64 before and dP^T run beside the
/// exponentials. q_before: the stage of Q that dK of the step before is multiplied from.
template <class T, Config kConfig>
__device__ __forceinline__ void KeysConsumer<T, kConfig>::make_ds(int half, int q_before) {
    const bool some_nonfinite = Base::some_nonfinite();
    const bool full = Base::is_full();
    float4 stats[kEarly];  // LSE, then delta
    Base::read_early(stats, &RowStats::minus_lse, half);
    if (half == 0) Base::wait_for_do();
    start_dp(half);
    Base::exponentiate(s, stats, half);
    Base::read_early(stats, &RowStats::delta, half);
    ptx::wgmma_wait<1>();
    ptx::warpgroup_fence_operand(dk);
    ptx::warpgroup_fence_operand(ds);
    if (half == 0 && steps > 0) arrive(shared.q_ring.empty[q_before]);
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(dp);
    if (full) Base::template score_gradients<false>(s, dp, stats, half);
    else Base::template score_gradients<true>(s, dp, stats, half);
    Base::pack(ds, dp);
    Base::pack(p, s);
    if (some_nonfinite) Base::clean_queries(half);
    wait_for(shared.ds_ring.empty[place(half)], phase() ^ 1);
    Base::store_ds(ds, Base::ds_address(warpgroup) + kHalf * kPanelRowBytes * half);
}

template <class T, Config kConfig>
__device__ __forceinline__ void KeysConsumer<T, kConfig>::run() {
    int left = Base::count_steps();
    begin_steps(*this);
    if (left == 0) return;
    int q_before = 0;
#pragma unroll 1
    while (true) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            make_ds(half, q_before);
            const int q_stage = q.stage;
            if (half == 1) {
                --left;
                q_before = q.stage;
                q.advance();
                if (left > 0) Base::wait_for_q();
            }
            start_s(1 - half);  // of the next 64; after the last, of whatever lies there
            ptx::fence_proxy_async();
            arrive(shared.ds_ring.full[place(half)]);
            start_dv(half);
            start_dk(q_stage, half);
            if (half == 1) Base::read_flags();
            ptx::wgmma_wait<1>();
            ptx::warpgroup_fence_operand(s);
            ptx::warpgroup_fence_operand(dv);
            ptx::warpgroup_fence_operand(p);
        }
        arrive(shared.do_ring.empty[d_o.stage]);
        ++steps;
        d_o.advance();
        if (left == 0) break;
    }
}

/// Makes dQ of the block's 128 keys.
template <class T, Config kConfig>
struct QueriesConsumer : HalvesThread<T, kConfig> {
    using Base = HalvesThread<T, kConfig>;
    using Base::arrive, Base::kHalf, Base::phase, Base::place, Base::q, Base::shared, Base::steps;

    float dq[kConfig.dq_columns() / 2];  ///< [64 queries][head_dim]

    __device__ __forceinline__ void start_dq(int half) {
        backward::start_dq<T, kConfig, kConfig.dq_columns()>(
            dq, uniform(row_descriptor(&shared.ds[steps % Config::kStages][0][kHalf * half])),
            uniform(column_descriptor(shared.k[0], kConfig.block_kv)));
    }
    template <bool kFinishes>
    __device__ __forceinline__ void run();
};

template <class T, Config kConfig>
template <bool kFinishes>
__device__ __forceinline__ void QueriesConsumer<T, kConfig>::run() {
    int left = Base::count_steps();
    if (left == 0) return;
    wait_for(shared.k_full, 0);
#pragma unroll 1
    for (; left > 0; --left) {
        Base::wait_for_q();
        if constexpr (!kFinishes) arrive(shared.q_ring.empty[q.stage]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Base::warpgroup = half;  // which of the two sums and places of dQ
            wait_for(shared.ds_ring.full[place(half)], phase());
            start_dq(half);
            if constexpr (!kFinishes) Base::wait_for_dq_memory();
            ptx::wgmma_wait<0>();
            ptx::warpgroup_fence_operand(dq);
            arrive(shared.ds_ring.empty[place(half)]);
            if constexpr (kFinishes) {
                Base::put_dq_or_finish(dq, q.stage);
            } else {
                Base::put_dq(dq);
                Base::give_dq();
            }
        }
        if constexpr (kFinishes) arrive(shared.q_ring.empty[q.stage]);  // block_q and head came with it
        ++steps;
        q.advance();
    }
}

}  // namespace tessera::cuda::fa3::backward
