// SPDX-License-Identifier: Apache-2.0
//
// The code that the three main loops share, for a thread of a consumer warpgroup: it reads the data of a step's
// queries, computes P^T from S^T, stores dS to shared memory, and sets NaN and infinities to 0.
#pragma once

#include "cuda/fa3/backward/common/fp16_scale.cuh"
#include "cuda/fa3/backward/common/mma.cuh"
#include "cuda/fa3/backward/common/nonfinite.cuh"
#include "cuda/fa3/backward/common/pair.cuh"
#include "cuda/fa3/backward/main/mask.cuh"
#include "cuda/fa3/backward/main/score_mod.cuh"
#include "cuda/fa3/backward/main/shared_storage.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/tma.cuh"

namespace tessera::cuda::fa3::backward {

/// The value of one element among those that ConsumerThread::stats_of_chunk() returns for its chunk.
__device__ __forceinline__ float element_of(const float4& four, int element) {
    if (element / 4 % 2 == 0) return element % 2 == 0 ? four.x : four.y;
    return element % 2 == 0 ? four.z : four.w;
}

template <class T, Config kConfig>
struct ConsumerThread : ConsumerState<kConfig> {
    using State = ConsumerState<kConfig>;
    using StepMod = StepScoreMod<kConfig.scores>;
    using State::d_o, State::q, State::steps;
    static constexpr int kPairs = Config::kRows / 2;                      ///< scores of a thread against 64 queries
    static constexpr int kChunks = kPairs / 8;                            ///< chunks of 8 of them
    static constexpr int kUnmasked = 1, kRareScores = 2, kNonfinite = 4;  ///< flags of a step
    /// Is S computed from K in shared memory, out of which zero_nonfinite_keys() takes NaN and infinities for dQ?
    static constexpr bool kScoresLackKeys = kConfig.has_dq_order_thread();

    const Launch& launch;
    Shared<kConfig>& shared;
    int warpgroup;  ///< 0, 1

    int own_thread = held_thread_index();
    int flags = 0;           ///< flags of the step
    float key_distance = 0;  ///< ALiBi: the distance from the thread's first key to query 0's diagonal

    /// threadIdx.x, through a shuffle, which the compiler cannot repeat: it would read the special register again in
    /// each step, which takes longer. With ALiBi at head_dim 128, and over 128, there is no register to hold it.
    __device__ __forceinline__ static int held_thread_index() {
        const int own = static_cast<int>(threadIdx.x);
        constexpr bool kHolds =
            kConfig.head_dim <= 64 || (kConfig.has_dq_order_thread() && kConfig.scores != Scores::alibi);
        return kHolds ? __shfl_sync(kAllLanes, own, own % 32) : own;
    }
    /// The thread's index in the CTA. Values derived from it are computed anew at each use: they would take registers
    /// over the loop.
    __device__ __forceinline__ unsigned thread() const { return static_cast<unsigned>(ptx::opaque(own_thread)); }
    __device__ __forceinline__ int lane() const { return static_cast<int>(thread() % 32); }
    /// The warp's index in the warpgroup; the four warps of the producer come before the consumers'.
    __device__ __forceinline__ int warp() const { return static_cast<int>(thread() / 32 % 4); }
    __device__ __forceinline__ int first_row() const { return kConfig.first_row(warpgroup); }
    /// The thread's first row of the key block.
    __device__ __forceinline__ int row() const {
        const unsigned own = thread();
        return first_row() + static_cast<int>(own / 32 % 4 * 16 + own % 32 / 4);
    }

    /// The thread's first column of a tile.
    __device__ __forceinline__ int first_column() const { return static_cast<int>(thread() % 4 * 2); }
    /// The step's first query.
    __device__ __forceinline__ int first_query() const { return shared.block_q[q.index()] * kConfig.block_q; }
    __device__ __forceinline__ KeyBlock<kConfig>& block() const { return shared.block; }
    /// Reads the flags of the step whose Q has arrived. The loops do so one GEMM early: an ordinary load from shared
    /// memory takes 100 to 200 clocks while MMAs read it.
    __device__ __forceinline__ void read_flags() {
        const int m = shared.block_q[q.index()];
        const Span& unmasked = block().unmasked[warpgroup];
        int large = 0, nonfinite = 0;
#pragma unroll
        for (const RowStats& stats : shared.stats[q.index()]) {
            large |= stats.some_large;
            nonfinite |= stats.some_nonfinite;
        }
        const bool rare = large != 0 || (kScoresLackKeys && unmasked.end < 0);
        flags = (m >= unmasked.begin && m < unmasked.end ? kUnmasked : 0) | (rare ? kRareScores : 0) |
                (nonfinite != 0 ? kNonfinite : 0);
    }
    /// Are all pairs of this warpgroup visible in the step?
    __device__ __forceinline__ bool is_unmasked() const { return any_lane((flags & kUnmasked) != 0); }
    __device__ __forceinline__ bool some_nonfinite() const { return any_lane((flags & kNonfinite) != 0); }

    /// A member of RowStats for the thread's columns of a chunk (element_of). `column`: the thread's first one.
    __device__ __forceinline__ float4 stats_of_chunk(const float (RowStats::*values)[Config::kRows], int chunk,
                                                     int column) const {
        const RowStats& stats = shared.stats[q.index()][chunk / 4];
        return reinterpret_cast<const float4&>((stats.*values)[16 * (chunk % 4) + 2 * column]);
    }
    /// Reads stats_of_chunk() of all chunks of 64 queries. `half`: which half of a step of 128 queries.
    __device__ __forceinline__ void read_stats(float4 (&out)[kChunks], const float (RowStats::*values)[Config::kRows],
                                               int half = 0) const {
        const int column = first_column();
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            out[chunk] = stats_of_chunk(values, kChunks * half + chunk, column);
        }
    }

    /// The factor of delta in dS (score_gradient).
    __device__ __forceinline__ float ds_factor() const {
        if constexpr (kFp16Scaled<T>) return block().ds_factor;
        else return 1;
    }

    __device__ __forceinline__ int count_steps() const {
        return uniform(StepIterator<false>(block().schedule, block().n, block().schedule.heads_per_split).count());
    }
    __device__ __forceinline__ void wait_for_q() { wait_for(shared.q_ring.full[q.index()], q.phase()); }
    __device__ __forceinline__ void wait_for_do() { wait_for(shared.do_ring.full[d_o.index()], d_o.phase()); }
    /// Waits until this step's dQ may be stored to shared memory.
    __device__ __forceinline__ void wait_for_dq_buffer() {
        wait_for(shared.dq_empty[warpgroup], (steps + 1) % 2, warpgroup);
    }
    /// The sequence position of the thread's element 0 among 64 queries: its query and its key.
    __device__ __forceinline__ int query(int half) const {
        return first_query() + Config::kRows * half + first_column();
    }
    __device__ __forceinline__ int key() const { return block().n * kConfig.block_kv + row(); }
    __device__ __forceinline__ ScoreMod score_mod() const {
        constexpr bool kBiasPairs = kConfig.head_dim <= 64;  // over 64 no registers are left for them
        return ScoreMod(launch.params.forward, block().schedule, block().batch, shared.head[q.index()],
                        kBiasPairs && launch.bias_by_pairs);
    }
    /// ALiBi and dropout of a step, in their own shapes. All lanes of a warp take part.
    __device__ __forceinline__ StepMod step_score_mod(int half = 0) const {
        if constexpr (kConfig.scores == Scores::alibi) {
            return {key_distance + static_cast<float>(first_query() + Config::kRows * half),
                    shared.stats[q.index()][half].slope};
        } else if constexpr (kConfig.scores == Scores::dropout) {
            return {score_mod().kept(query(half), key(), lane())};
        } else {
            return {};
        }
    }
    /// P of a pair from its element of Q K^T, except in rare rows.
    __device__ __forceinline__ float ordinary_probability(const StepMod& mod, int element, float s,
                                                          float minus_lse) const {
        return ptx::exp2_approx(fmaf(s, launch.scale_log2, mod.addend(element, minus_lse)));
    }
    /// Capped shapes: the derivative of the softcap, of a capped element of Q K^T.
    __device__ __forceinline__ float derivative_of_capped(float s) const {
        const float t = s * launch.softcap.inverse_cap;
        return fmaf(-t, t, 1.0F);
    }
    /// dS of a pair, from P before dropout.
    __device__ __forceinline__ static float gradient_of_pair(const StepMod& mod, int element, float p, float dp,
                                                             float delta, float factor) {
        if constexpr (kConfig.scores == Scores::dropout)
            return p * fmaf(mod.keeps(element) ? dp : 0.0F, factor, -delta);
        else return score_gradient<T>(p, dp, delta, factor);
    }
    /// The factor of dP in dS (gradient_of_pair).
    __device__ __forceinline__ float dp_factor() const {
        if constexpr (kConfig.scores == Scores::dropout) return ds_factor() * launch.params.forward.keep_scale;
        else return ds_factor();
    }
    /// Turns S^T, which is complete, into scores.
    __device__ __forceinline__ void add_bias(float (&s)[kPairs], int half = 0) const {
        if constexpr (kConfig.scores == Scores::bias) {
            const ForwardParams& p = launch.params.forward;
            const char* const head = bias_row(p.bias, block().batch, shared.head[q.index()], 0);
            if (launch.bias_by_pairs) {
                const int warp_key = block().n * kConfig.block_kv + first_row() + 16 * warp();
                add_bias_pairs<T>(s, p, head, first_query() + Config::kRows * half, warp_key, lane());
            } else {
                add_bias_elements<T>(s, p, head, query(half), key());
            }
        }
    }
    __device__ __forceinline__ void exponentiate(float (&s)[kPairs], const float4 (&minus_lse)[kChunks],
                                                 const StepMod& mod, int half = 0) const;
    __device__ __forceinline__ void capped_gradients(float (&s)[kPairs], float (&dp)[kPairs], int half) const;
    template <bool kMasked>
    __device__ __forceinline__ void score_gradients(float (&s)[kPairs], float (&dp)[kPairs], float4 (&delta)[kChunks],
                                                    const StepMod& mod, int half = 0) const;
    /// Rounds P of 64 queries to 16 bits, for dV. The epilogue applies dropout's factor of the kept ones.
    __device__ __forceinline__ static void pack_kept(std::uint32_t (&out)[Config::kRows / 16][4],
                                                     const float (&p)[kPairs], const StepMod& mod) {
#pragma unroll
        for (int i = 0; i < kPairs; i += 2) {
            out[i / 8][i / 2 % 4] = ptx::pack_finite<T>(mod.keeps(i) ? p[i] : 0.0F, mod.keeps(i + 1) ? p[i + 1] : 0.0F);
        }
    }
    /// Rounds 64 queries to 16 bits, as the A operand of a GEMM over queries.
    __device__ __forceinline__ static void pack(std::uint32_t (&out)[Config::kRows / 16][4],
                                                const float (&values)[kPairs]) {
#pragma unroll
        for (int i = 0; i < kPairs; i += 2) out[i / 8][i / 2 % 4] = ptx::pack_finite<T>(values[i], values[i + 1]);
    }
    __device__ __forceinline__ void zero_nonfinite_keys();
    __device__ __forceinline__ bool some_of_keys_nonfinite() const;
    /// Does S lack NaN and infinities of K?
    __device__ __forceinline__ bool lacks_keys() const { return block().unmasked[warpgroup].end < 0; }
    /// Does the thread's row r have a key with NaN or infinities, if lacks_keys()?
    __device__ __forceinline__ bool is_nonfinite_key(int r) const {
        const unsigned own = thread();
        return (shared.nonfinite_keys[warpgroup][own / 32 % 4] >> (own % 32 / 4 * 4 + r) & 1) != 0;
    }
    /// If lacks_keys(): sets the scores of such keys to -inf. A query that sees one has this score, or LSE and delta of
    /// NaN, which make P and dS NaN. (With a softcap, Consumer::add_nonfinite_keys() finds the score.)
    __device__ __forceinline__ void set_scores_of_nonfinite_keys(float (&s)[kPairs]) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool lacks = is_nonfinite_key(r);
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                if (row_of(i) == r && lacks) s[i] = -INFINITY;
            }
        }
    }
    __device__ __forceinline__ bool nonfinite_in_keys() const;
    /// Does `found` hold in one of the warpgroup's threads?
    __device__ __forceinline__ bool any_in_warpgroup(bool found) const {
        return any_lane(ptx::named_barrier_any(kWarpgroupBarrier + warpgroup, 128, found));
    }
    /// For prologue(): here K stays in shared memory; a consumer that keeps it in registers loads it.
    __device__ __forceinline__ void load_keys() {}
    __device__ __forceinline__ void zero_nonfinite_queries(int half = 0);
    __device__ __forceinline__ std::uint32_t ds_address(int panel_number) const;
    __device__ __forceinline__ static void store_ds(const std::uint32_t (&ds)[Config::kRows / 16][4], std::uint32_t to);
    /// One arrival for the warp, after all of its lanes.
    __device__ __forceinline__ void arrive(ptx::Mbarrier& barrier) const {
        __syncwarp();
        if (lane() == 0) ptx::mbarrier_arrive(barrier);
    }
};

/// The prologue of consumers that compute S, dV and dK: sets the gradients to 0, and computes the first scores if there
/// are steps. Meanwhile K is searched for NaN and infinities. If it has any, which is rare, they are set to 0 when
/// these scores are complete.
template <template <class, Config> class OfConsumer, class T, Config kConfig>
__device__ __forceinline__ void prologue(OfConsumer<T, kConfig>& c) {
#pragma unroll
    for (float& element : c.dk) element = 0;
#pragma unroll
    for (float& element : c.dv) element = 0;
    if (c.count_steps() == 0) return;
    if constexpr (kConfig.scores == Scores::alibi) {
        const auto& sequence = c.block().schedule;
        c.key_distance = static_cast<float>(c.first_column() + sequence.len_kv() - sequence.len_q - c.key());
    }
    wait_for(c.shared.k_full, 0);
    c.load_keys();
    c.wait_for_q();
    c.start_s();
    c.read_flags();
    const bool nonfinite = c.nonfinite_in_keys();
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(c.s);
    if (nonfinite) c.zero_nonfinite_keys();  // rare
    wait_for(c.shared.v_full, 0);
}

/// Waits for the last dK.
template <class OfConsumer>
__device__ __forceinline__ void wait_for_dk(OfConsumer& c) {
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(c.dk);
    ptx::warpgroup_fence_operand(c.ds);
}

/// P^T from S^T, of 64 queries.
template <class T, Config kConfig>
__device__ __forceinline__ void ConsumerThread<T, kConfig>::exponentiate(float (&s)[kPairs],
                                                                         const float4 (&minus_lse)[kChunks],
                                                                         const StepMod& mod, int half) const {
    if (any_lane((flags & kRareScores) != 0)) {
        if constexpr (kScoresLackKeys) {
            if (any_lane(lacks_keys())) set_scores_of_nonfinite_keys(s);
        }
        const int column = first_column();
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const float4 inverse_sum = stats_of_chunk(&RowStats::inverse_sum, kChunks * half + i / 8, column);
            if constexpr (kConfig.scores == Scores::alibi || kConfig.scores == Scores::dropout) {
                // Scores of a row with a large |LSE| are rounded as in delta_kernel, which computed the row's largest
                // score and sum. Other rows keep their bits.
                const float minus = element_of(minus_lse[i / 8], i), inverse = element_of(inverse_sum, i);
                float exponent = fmaf(s[i], launch.scale_log2, mod.addend(i, minus));
                float score = __fmul_rn(s[i], launch.params.forward.scale);
                if constexpr (kConfig.scores == Scores::alibi) score = fmaf(-mod.slope, mod.distance(i), score);
                if (inverse != 0) exponent = exponent_beside(score, minus);
                s[i] = ptx::exp2_approx(exponent) * (inverse == 0 ? 1.0F : inverse);
            } else {
                s[i] = probability<kConfig.scores>(s[i], launch, element_of(minus_lse[i / 8], i),
                                                   element_of(inverse_sum, i));
            }
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) s[i] = ordinary_probability(mod, i, s[i], element_of(minus_lse[i / 8], i));
}

/// Capped shapes: P^T in place of the capped S^T, and dS^T in place of dP^T, of 64 queries. No row has a large LSE
/// there (kMaxSoftcap).
template <class T, Config kConfig>
__device__ __forceinline__ void ConsumerThread<T, kConfig>::capped_gradients(float (&s)[kPairs], float (&dp)[kPairs],
                                                                             int half) const {
    const float factor = ds_factor();
    const int column = first_column();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        const float4 minus_lse = stats_of_chunk(&RowStats::minus_lse, kChunks * half + chunk, column);
        float4 delta[1] = {stats_of_chunk(&RowStats::delta, kChunks * half + chunk, column)};
        scale_deltas<T>(delta, factor);
#pragma unroll
        for (int i = 8 * chunk; i < 8 * chunk + 8; ++i) {
            const float derivative = derivative_of_capped(s[i]);
            s[i] = ordinary_probability({}, i, s[i], element_of(minus_lse, i));
            dp[i] = score_gradient<T>(s[i] * derivative, dp[i], element_of(delta[0], i), factor);
        }
    }
}

/// dS^T = P^T (dP^T - delta) of 64 queries, in place of dP^T; in capped shapes, which read delta themselves, P^T in
/// place of S^T besides. kMasked: some pair may be masked; its P and dS become 0.
template <class T, Config kConfig>
template <bool kMasked>
__device__ __forceinline__ void ConsumerThread<T, kConfig>::score_gradients(float (&s)[kPairs], float (&dp)[kPairs],
                                                                            float4 (&delta)[kChunks],
                                                                            const StepMod& mod, int half) const {
    if constexpr (kConfig.scores == Scores::capped) {
        capped_gradients(s, dp, half);
    } else {
        scale_deltas<T>(delta, ds_factor());
        const float factor = dp_factor();
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            dp[i] = gradient_of_pair(mod, i, s[i], dp[i], element_of(delta[i / 8], i), factor);
        }
    }
    if constexpr (kMasked) {
        ptx::warpgroup_fence_operand(dp);  // interleaved with the mask, this takes more registers than there are
        const PairMask mask(block().schedule, key(), query(half));
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            if (!mask.sees(i)) s[i] = dp[i] = 0;
        }
        ptx::warpgroup_fence_operand(dp);
    }
}

/// Sets NaN and infinities of the warpgroup's keys to 0 for dQ, whose hidden pairs must not meet them. dQ of the
/// queries that see them becomes NaN when it is written (store_nan_of_keys). The first step's S is complete; at
/// head_dim 64 that of the others has them, too, since its K is in registers.
template <class T, Config kConfig>
__device__ __forceinline__ void ConsumerThread<T, kConfig>::zero_nonfinite_keys() {
    constexpr int kKeys = kConfig.block_kv / Config::kConsumers;
    const int thread = static_cast<int>(threadIdx.x) % 128;
    if constexpr (kScoresLackKeys) {
        std::uint32_t found = 0;  // lane 4 i + r, r < 2, has row i + 8 r of the warp
        for (const auto& panel : shared.k) {
            const auto* chunks = reinterpret_cast<const uint4*>(panel[row() + lane() % 2 * 8]);
            for (int i = 0; i < kPanelRowBytes / 16; ++i) found |= nonfinite<T>(chunks[i]);
        }
        const unsigned rows = __ballot_sync(kAllLanes, found != 0);
        if (lane() == 0) shared.nonfinite_keys[warpgroup][warp()] = rows;
    }
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);  // all have read it, S of the first step among them
    if (kScoresLackKeys && thread == 0) block().unmasked[warpgroup].end = ~block().unmasked[warpgroup].end;
    for (auto& panel : shared.k) zero_nonfinite<T, kKeys * kPanelRowBytes, 128, 4>(panel[kKeys * warpgroup], thread);
    launch.workspace.state->nonfinite_keys = 1;
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
}

/// Do the keys that this thread searches hold NaN or infinities?
template <class T, Config kConfig>
__device__ __forceinline__ bool ConsumerThread<T, kConfig>::some_of_keys_nonfinite() const {
    constexpr int kKeys = kConfig.block_kv / Config::kConsumers;
    const int thread = static_cast<int>(threadIdx.x) % 128;
    bool found = false;
    for (const auto& panel : shared.k) {
        found |= any_nonfinite<T, kKeys * kPanelRowBytes, 128, 4>(panel[kKeys * warpgroup], thread);
    }
    return found;
}

/// Do the warpgroup's keys hold NaN or infinities?
template <class T, Config kConfig>
__device__ __forceinline__ bool ConsumerThread<T, kConfig>::nonfinite_in_keys() const {
    return any_in_warpgroup(some_of_keys_nonfinite());
}

/// Sets NaN and infinities of 64 rows of Q and dO to 0, in tiles with masked pairs. The epilogue adds those of dO back
/// (restore_nonfinite).
template <class T, Config kConfig>
__device__ __forceinline__ void ConsumerThread<T, kConfig>::zero_nonfinite_queries(int half) {
    const int m = shared.block_q[q.index()];
    if (any_lane(block().is_unmasked(0, m) && block().is_unmasked(1, m))) return;
    block().zeroed_do = 1;
    constexpr int kThreads = 128 * Config::kConsumers;
    const int thread = static_cast<int>(threadIdx.x) - 128;
    ptx::named_barrier_sync(kConsumersBarrier, kThreads);  // both warpgroups have computed S and dP from it
    static_assert(kConfig.block_q == Config::kRows || sizeof(shared.q[0]) == sizeof(shared.q[0][0]));
    constexpr int kHalves = kConfig.block_q / Config::kRows;
    zero_nonfinite<T, sizeof(shared.q[0]) / kHalves, kThreads>(shared.q[q.index()][0][Config::kRows * half], thread);
    zero_nonfinite<T, sizeof(shared.d_o[0]) / kHalves, kThreads>(shared.d_o[d_o.index()][0][Config::kRows * half],
                                                                 thread);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kConsumersBarrier, kThreads);
}

/// The address at which store_ds() begins for this thread.
template <class T, Config kConfig>
__device__ __forceinline__ std::uint32_t ConsumerThread<T, kConfig>::ds_address(int panel_number) const {
    const int thread = static_cast<int>(this->thread());
    const int query = thread % 32 / 16 * 8 + thread % 8;
    const int chunk = thread / 32 % 4 * 2 + thread / 8 % 2;
    return ptx::shared_address(shared.ds[steps % 2][panel_number]) + swizzled(query, chunk);
}

/// Stores dS of 64 queries to shared memory, transposed on the way: rows are queries there. The caller fences.
template <class T, Config kConfig>
__device__ __forceinline__ void ConsumerThread<T, kConfig>::store_ds(const std::uint32_t (&ds)[Config::kRows / 16][4],
                                                                     std::uint32_t to) {
#pragma unroll
    for (int step = 0; step < Config::kRows / 16; ++step) {
        // Rows 16 apart have the same swizzle.
        ptx::stmatrix_x4_trans(to + 16 * kPanelRowBytes * step, ds[step][0], ds[step][1], ds[step][2], ds[step][3]);
    }
}

}  // namespace tessera::cuda::fa3::backward
