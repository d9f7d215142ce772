// SPDX-License-Identifier: Apache-2.0
//
// The main loop at head_dim 64: 128 queries a step; S and dK of all at once, dP, the exponentials, dS and dV in two
// halves of 64 queries. An element costs as much arithmetic as at head_dim 128 and half the products, and in one go
// nothing of it fits beside a product. In halves, the next step's exponentials begin beside dK, and dP of one half runs
// beside those and dS of the other one.
#pragma once

#include "cuda/fa3/backward/consumer.cuh"

namespace tessera::cuda::fa3::backward {

template <class T, Config kConfig>
struct HalvesConsumer : ConsumerThread<T, kConfig> {
    using Base = ConsumerThread<T, kConfig>;
    using Base::arrive, Base::d_o, Base::first_column, Base::first_query, Base::kEarly, Base::kPairs, Base::launch,
        Base::q, Base::row, Base::shared, Base::steps, Base::warpgroup;
    static constexpr int kHalf = Config::kRows;  ///< queries
    static_assert(kConfig.block_q == 2 * kHalf && kConfig.head_dim == kSlabColumns && !kConfig.general);

    float dk[kConfig.head_dim / 2];             ///< [64 keys][head_dim]
    float dv[kConfig.head_dim_v / 2];           ///< [64 keys][head_dim_v]
    float s[2 * kPairs];                        ///< S^T, then P^T: [64 keys][128 queries]
    float dp[2][kPairs];                        ///< dP^T, then dS^T: [64 keys][64 queries] each
    std::uint32_t p[kConfig.block_q / 16][4];   ///< P^T in 16 bits
    std::uint32_t ds[kConfig.block_q / 16][4];  ///< dS^T in 16 bits
    float dq[kConfig.dq_columns() / 2];         ///< [64 queries][head_dim]
    float4 stats[kEarly];                       ///< LSE or delta of 64 queries, what is wanted next: read early

    __device__ __forceinline__ void start_s() {
        start_scores<T, kConfig, kConfig.head_dim>(s, uniform(row_descriptor(&shared.k[0][64 * warpgroup])),
                                                   uniform(row_descriptor(shared.q[q.stage])));
    }
    __device__ __forceinline__ void start_dp(int half) {
        start_scores<T, kConfig, kConfig.head_dim_v, kHalf>(
            dp[half], uniform(row_descriptor(&shared.v[0][64 * warpgroup])),
            uniform(row_descriptor(&shared.d_o[d_o.stage][0][kHalf * half])));
    }
    __device__ __forceinline__ void start_dv(int half) {
        start_key_gradient<T, kConfig.head_dim_v, kHalf>(
            dv, half_of(p, half), uniform(column_descriptor(&shared.d_o[d_o.stage][0][kHalf * half], kConfig.block_q)));
    }
    __device__ __forceinline__ void start_dk(int q_stage) {
        start_key_gradient<T, kConfig.head_dim, kConfig.block_q>(
            dk, ds, uniform(column_descriptor(shared.q[q_stage], kConfig.block_q)));
    }
    __device__ __forceinline__ void start_dq() {
        backward::start_dq<T, kConfig, kConfig.dq_columns()>(
            dq, uniform(row_descriptor(&shared.ds[steps % 2][0][kHalf * warpgroup])),
            uniform(column_descriptor(shared.k[0], kConfig.block_kv)));
    }
    __device__ __forceinline__ static float (&half_of(float (&values)[2 * kPairs], int half))[kPairs] {
        return reinterpret_cast<float(&)[kPairs]>(values[kPairs * half]);
    }
    __device__ __forceinline__ static std::uint32_t (&half_of(std::uint32_t (&a)[kConfig.block_q / 16][4],
                                                              int half))[kHalf / 16][4] {
        return reinterpret_cast<std::uint32_t(&)[kHalf / 16][4]>(a[kHalf / 16 * half]);
    }

    /// P^T of half of the queries, from S^T.
    __device__ __forceinline__ void exponentiate(int half) { Base::exponentiate(half_of(s, half), stats, half); }
    template <bool kMasked>
    __device__ __forceinline__ void score_gradients(int half);
    __device__ __forceinline__ void make_ds();
    __device__ __forceinline__ void start();
    template <bool kFinishes>
    __device__ __forceinline__ void run();
};

/// dS^T of half of the queries from P^T and dP^T; both into 16 bits. kMasked: some pair may be hidden.
template <class T, Config kConfig>
template <bool kMasked>
__device__ __forceinline__ void HalvesConsumer<T, kConfig>::score_gradients(int half) {
    float(&weights)[kPairs] = half_of(s, half);
    float(&gradients)[kPairs] = dp[half];
    const float unit = Base::unit();
    hold_deltas<T>(stats, unit);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        gradients[i] = score_gradient<T>(weights[i], gradients[i], of_element(stats[i / 8], i), unit);
    }
    if constexpr (kMasked) {
        const PairMask mask(shared.block.blocks, shared.block.n * kConfig.block_kv + row(),
                            first_query() + kHalf * half + first_column());
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            if (!mask.sees(i)) weights[i] = gradients[i] = 0;
        }
    }
#pragma unroll
    for (int i = 0; i < kPairs; i += 2) {
        half_of(ds, half)[i / 8][i / 2 % 4] = ptx::pack_finite<T>(gradients[i], gradients[i + 1]);
        half_of(p, half)[i / 8][i / 2 % 4] = ptx::pack_finite<T>(weights[i], weights[i + 1]);
    }
}

/// From P^T, and dP^T under way in two halves, to dS^T in shared memory and dV under way.
template <class T, Config kConfig>
__device__ __forceinline__ void HalvesConsumer<T, kConfig>::make_ds() {
    const bool some_special = Base::some_special();
    const bool full = Base::is_full();
    const std::uint32_t to = Base::ds_address(warpgroup);
    // Of the first half beside the second half of dP; which must be there, too, where dO is to be cleaned.
    if (some_special) ptx::wgmma_wait<0>();
    else ptx::wgmma_wait<1>();
    ptx::keep_in_place(dp[0]);
    if (full) score_gradients<false>(0);
    else score_gradients<true>(0);
    Base::read_early(stats, &RowStats::delta, 1);
    if (some_special) Base::clean_queries();
    start_dv(0);
    Base::store_ds(half_of(ds, 0), to);
    ptx::wgmma_wait<1>();
    ptx::keep_in_place(dp[1]);
    if (full) score_gradients<false>(1);
    else score_gradients<true>(1);
    start_dv(1);
    Base::store_ds(half_of(ds, 1), to + kHalf * kSlabRowBytes);
    ptx::fence_proxy_async();
}

/// Gradients of 0; and, where there are steps, P^T of the first, and dP^T under way.
template <class T, Config kConfig>
__device__ __forceinline__ void HalvesConsumer<T, kConfig>::start() {
    if (!begin_steps(*this)) return;
    Base::read_early(stats, &RowStats::minus_lse, 0);
    exponentiate(0);
    Base::read_early(stats, &RowStats::minus_lse, 1);
    exponentiate(1);
    Base::wait_for_do();
    start_dp(0);
    start_dp(1);
    Base::read_early(stats, &RowStats::delta, 0);
    ptx::wgmma_wait<0>();  // with products under way here, the assembler would serialise those of the loop
    ptx::keep_in_place(dp[0]);
    ptx::keep_in_place(dp[1]);
}

template <class T, Config kConfig>
template <bool kFinishes>
__device__ __forceinline__ void HalvesConsumer<T, kConfig>::run() {
    int left = Base::count_steps();
    start();
    if (left == 0) return;
#pragma unroll 1
    while (true) {
        make_ds();
        --left;
        const int q_before = q.stage;
        q.advance();
        if (left > 0) Base::wait_for_q();
        start_s();  // of the next step; after the last, of whatever lies there
        // Both warpgroups' dS is there. The other stage of dS is free: who comes here has multiplied the dQ before.
        ptx::named_barrier_sync(kConsumersBarrier, 128 * Config::kConsumers);
        ptx::wgmma_wait<1>();
        ptx::keep_in_place(dv);
        ptx::keep_in_place(p);
        arrive(shared.do_ring.empty[d_o.stage]);
        start_dq();
        start_dk(q_before);
        Base::read_flags();
        Base::read_early(stats, &RowStats::minus_lse, 0);
        ptx::wgmma_wait<2>();
        ptx::keep_in_place(s);
        exponentiate(0);
        Base::read_early(stats, &RowStats::minus_lse, 1);
        if constexpr (!kFinishes) Base::wait_for_dq_memory();
        ptx::wgmma_wait<1>();
        ptx::keep_in_place(dq);
        if constexpr (kFinishes) Base::put_dq_or_finish(dq, q_before);
        else Base::put_dq(dq);
        ++steps;
        d_o.advance();
        if (left == 0) break;
        Base::wait_for_do();
        start_dp(0);
        exponentiate(1);
        if constexpr (!kFinishes) Base::give_dq();
        Base::read_early(stats, &RowStats::delta, 0);
        ptx::wgmma_wait<1>();
        ptx::keep_in_place(dk);
        ptx::keep_in_place(ds);
        arrive(shared.q_ring.empty[q_before]);
        start_dp(1);
    }
    end_steps<kFinishes>(*this);
}

}  // namespace tessera::cuda::fa3::backward
