// SPDX-License-Identifier: Apache-2.0
//
// The main loop of a consumer warpgroup at head_dim 128 and in general shapes. It is the inner loop of Algorithm 2 of
// the FlashAttention-2 paper, for 64 of the CTA's keys, over the query blocks that see them. consumer.cuh has a
// thread's state, common/mma.cuh the five GEMMs. S and dP are transposed: rows are keys.
//
// S of a query block is computed one step ahead, and its dK overlaps with the exponentials of the next step. A step of
// run(), in the order of the code:
//
//   make_ds()               S^T = K Q^T is complete. Starts dP^T = V dO^T, and computes half of P^T = exp2(S^T - LSE)
//                           beside it. Computes the other half beside dS^T = P^T (dP^T - delta): exponentials have a
//                           unit of their own. Starts dV += P^T dO, and stores dS to shared memory beside it, since dQ
//                           needs the keys of both warpgroups
//   start_s()               starts S^T of the next step
//   the barrier             waits for the other warpgroup's dS
//   start_dq(), start_dk()  start dQ = dS K, half of its columns, and dK += dS^T Q. Then waits for S and dQ, and
//                           store_dq() leaves dQ to the producer thread that adds it up
#pragma once

#include "cuda/fa3/backward/main/consumer.cuh"
#include "cuda/fa3/backward/main/dq_accumulate.cuh"

namespace tessera::cuda::fa3::backward {

template <class T, Config kConfig>
struct Consumer : ConsumerThread<T, kConfig> {
    using Base = ConsumerThread<T, kConfig>;
    using Base::arrive, Base::d_o, Base::first_column, Base::first_query, Base::stats_of_chunk, Base::is_unmasked,
        Base::kPairs, Base::lane, Base::launch, Base::q, Base::row, Base::shared, Base::steps, Base::warpgroup;
    static constexpr int kBlockQ = kConfig.block_q;
    static constexpr bool kGeneral = kConfig.scores == Scores::general, kCapped = kConfig.scores == Scores::capped;
    using StepMod = typename Base::StepMod;
    static_assert(kBlockQ == Config::kRows);

    DropoutBitsTransposed kept;  ///< general shapes: which of the thread's pairs dropout keeps
    bool writes_dq = false;      ///< KeyBlock::writes_dq

    float dk[kConfig.head_dim / 2];      ///< [64 keys][head_dim]
    float dv[kConfig.head_dim_v / 2];    ///< [64 keys][head_dim_v]
    float s[kPairs];                     ///< S^T, then P^T: [64 keys][kBlockQ]
    float dp[kPairs];                    ///< dP^T, then dS^T
    std::uint32_t p[kBlockQ / 16][4];    ///< P^T in 16 bits
    std::uint32_t ds[kBlockQ / 16][4];   ///< dS^T in 16 bits
    float dq[kConfig.dq_columns() / 2];  ///< [64 queries][dq_columns]

    __device__ __forceinline__ void run();
    /// Has the last step's dQ been stored but not signaled (signal_dq)?
    __device__ __forceinline__ bool has_pending_dq() const { return steps > 0 && !writes_dq; }
    /// Releases Q of the last step, whose dK is done.
    __device__ __forceinline__ void release_q(int last_q) {
        ptx::warpgroup_fence_operand(dk);
        ptx::warpgroup_fence_operand(ds);
        if (steps > 0) arrive(shared.q_ring.empty[last_q]);
    }
    __device__ __forceinline__ void add_nonfinite_keys();
    __device__ __forceinline__ void make_ds();
    __device__ __forceinline__ void make_ds_with_score_mod();
    /// P^T of a chunk of 8 elements from S^T.
    __device__ __forceinline__ void exponentiate_chunk(const StepMod& mod, int chunk, const float4& minus_lse) {
#pragma unroll
        for (int i = 8 * chunk; i < 8 * chunk + 8; i += 2) {
            s[i] = Base::ordinary_probability(mod, i, s[i], element_of(minus_lse, i));
            s[i + 1] = Base::ordinary_probability(mod, i + 1, s[i + 1], element_of(minus_lse, i + 1));
        }
    }
    /// dS^T of a chunk from P^T and dP^T; rounds both to 16 bits.
    __device__ __forceinline__ void score_gradients_of_chunk(const StepMod& mod, int chunk, const float4& delta,
                                                             float factor) {
#pragma unroll
        for (int i = 8 * chunk; i < 8 * chunk + 8; i += 2) {
            const float first = Base::gradient_of_pair(mod, i, s[i], dp[i], element_of(delta, i), factor);
            const float second =
                Base::gradient_of_pair(mod, i + 1, s[i + 1], dp[i + 1], element_of(delta, i + 1), factor);
            ds[i / 8][i / 2 % 4] = ptx::pack_finite<T>(first, second);
            p[i / 8][i / 2 % 4] = ptx::pack_finite<T>(mod.keeps(i) ? s[i] : 0.0F, mod.keeps(i + 1) ? s[i + 1] : 0.0F);
        }
    }
    __device__ __forceinline__ void exponentiate_with_score_mod();
    template <bool kMasked>
    __device__ __forceinline__ void score_gradients(const StepMod& mod, float4 (&delta)[Base::kChunks]);
    /// Stores dS^T to shared memory, for the dQ of both warpgroups.
    __device__ __forceinline__ void publish_ds() {
        Base::store_ds(ds, Base::ds_address(warpgroup));
        ptx::fence_proxy_async();
    }

    __device__ __forceinline__ std::uint64_t k_operand() const {
        return uniform(row_descriptor(&shared.k[0][64 * warpgroup]));
    }
    __device__ __forceinline__ std::uint64_t v_operand() const {
        return uniform(row_descriptor(&shared.v[0][64 * warpgroup]));
    }
    /// K as the B operand of dQ: this warpgroup's columns.
    __device__ __forceinline__ std::uint64_t k_columns() const {
        const int column = kConfig.dq_columns() * warpgroup;
        return uniform(
            column_descriptor(&shared.k[column / kPanelColumns][0][column % kPanelColumns], kConfig.block_kv));
    }
    __device__ __forceinline__ void start_s() {
        start_scores<T, kConfig, kConfig.head_dim>(s, k_operand(), uniform(row_descriptor(shared.q[q.index()])));
    }
    __device__ __forceinline__ void start_dp() {
        start_scores<T, kConfig, kConfig.head_dim_v>(dp, v_operand(), uniform(row_descriptor(shared.d_o[d_o.index()])));
    }
    __device__ __forceinline__ void start_dv() {
        start_gradient<T, kConfig.head_dim_v, kBlockQ>(dv, p,
                                                       uniform(column_descriptor(shared.d_o[d_o.index()], kBlockQ)));
    }
    __device__ __forceinline__ void start_dk(int q_stage) {
        start_gradient<T, kConfig.head_dim, kBlockQ>(dk, ds, uniform(column_descriptor(shared.q[q_stage], kBlockQ)));
    }
    __device__ __forceinline__ void start_dq() {
        backward::start_dq<T, kConfig, kConfig.dq_columns()>(dq, uniform(row_descriptor(shared.ds[steps % 2][0])),
                                                             k_columns());
    }
};

/// Adds to S^T the products of Q with the NaN and infinities that zero_nonfinite_keys() has taken out of K. It is rare
/// and slow.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::add_nonfinite_keys() {
    const KeyBlock<kConfig>& block = Base::block();
    const ForwardParams& p = launch.params.forward;
    const int batch = p.cu_seqlens_q != nullptr ? 0 : block.batch;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int key = block.n * kConfig.block_kv + row() + 8 * r;
        if (!Base::is_nonfinite_key(r) || key >= block.schedule.len_kv()) continue;
        const T* elements = reinterpret_cast<const T*>(p.k.data) + batch * p.k.batch + block.kv_head * p.k.head +
                            (std::int64_t{block.first_kv} + key) * p.k.row;
#pragma unroll 1
        for (int column = 0; column < p.head_dim; ++column) {
            const float element = static_cast<float>(elements[column * p.k.column]);
            if (isfinite(element)) continue;
            const auto* panel = reinterpret_cast<const char*>(shared.q[q.index()][column / kPanelColumns]);
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                if (row_of(i) != r) continue;
                const int query = first_column() + column_of(i);
                const int offset = swizzled(query, column % kPanelColumns / 8) + 2 * (column % 8);
                s[i] = fmaf(static_cast<float>(*reinterpret_cast<const T*>(panel + offset)), element, s[i]);
            }
        }
    }
}

/// Computes from S^T: P^T in 16 bits after dropout, and in s P^T times the derivative of the softcap.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::exponentiate_with_score_mod() {
    const ForwardParams& params = launch.params.forward;
    const ScoreMod score_mod = Base::score_mod();
    const int key = Base::key();
    const int column = first_column();
    const int query = Base::query(0);
    const bool full = is_unmasked();
    const PairMask mask(Base::block().schedule, key, query);
    kept = score_mod.kept(query, key, lane());
    BiasPairs bias;
    if (score_mod.by_pairs) {
        const int warp_key = Base::block().n * kConfig.block_kv + Base::first_row() + 16 * Base::warp();
        load_bias_pairs(bias, params, score_mod.bias, first_query(), warp_key, lane());
    }
    if (any_lane(Base::lacks_keys())) add_nonfinite_keys();
#pragma unroll
    for (int i = 0; i < kPairs; i += 2) {
        const float4 minus_lse = stats_of_chunk(&RowStats::minus_lse, i / 8, column);
        const float4 inverse_sum = stats_of_chunk(&RowStats::inverse_sum, i / 8, column);
        float kept_p[2], own_bias[2] = {0, 0};
        if (score_mod.by_pairs) {
            const float2 pair = bias_of_elements<T>(bias, i);
            own_bias[0] = pair.x, own_bias[1] = pair.y;
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float& score = s[i + e];
            const float derivative =
                score_mod.template transform<T, kConfig.scores>(score, query + column_of(i + e), key + 8 * row_of(i));
            score += own_bias[e];
            float p_of_pair = probability<kConfig.scores>(score, launch, element_of(minus_lse, i + e),
                                                          element_of(inverse_sum, i + e));
            if (!full && !mask.sees(i + e)) p_of_pair = 0;
            const bool is_kept = kept(i / 4, i % 4 + e);
            // In fp16 the epilogue multiplies dV by keep_scale: P over 1 would overflow.
            if constexpr (kFp16Scaled<T>) kept_p[e] = is_kept ? p_of_pair : 0.0F;
            else kept_p[e] = is_kept ? p_of_pair * params.keep_scale : 0.0F;
            score = p_of_pair * derivative;
        }
        p[i / 8][i / 2 % 4] = ptx::pack_finite<T>(kept_p[0], kept_p[1]);
    }
}

/// dS^T from P^T and dP^T; rounds both to 16 bits. kMasked: some pair may be masked.
template <class T, Config kConfig>
template <bool kMasked>
__device__ __forceinline__ void Consumer<T, kConfig>::score_gradients(const StepMod& mod,
                                                                      float4 (&delta)[Base::kChunks]) {
    if constexpr (kGeneral) {
        const float keep_scale = launch.params.forward.keep_scale;
#pragma unroll
        for (int i = 0; i < Base::kPairs; ++i) dp[i] = kept(i / 4, i % 4) ? dp[i] * keep_scale : 0.0F;
    }
    Base::template score_gradients<kMasked>(s, dp, delta, mod);
    Base::pack(ds, dp);
    if constexpr (!kGeneral) {
        ptx::warpgroup_fence_operand(ds);
        Base::pack_kept(p, s, mod);
    }
}

/// Computes dS^T from S^T, which is complete, stores it to shared memory and starts dV. dK of the last step and dP^T
/// overlap with the first half of the exponentials. The other half overlaps with dS^T, because both warpgroups share
/// the exponential units and keep them busy for as long as dP^T takes.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::make_ds() {
    constexpr int kChunks = Base::kChunks, kAhead = kChunks / 2;  // chunks before the wait for dP^T
    const bool some_nonfinite = Base::some_nonfinite();
    const bool full = is_unmasked();
    const bool plain = !kCapped && any_lane((Base::flags & (Base::kUnmasked | Base::kRareScores)) == Base::kUnmasked);
    // The mask of dropout is drawn first, in registers that LSE would take.
    constexpr bool kReadsEarly = kConfig.scores != Scores::dropout && !kCapped;
    float4 minus_lse[kChunks], delta[kChunks];
    Base::add_bias(s);
    if constexpr (kReadsEarly) Base::read_stats(minus_lse, &RowStats::minus_lse);
    Base::wait_for_do();
    start_dp();
    const StepMod mod = Base::step_score_mod();
    if constexpr (!kCapped) {
        if constexpr (!kReadsEarly) Base::read_stats(minus_lse, &RowStats::minus_lse);
        if (plain) {
#pragma unroll
            for (int chunk = 0; chunk < kAhead; ++chunk) exponentiate_chunk(mod, chunk, minus_lse[chunk]);
        } else {
            Base::exponentiate(s, minus_lse, mod);
        }
    }
    if (has_pending_dq()) signal_dq(*this);  // for the last step; by now its fence has nothing to wait for
    ptx::wgmma_wait<1>();
    release_q(q.previous_index());
    // After this wait, since delta, or the softcap's arithmetic, takes the registers of the last dS.
    if constexpr (kCapped) {
        if (any_lane((Base::flags & Base::kRareScores) != 0) && any_lane(Base::lacks_keys())) add_nonfinite_keys();
        cap_scores(launch.softcap, s);
    } else {
        Base::read_stats(delta, &RowStats::delta);
    }
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(dp);
    if (plain) {
        scale_deltas<T>(delta, Base::ds_factor());
        const float factor = Base::dp_factor();
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const int next = chunk + kAhead;
            if (next < kChunks) exponentiate_chunk(mod, next, minus_lse[next]);
            score_gradients_of_chunk(mod, chunk, delta[chunk], factor);
        }
    } else if (full) {
        score_gradients<false>(mod, delta);
    } else {
        score_gradients<true>(mod, delta);
    }
    if (some_nonfinite) Base::zero_nonfinite_queries();
    start_dv();  // dS is stored beside it
    publish_ds();
}

/// make_ds() of general shapes. Registers are short, so dV += P^T dO is done before dS^T is computed.
template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::make_ds_with_score_mod() {
    Base::wait_for_do();
    ptx::wgmma_wait<0>();
    release_q(q.previous_index());
    exponentiate_with_score_mod();
    if (Base::some_nonfinite()) Base::zero_nonfinite_queries();
    start_dv();
    start_dp();
    if (has_pending_dq()) signal_dq(*this);
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(dp);
    ptx::warpgroup_fence_operand(dv);
    ptx::warpgroup_fence_operand(p);
    float4 delta[Base::kChunks];
    Base::read_stats(delta, &RowStats::delta);
    if (is_unmasked()) score_gradients<false>(StepMod{}, delta);
    else score_gradients<true>(StepMod{}, delta);
    publish_ds();
}

template <class T, Config kConfig>
__device__ __forceinline__ void Consumer<T, kConfig>::run() {
    int left = Base::count_steps();
    if constexpr (kConfig.may_write_dq()) writes_dq = any_lane(Base::block().writes_dq);
    prologue(*this);
    if (left == 0) return;
    int last_q = -1;  // stage of the Q that dK of the last step reads
#pragma unroll 1
    while (true) {
        if constexpr (kGeneral) make_ds_with_score_mod();
        else make_ds();
        --left;
        last_q = q.index();
        q.advance();
        if (left > 0) wait_for(shared.q_ring.full[q.index()], q.phase());
        start_s();  // for the next step; after the last one it reads stale data
        // After the barrier both halves of dS are stored. The other stage of dS is free: its dQ was done before this
        // step.
        ptx::named_barrier_sync(kConsumersBarrier, 128 * Config::kConsumers);
        if constexpr (!kGeneral) {
            ptx::wgmma_wait<1>();
            ptx::warpgroup_fence_operand(dv);
            ptx::warpgroup_fence_operand(p);
        }
        arrive(shared.do_ring.empty[d_o.index()]);
        start_dq();
        start_dk(last_q);
        Base::read_flags();
        ptx::wgmma_wait<1>();
        ptx::warpgroup_fence_operand(s);
        ptx::warpgroup_fence_operand(dq);
        if (writes_dq) {
            if constexpr (kConfig.may_write_dq()) store_or_write_dq(*this, dq, last_q);
        } else {
            Base::wait_for_dq_buffer();
            store_dq(*this, dq);
        }
        ++steps;
        d_o.advance();
        if (left == 0) break;
    }
    if (!writes_dq) signal_dq(*this);
}

}  // namespace tessera::cuda::fa3::backward
