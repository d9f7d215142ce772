// SPDX-License-Identifier: Apache-2.0
//
// The main loop where dK and dV of 64 keys fill the registers of a warpgroup each: one makes P and dV, the other one dS
// and dK, of the same 64 keys, and each its columns of dQ. They are half a step apart: scores and weights of the next
// block of queries are made while dK of this one is.
#pragma once

#include "cuda/fa3/backward/consumer.cuh"

namespace tessera::cuda::fa3::backward {

/// What both have: columns of dQ.
template <class T, Config kConfig>
struct RoleThread : ConsumerThread<kConfig> {
    using Base = ConsumerThread<kConfig>;
    using Base::launch, Base::shared, Base::steps, Base::q, Base::d_o, Base::kPairs;

    float dq[kConfig.dq_columns() / 2];  ///< [64 queries][64 columns]

    __device__ __forceinline__ bool is_masked() const { return !Base::is_full(); }
    __device__ __forceinline__ PairMask mask() const {
        return {shared.block.blocks, shared.block.n * kConfig.block_kv + Base::row(),
                Base::first_query() + Base::first_column()};
    }
    /// Part 0 ... of this warpgroup's columns, which begin at slab kFirst.
    template <int kFirst>
    __device__ __forceinline__ void start_dq(int part) {
        backward::start_dq<T, kConfig, kConfig.dq_columns()>(
            dq, uniform(row_descriptor(shared.ds[steps % 2])),
            uniform(column_descriptor(shared.k[kFirst + part], kConfig.block_kv)));
    }
};

/// Makes P^T = exp2(S^T - LSE) and dV.
template <class T, Config kConfig>
struct WeightsConsumer : RoleThread<T, kConfig> {
    using Base = RoleThread<T, kConfig>;
    using Base::launch, Base::shared, Base::steps, Base::q, Base::d_o, Base::dq, Base::kPairs;
    static constexpr int kParts = kConfig.dq_parts(0);

    float dv[kConfig.head_dim_v / 2];          ///< [64 keys][head_dim_v]
    float s[kPairs];                           ///< S^T, then P^T: [64 keys][64 queries]
    std::uint32_t p[kConfig.block_q / 16][4];  ///< P^T in 16 bits

    __device__ __forceinline__ void start_s() {
        start_scores<T, kConfig, kConfig.head_dim>(s, uniform(row_descriptor(shared.k[0])),
                                                   uniform(row_descriptor(shared.q[q.stage])));
    }
    /// P^T of S^T, which is there.
    __device__ __forceinline__ void make_p(const float4 (&minus_lse)[Base::kEarly]) {
        ptx::keep_in_place(s);
        Base::exponentiate(s, minus_lse);
        if (!Base::is_masked()) return;
        const PairMask mask = Base::mask();
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            if (!mask.sees(i)) s[i] = 0;
        }
    }
    /// To the other warpgroup, in fp32; and in 16 bits for dV.
    __device__ __forceinline__ void hand_over() {
        auto* out = reinterpret_cast<float4*>(shared.p) + threadIdx.x % 128;
#pragma unroll
        for (int j = 0; j < kPairs / 4; ++j) {
            out[128 * j] = make_float4(s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]);
        }
        Base::arrive(shared.p_full);
#pragma unroll
        for (int i = 0; i < kPairs; i += 2) p[i / 8][i / 2 % 4] = ptx::pack<T>(s[i], s[i + 1]);
    }
    __device__ __forceinline__ void run();
};

template <class T, Config kConfig>
__device__ __forceinline__ void WeightsConsumer<T, kConfig>::run() {
    int left = Base::count_steps();
#pragma unroll
    for (float& element : dv) element = 0;
    if (left == 0) return;
    wait_for(shared.kv_full, 0);
    Base::template clean_keys<T>();
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
        Base::wait_for_do();
        if (Base::some_special()) Base::template clean_queries<T>();
        Base::arrive(shared.q_ring.empty[q.stage]);
        start_key_gradient<T, kConfig.head_dim_v, kConfig.block_q>(
            dv, p, uniform(column_descriptor(shared.d_o[d_o.stage], kConfig.block_q)));
        --left;
        q.advance();
        if (left > 0) Base::wait_for_q();
        start_s();  // of the next step; after the last, of whatever lies there, and so is what follows from it
        Base::read_flags();
        Base::read_early(minus_lse, &RowStats::minus_lse);
        ptx::wgmma_wait<1>();
        ptx::keep_in_place(dv);
        ptx::keep_in_place(p);
        Base::arrive(shared.do_ring.empty[d_o.stage]);
        wait_for(shared.ds_full, steps % 2);
        Base::template start_dq<0>(0);
        ptx::wgmma_wait<1>();
        make_p(minus_lse);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            Base::wait_for_dq_memory(kParts, part);
            ptx::wgmma_wait<0>();
            ptx::keep_in_place(dq);
            Base::store_dq(dq);
            if (part + 1 < kParts) Base::template start_dq<0>(part + 1);
            if (part == 0) hand_over();  // dS of this step is there: nobody reads its P any more
        }
        ++steps;
        d_o.advance();
        if (left == 0) break;
    }
}

/// Makes dS^T = P^T (dP^T - delta) and dK.
template <class T, Config kConfig>
struct ScoresConsumer : RoleThread<T, kConfig> {
    using Base = RoleThread<T, kConfig>;
    using Base::launch, Base::shared, Base::steps, Base::q, Base::d_o, Base::dq, Base::kPairs;
    static constexpr int kParts = kConfig.dq_parts(1);
    static constexpr int kFirstPart = kConfig.dq_parts_before(1);

    float dk[kConfig.head_dim / 2];             ///< [64 keys][head_dim]
    float dp[kPairs];                           ///< dP^T, then dS^T: [64 keys][64 queries]
    std::uint32_t ds[kConfig.block_q / 16][4];  ///< dS^T in 16 bits

    __device__ __forceinline__ void start_dp() {
        start_scores<T, kConfig, kConfig.head_dim_v>(dp, uniform(row_descriptor(shared.v[0])),
                                                     uniform(row_descriptor(shared.d_o[d_o.stage])));
    }
    /// dS^T from dP^T, which is there, and P^T of the other warpgroup.
    __device__ __forceinline__ void make_ds(const float4 (&deltas)[Base::kEarly]) {
        static_assert(Base::kEarly == kPairs / 8);
        const auto* weights = reinterpret_cast<const float4*>(shared.p) + threadIdx.x % 128;
#pragma unroll
        for (int chunk = 0; chunk < kPairs / 8; ++chunk) {
            const float4& delta = deltas[chunk];
#pragma unroll
            for (int j = 2 * chunk; j < 2 * chunk + 2; ++j) {
                const float4 p = weights[128 * j];
                dp[4 * j] = p.x * (dp[4 * j] - of_element(delta, 4 * j));
                dp[4 * j + 1] = p.y * (dp[4 * j + 1] - of_element(delta, 4 * j + 1));
                dp[4 * j + 2] = p.z * (dp[4 * j + 2] - of_element(delta, 4 * j + 2));
                dp[4 * j + 3] = p.w * (dp[4 * j + 3] - of_element(delta, 4 * j + 3));
            }
        }
        if (Base::is_masked()) {
            const PairMask mask = Base::mask();
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                if (!mask.sees(i)) dp[i] = 0;
            }
        }
#pragma unroll
        for (int i = 0; i < kPairs; i += 2) ds[i / 8][i / 2 % 4] = ptx::pack<T>(dp[i], dp[i + 1]);
    }
    __device__ __forceinline__ void run();
};

template <class T, Config kConfig>
__device__ __forceinline__ void ScoresConsumer<T, kConfig>::run() {
    int left = Base::count_steps();
#pragma unroll
    for (float& element : dk) element = 0;
    if (left == 0) return;
    wait_for(shared.kv_full, 0);
    Base::template clean_keys<T>();
#pragma unroll 1
    while (true) {
        Base::wait_for_q();
        Base::wait_for_do();
        start_dp();
        Base::read_flags();
        float4 deltas[Base::kEarly];
        Base::read_early(deltas, &RowStats::delta);
        const std::uint32_t to = Base::ds_address(0);
        wait_for(shared.p_full, steps % 2);
        ptx::wgmma_wait<0>();
        ptx::keep_in_place(dp);
        make_ds(deltas);
        if (Base::some_special()) Base::template clean_queries<T>();
        Base::arrive(shared.do_ring.empty[d_o.stage]);
        Base::store_ds(ds, to);  // the stage is free: P of this step came after the other warpgroup's dQ before
        Base::arrive(shared.ds_full);
        ptx::named_barrier_sync(kWarpgroupBarrier + 1, 128);
        Base::template start_dq<kFirstPart>(0);
        start_key_gradient<T, kConfig.head_dim, kConfig.block_q>(
            dk, ds, uniform(column_descriptor(shared.q[q.stage], kConfig.block_q)));
        --left;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            Base::wait_for_dq_memory(kParts, part);
            if (part == 0) ptx::wgmma_wait<1>();
            else ptx::wgmma_wait<0>();
            ptx::keep_in_place(dq);
            Base::store_dq(dq);
            if (part + 1 < kParts) Base::template start_dq<kFirstPart>(part + 1);
        }
        ptx::wgmma_wait<0>();
        ptx::keep_in_place(dk);
        ptx::keep_in_place(ds);
        Base::arrive(shared.q_ring.empty[q.stage]);
        q.advance();
        ++steps;
        d_o.advance();
        if (left == 0) break;
    }
}

}  // namespace tessera::cuda::fa3::backward
