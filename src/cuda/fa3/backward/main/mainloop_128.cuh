// SPDX-License-Identifier: Apache-2.0
//
// The main loop of a consumer warpgroup at head_dim 128 and in general shapes: the inner loop of Algorithm 2 of the
// FlashAttention-2 paper, for 64 of the thread block's keys, over the blocks of 64 queries that see them. Said before:
// consumer.cuh, what a thread knows; products.cuh, the five products. S and dP are transposed, rows are keys.
//
// The paper's lines in the order in which they are done here. S of a block of queries is multiplied a turn ahead, and
// dK of it is under way until the next turn's exponentials are done. A turn of run():
//
//   make_ds()               S^T is there (S = Q K^T). dP^T = V dO^T is started, and half of P^T = exp2(S^T - LSE) made
//                           beside it; the other half beside dS^T = P^T (dP^T - delta), which needs other units. dV +=
//                           P^T dO is started, and dS stored to shared memory beside it, since dQ takes the keys of
//                           both warpgroups
//   start_s()               the next block's scores
//   the barrier             the other warpgroup's dS is there, too
//   start_dq(), start_dk()  dQ = dS K, half of its columns, and dK += dS^T Q. S and dQ are waited for, and put_dq()
//                           leaves dQ to the producer's warp that adds it up
#pragma once

#include "cuda/fa3/backward/main/consumer.cuh"
#include "cuda/fa3/backward/main/score_mod.cuh"

namespace tessera::cuda::fa3::backward {

template <class T, Config kConfig>
struct Consumer : ConsumerThread<T, kConfig> {
    using Base = ConsumerThread<T, kConfig>;
    using Base::arrive, Base::d_o, Base::first_column, Base::first_query, Base::four_of, Base::is_full, Base::kPairs,
        Base::lane, Base::launch, Base::q, Base::row, Base::shared, Base::steps, Base::warpgroup;
    static constexpr int kBlockQ = kConfig.block_q;
    static_assert(kBlockQ == Config::kRows);

    DropoutBitsTransposed kept;  ///< by dropout, of the thread's pairs
    bool finishes = false;       ///< KeyBlock::finishes

    float dk[kConfig.head_dim / 2];      ///< [64 keys][head_dim]
    float dv[kConfig.head_dim_v / 2];    ///< [64 keys][head_dim_v]
    float s[kPairs];                     ///< S^T, then P^T: [64 keys][kBlockQ]
    float dp[kPairs];                    ///< dP^T, then dS^T
    std::uint32_t p[kBlockQ / 16][4];    ///< P^T in 16 bits
    std::uint32_t ds[kBlockQ / 16][4];   ///< dS^T in 16 bits
    float dq[kConfig.dq_columns() / 2];  ///< [64 queries][dq_columns]

    __device__ __forceinline__ void run();
    /// Is there a dQ of the step before, of which add_dq() does not know yet?
    __device__ __forceinline__ bool gives_dq() const {
        if constexpr (!kConfig.goes_on()) return steps > 0;
        else return agreed((Base::flags & Base::kLater) != 0) && !finishes;
    }
    /// dK of the step before is done, and nothing reads its Q any more.
    __device__ __forceinline__ void release_q(int q_before) {
        ptx::warpgroup_fence_operand(dk);
        ptx::warpgroup_fence_operand(ds);
        if (steps > 0) arrive(shared.q_ring.empty[q_before]);
    }
    __device__ __forceinline__ void make_ds();
    __device__ __forceinline__ void make_ds_with_features();
    /// P^T of a chunk of 8 elements from S^T.
    __device__ __forceinline__ void exponentiate_chunk(int chunk, const float4& minus_lse) {
#pragma unroll
        for (int i = 8 * chunk; i < 8 * chunk + 8; ++i) {
            s[i] = ptx::exp2_approx(fmaf(s[i], launch.scale_log2, of_element(minus_lse, i)));
        }
    }
    /// And dS^T from P^T and dP^T; both into 16 bits.
    __device__ __forceinline__ void score_gradients_of_chunk(int chunk, const float4& delta, float factor) {
#pragma unroll
        for (int i = 8 * chunk; i < 8 * chunk + 8; i += 2) {
            const float first = score_gradient<T>(s[i], dp[i], of_element(delta, i), factor);
            const float second = score_gradient<T>(s[i + 1], dp[i + 1], of_element(delta, i + 1), factor);
            ds[i / 8][i / 2 % 4] = ptx::pack_finite<T>(first, second);
            p[i / 8][i / 2 % 4] = ptx::pack_finite<T>(s[i], s[i + 1]);
        }
    }
    __device__ __forceinline__ void exponentiate_with_features();
    template <bool kMasked>
    __device__ __forceinline__ void score_gradients(float4 (&delta)[Base::kEarly]);
    /// K is not read any more.
    __device__ __forceinline__ void leave_keys() {
        if constexpr (kConfig.goes_on()) arrive(shared.on.k_empty);
    }
    /// dS^T into shared memory, for the dQ of both warpgroups.
    __device__ __forceinline__ void leave_ds() {
        Base::store_ds(ds, Base::ds_address(warpgroup));
        ptx::fence_proxy_async();
    }

    __device__ __forceinline__ std::uint64_t k_operand() const {
        return uniform(row_descriptor(&shared.k[0][64 * warpgroup]));
    }
    __device__ __forceinline__ std::uint64_t v_operand() const {
        return uniform(row_descriptor(&shared.v[0][64 * warpgroup]));
    }
    /// K as the second factor of dQ: this warpgroup's columns.
    __device__ __forceinline__ std::uint64_t k_columns() const {
        const int column = kConfig.dq_columns() * warpgroup;
        return uniform(
            column_descriptor(&shared.k[column / kPanelColumns][0][column % kPanelColumns], kConfig.block_kv));
    }
    __device__ __forceinline__ void start_s() {
        start_scores<T, kConfig, kConfig.head_dim>(s, k_operand(), uniform(row_descriptor(shared.q[q.stage])));
    }
    __device__ __forceinline__ void start_dp() {
        start_scores<T, kConfig, kConfig.head_dim_v>(dp, v_operand(), uniform(row_descriptor(shared.d_o[d_o.stage])));
    }
    __device__ __forceinline__ void start_dv() {
        start_key_gradient<T, kConfig.head_dim_v, kBlockQ>(dv, p,
                                                           uniform(column_descriptor(shared.d_o[d_o.stage], kBlockQ)));
    }
    __device__ __forceinline__ void start_dk(int q_stage) {
        start_key_gradient<T, kConfig.head_dim, kBlockQ>(dk, ds,
                                                         uniform(column_descriptor(shared.q[q_stage], kBlockQ)));
    }
    __device__ __forceinline__ void start_dq() {
        backward::start_dq<T, kConfig, kConfig.dq_columns()>(dq, uniform(row_descriptor(shared.ds[steps % 2][0])),
                                                             k_columns());
    }
};

/// P^T in 16 bits from S^T, with dropout; in s, P^T times the derivative of the softcap.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::exponentiate_with_features() {
    const ForwardParams& params = launch.params.forward;
    const KeyBlock<kConfig>& block = Base::block();
    const Features features(params, block.blocks, block.batch, shared.head[q.stage]);
    const int key = block.n * kConfig.block_kv + row();
    const int column = first_column();
    const int query = first_query() + column;
    const bool full = is_full();
    const PairMask mask(block.blocks, key, query);
    kept = features.kept(query, key, lane());
#pragma unroll
    for (int i = 0; i < kPairs; i += 2) {
        const float4 minus_lse = four_of(&RowStats::minus_lse, i / 8, column);
        const float4 inverse_sum = four_of(&RowStats::inverse_sum, i / 8, column);
        float weights[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float& score = s[i + e];
            const float derivative = features.transform(score, query + column_of(i + e), key + 8 * row_of(i));
            float p_of_pair =
                weight(score, launch.scale_log2, of_element(minus_lse, i + e), of_element(inverse_sum, i + e));
            if (!full && !mask.sees(i + e)) p_of_pair = 0;
            const bool is_kept = kept(i / 4, i % 4 + e);
            // In fp16 dV is multiplied by keep_scale in the end: weights over 1 would not fit.
            if constexpr (kHeld<T>) weights[e] = is_kept ? p_of_pair : 0.0F;
            else weights[e] = is_kept ? p_of_pair * params.keep_scale : 0.0F;
            score = p_of_pair * derivative;
        }
        p[i / 8][i / 2 % 4] = ptx::pack_finite<T>(weights[0], weights[1]);
    }
}

/// dS^T from P^T and dP^T; both into 16 bits. kMasked: some pair may be hidden.
template <class T, Config kConfig>
template <bool kMasked>
__device__ __forceinline__ void Consumer<T, kConfig>::score_gradients(float4 (&delta)[Base::kEarly]) {
    if constexpr (kConfig.general) {
        const float keep_scale = launch.params.forward.keep_scale;
#pragma unroll
        for (int i = 0; i < Base::kPairs; ++i) dp[i] = kept(i / 4, i % 4) ? dp[i] * keep_scale : 0.0F;
    }
    Base::template score_gradients<kMasked>(s, dp, delta);
    Base::pack(ds, dp);
    if constexpr (!kConfig.general) {
        ptx::warpgroup_fence_operand(ds);
        Base::pack(p, s);
    }
}

/// From S^T, which is there, to dS^T in shared memory and dV under way. dK of the step before and dP^T run beside the
/// first exponentials. The others share their time with dS^T: exponentials have a unit of their own, which is busy for
/// as long as dP^T takes, since the other warpgroup has its exponentials now, too.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::make_ds() {
    constexpr int kChunks = Base::kEarly, kAhead = kChunks / 2;  // those before dP^T is waited for
    const bool some_nonfinite = Base::some_nonfinite();
    const bool full = is_full();
    const bool plain = agreed((Base::flags & (Base::kFull | Base::kLarge)) == Base::kFull);
    float4 minus_lse[kChunks], delta[kChunks];
    Base::read_early(minus_lse, &RowStats::minus_lse);
    Base::wait_for_do();
    start_dp();
    if (plain) {
#pragma unroll
        for (int chunk = 0; chunk < kAhead; ++chunk) exponentiate_chunk(chunk, minus_lse[chunk]);
    } else {
        Base::exponentiate(s, minus_lse);
    }
    if (gives_dq()) Base::give_dq();  // of the step before: its fence has nothing to wait for any more
    Base::read_early(delta, &RowStats::delta);
    ptx::wgmma_wait<1>();
    release_q(q.stage_before());
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(dp);
    if (plain) {
        const float factor = Base::unit();
        hold_deltas<T>(delta, factor);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const int next = chunk + kAhead;
            if (next < kChunks) exponentiate_chunk(next, minus_lse[next]);
            score_gradients_of_chunk(chunk, delta[chunk], factor);
        }
    } else if (full) {
        score_gradients<false>(delta);
    } else {
        score_gradients<true>(delta);
    }
    if (some_nonfinite) Base::clean_queries();
    start_dv();  // dS is stored beside it
    leave_ds();
}

/// The same in general shapes. dP^T alone runs beside the exponentials, and P^T has become part of dV when dS^T is
/// made: registers are short.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::make_ds_with_features() {
    Base::wait_for_do();
    ptx::wgmma_wait<0>();
    release_q(q.stage_before());
    exponentiate_with_features();
    if (Base::some_nonfinite()) Base::clean_queries();
    start_dv();
    start_dp();
    if (gives_dq()) Base::give_dq();
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(dp);
    ptx::warpgroup_fence_operand(dv);
    ptx::warpgroup_fence_operand(p);
    float4 delta[Base::kEarly];
    Base::read_early(delta, &RowStats::delta);
    if (is_full()) score_gradients<false>(delta);
    else score_gradients<true>(delta);
    leave_ds();
}

template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::run() {
    int left = Base::count_steps();
    if constexpr (kConfig.may_finish()) finishes = agreed(Base::block().finishes);
    begin_steps(*this);
    // (With the answer of begin_steps() here, the loop has other instructions than were timed.)
    if (left == 0) return leave_keys();
    int q_before = -1;  // the stage of Q that dK of the step before is multiplied from
#pragma unroll 1
    while (true) {
        if constexpr (kConfig.general) make_ds_with_features();
        else make_ds();
        --left;
        q_before = q.stage;
        q.advance();
        if (left > 0) wait_for(shared.q_ring.full[q.stage], q.phase);
        start_s();  // of the next step; after the last, of whatever lies there
        // Both halves of dS are there. The other stage of dS is free: who comes here has multiplied the dQ before.
        ptx::named_barrier_sync(kConsumersBarrier, 128 * Config::kConsumers);
        if constexpr (!kConfig.general) {
            ptx::wgmma_wait<1>();
            ptx::warpgroup_fence_operand(dv);
            ptx::warpgroup_fence_operand(p);
        }
        arrive(shared.do_ring.empty[d_o.stage]);
        start_dq();
        start_dk(q_before);
        Base::read_flags(true);
        ptx::wgmma_wait<1>();
        ptx::warpgroup_fence_operand(s);
        ptx::warpgroup_fence_operand(dq);
        if (finishes) {
            if constexpr (kConfig.may_finish()) Base::put_dq_or_finish(dq, q_before);
        } else {
            Base::wait_for_dq_memory();
            Base::put_dq(dq);
        }
        ++steps;
        d_o.advance();
        if (left == 0) break;
    }
    if (!finishes) Base::give_dq();
    leave_keys();
}

}  // namespace tessera::cuda::fa3::backward
