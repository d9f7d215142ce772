// SPDX-License-Identifier: Apache-2.0
//
// What the three forms of the main loop are made of: where a thread of a consumer warpgroup stands, what it knows of
// the step's queries, P^T from S^T, dS and dQ on their way out, and cleaning.
#pragma once

#include "cuda/fa3/backward/main/fp16_scale.cuh"
#include "cuda/fa3/backward/main/mask.cuh"
#include "cuda/fa3/backward/main/mma.cuh"
#include "cuda/fa3/backward/main/nonfinite.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/tma.cuh"

namespace tessera::cuda::fa3::backward {

/// The same condition in all lanes, known to the compiler as such.
__device__ __forceinline__ bool agreed(bool condition) { return __any_sync(kAllLanes, condition); }

template <class T, Config kConfig>
struct ConsumerThread : ConsumerPlace<kConfig> {
    using Place = ConsumerPlace<kConfig>;
    using Place::d_o, Place::q, Place::steps;
    static constexpr int kPairs = Config::kRows / 2;                         ///< scores of a thread against 64 queries
    static constexpr int kFull = 1, kLarge = 2, kNonfinite = 4, kLater = 8;  ///< flags of a step
    static constexpr int kEarly = kPairs / 8;                                ///< chunks of them (read_early)

    const Launch& launch;
    Shared<kConfig>& shared;
    int warpgroup;  ///< 0, 1

    int flags = 0;  ///< of the step: kFull, kLarge, kNonfinite; kLater: it is not the first of its block of keys

    /// Of the thread block. (Worked out anew at each use: what is kept of it over the loop takes registers.)
    __device__ __forceinline__ static unsigned thread() {
        return static_cast<unsigned>(ptx::opaque(static_cast<int>(threadIdx.x)));
    }
    __device__ __forceinline__ static int lane() { return static_cast<int>(thread() % 32); }
    /// The warp's number in the warpgroup; the producer's warps come before the consumers'.
    __device__ __forceinline__ static int warp() { return static_cast<int>(thread() / 32 % 4); }
    __device__ __forceinline__ int first_row() const { return kConfig.first_row(warpgroup); }
    /// The thread's first row of the block's keys.
    __device__ __forceinline__ int row() const {
        const unsigned own = thread();
        return first_row() + static_cast<int>(own / 32 % 4 * 16 + own % 32 / 4);
    }

    /// The thread's first column of a tile.
    __device__ __forceinline__ static int first_column() { return static_cast<int>(thread() % 4 * 2); }
    /// The step's first query.
    __device__ __forceinline__ int first_query() const { return shared.block_q[q.stage] * kConfig.block_q; }
    /// Which keys it works on.
    __device__ __forceinline__ KeyBlock<kConfig>& block() const {
        if constexpr (kConfig.goes_on()) return shared.on.own[warpgroup];
        else return shared.block;
    }
    /// The parity of the blocks of keys that are done.
    __device__ __forceinline__ std::uint32_t block_parity() const {
        if constexpr (kConfig.goes_on()) return shared.on.parity[warpgroup];
        else return 0;
    }
    /// Of the step whose Q is there. Read early: shared memory is slow to answer while products run.
    __device__ __forceinline__ void read_flags(bool later = false) {
        const int m = shared.block_q[q.stage];
        const Span& full = block().full[warpgroup];
        int large = 0, nonfinite = 0;
#pragma unroll
        for (const RowStats& stats : shared.stats[q.stage]) {
            large |= stats.some_large;
            nonfinite |= stats.some_nonfinite;
        }
        flags = (m >= full.begin && m < full.end ? kFull : 0) | (large != 0 ? kLarge : 0) |
                (nonfinite != 0 ? kNonfinite : 0) | (later ? kLater : 0);
    }
    /// Are all pairs of this warpgroup visible in the step?
    __device__ __forceinline__ bool is_full() const { return agreed((flags & kFull) != 0); }
    __device__ __forceinline__ bool some_nonfinite() const { return agreed((flags & kNonfinite) != 0); }

    /// What the delta kernel says of 16 queries: of this thread's columns, of which `column` is the first, of a chunk
    /// of 8 elements (of_element).
    __device__ __forceinline__ float4 four_of(const float (RowStats::*values)[Config::kRows], int chunk,
                                              int column) const {
        const RowStats& stats = shared.stats[q.stage][chunk / 4];
        return reinterpret_cast<const float4&>((stats.*values)[16 * (chunk % 4) + 2 * column]);
    }
    /// The same of 64 queries, of 128 in a step the first or the second half.
    __device__ __forceinline__ void read_early(float4 (&out)[kEarly], const float (RowStats::*values)[Config::kRows],
                                               int half = 0) const {
        const int column = first_column();
#pragma unroll
        for (int chunk = 0; chunk < kEarly; ++chunk) out[chunk] = four_of(values, kEarly * half + chunk, column);
    }

    /// What dP is multiplied by for dS, and delta with it (score_gradient).
    __device__ __forceinline__ float unit() const {
        if constexpr (kHeld<T>) return block().unit;
        else return 1;
    }

    __device__ __forceinline__ int count_steps() const {
        const int count = Steps<false>(block().blocks, block().n, block().blocks.share_heads).count();
        return __shfl_sync(kAllLanes, count, 0);  // known to be the same in all lanes
    }
    __device__ __forceinline__ void wait_for_q() { wait_for(shared.q_ring.full[q.stage], q.phase); }
    __device__ __forceinline__ void wait_for_do() { wait_for(shared.do_ring.full[d_o.stage], d_o.phase); }
    /// dK of the block of keys before has left shared memory.
    __device__ __forceinline__ void wait_for_dk_before() const {
        if constexpr (kConfig.goes_on()) {
            if (ptx::reload_thread_index() % 32 == 0) ptx::tma_store_wait_read();
            __syncwarp();
        }
    }
    /// This step's dQ may be stored.
    __device__ __forceinline__ void wait_for_dq_memory() {
        wait_for(shared.dq_empty[warpgroup], (steps + 1) % 2, warpgroup);
    }
    __device__ __forceinline__ void exponentiate(float (&s)[kPairs], const float4 (&minus_lse)[kEarly],
                                                 int half = 0) const;
    template <bool kMasked>
    __device__ __forceinline__ void score_gradients(float (&s)[kPairs], float (&dp)[kPairs], float4 (&delta)[kEarly],
                                                    int half = 0) const;
    /// Of 64 queries into 16 bits, as the A operand of a sum over queries.
    __device__ __forceinline__ static void pack(std::uint32_t (&out)[Config::kRows / 16][4],
                                                const float (&values)[kPairs]) {
#pragma unroll
        for (int i = 0; i < kPairs; i += 2) out[i / 8][i / 2 % 4] = ptx::pack_finite<T>(values[i], values[i + 1]);
    }
    __device__ __forceinline__ void clean_keys();
    __device__ __forceinline__ bool nonfinite_in_keys() const;
    /// Does one of the warpgroup's threads say so?
    __device__ __forceinline__ bool agreed_in_warpgroup(bool found) const {
        return agreed(ptx::named_barrier_any(kWarpgroupBarrier + warpgroup, 128, found));
    }
    __device__ __forceinline__ void fetch_keys() {}  ///< K of the first product is in shared memory
    __device__ __forceinline__ void clean_queries(int half = 0);
    __device__ __forceinline__ std::uint32_t ds_address(int panel_number) const;
    __device__ __forceinline__ static void store_ds(const std::uint32_t (&ds)[Config::kRows / 16][4], std::uint32_t to);
    __device__ __forceinline__ void put_dq(const float (&dq)[kConfig.dq_columns() / 2]);
    __device__ __forceinline__ void put_dq_or_finish(float (&dq)[kConfig.dq_columns() / 2], int q_stage);
    __device__ __forceinline__ void finish_dq(float (&dq)[kConfig.dq_columns() / 2], int q_stage, bool alone);
    /// What put_dq() has written is add_dq()'s from here on.
    __device__ __forceinline__ void give_dq() {
        ptx::fence_proxy_async();
        arrive(shared.dq_full[warpgroup]);
    }
    /// One arrival of the warp, when all its lanes are here.
    __device__ __forceinline__ static void arrive(ptx::Mbarrier& barrier) {
        __syncwarp();
        if (lane() == 0) ptx::mbarrier_arrive(barrier);
    }
};

/// How consumers that make S, dV and dK begin: gradients of 0, and, where there are steps, the first scores; K is
/// looked through beside these, and what is rarely found in it taken out before they are multiplied again. Are there
/// any?
template <template <class, Config> class OfConsumer, class T, Config kConfig>
__device__ __forceinline__ bool begin_steps(OfConsumer<T, kConfig>& c) {
#pragma unroll
    for (float& element : c.dk) element = 0;
#pragma unroll
    for (float& element : c.dv) element = 0;
    if constexpr (kConfig.goes_on()) ptx::discard_operand(c.ds);
    const bool any = c.count_steps() > 0;
    if (!kConfig.goes_on() && !any) return false;
    wait_for(c.shared.k_full, c.block_parity());
    if (!any) {
        c.wait_for_dk_before();
        wait_for(c.shared.v_full, c.block_parity());
        return false;
    }
    c.fetch_keys();
    c.wait_for_q();
    c.start_s();
    c.read_flags();
    c.wait_for_dk_before();
    const bool nonfinite = c.nonfinite_in_keys();
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(c.s);
    if (nonfinite) {  // rare
        c.clean_keys();
        c.start_s();
        ptx::wgmma_wait<0>();
        ptx::warpgroup_fence_operand(c.s);
    }
    wait_for(c.shared.v_full, c.block_parity());
    return true;
}

/// And how they end: with the last dK done.
template <class OfConsumer>
__device__ __forceinline__ void end_steps(OfConsumer& c) {
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(c.dk);
    ptx::warpgroup_fence_operand(c.ds);
}

/// Of what four_of() gives for a chunk, that of one of its elements.
__device__ __forceinline__ float of_element(const float4& four, int element) {
    if (element / 4 % 2 == 0) return element % 2 == 0 ? four.x : four.y;
    return element % 2 == 0 ? four.z : four.w;
}

/// P of a score (scaled by scale_log2, to units of log2): of queries whose LSE is large, from the largest score and the
/// sum.
__device__ __forceinline__ float weight(float score, float scale_log2, float minus_lse, float inverse_sum) {
    const float ordinary = fmaf(score, scale_log2, minus_lse);
    const float beside_most = __fadd_rn(__fmul_rn(score, scale_log2), minus_lse);
    return ptx::exp2_approx(inverse_sum == 0 ? ordinary : beside_most) * (inverse_sum == 0 ? 1.0F : inverse_sum);
}

/// P^T from S^T, of 64 queries.
template <class T, Config kConfig>
__device__ __forceinline__ void ConsumerThread<T, kConfig>::exponentiate(float (&s)[kPairs],
                                                                         const float4 (&minus_lse)[kEarly],
                                                                         int half) const {
    if (agreed((flags & kLarge) != 0)) {  // rare
        const int column = first_column();
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const float4 inverse_sum = four_of(&RowStats::inverse_sum, kEarly * half + i / 8, column);
            s[i] = weight(s[i], launch.scale_log2, of_element(minus_lse[i / 8], i), of_element(inverse_sum, i));
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        s[i] = ptx::exp2_approx(fmaf(s[i], launch.scale_log2, of_element(minus_lse[i / 8], i)));
    }
}

/// dS^T = P^T (dP^T - delta) of 64 queries, in the place of dP^T. kMasked: some pair may be hidden; of it both become
/// 0.
template <class T, Config kConfig>
template <bool kMasked>
__device__ __forceinline__ void ConsumerThread<T, kConfig>::score_gradients(float (&s)[kPairs], float (&dp)[kPairs],
                                                                            float4 (&delta)[kEarly], int half) const {
    const float factor = unit();
    hold_deltas<T>(delta, factor);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) dp[i] = score_gradient<T>(s[i], dp[i], of_element(delta[i / 8], i), factor);
    if constexpr (kMasked) {
        ptx::warpgroup_fence_operand(dp);  // all in one go takes more registers than there are
        const PairMask mask(block().blocks, block().n * kConfig.block_kv + row(),
                            first_query() + Config::kRows * half + first_column());
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            if (!mask.sees(i)) s[i] = dp[i] = 0;
        }
        ptx::warpgroup_fence_operand(dp);
    }
}

/// NaN and infinities of K become 0: what they make of scores is in LSE and delta, and dQ is to have no others.
template <class T, Config kConfig>
__device__ __forceinline__ void ConsumerThread<T, kConfig>::clean_keys() {
    constexpr int kKeys = kConfig.block_kv / Config::kConsumers;
    const int thread = static_cast<int>(threadIdx.x) % 128;
    bool found = false;
    for (auto& panel : shared.k) found |= clean<T, kKeys * kPanelRowBytes, 128, 4>(panel[kKeys * warpgroup], thread);
    ptx::fence_proxy_async();
    if constexpr (kConfig.roles()) {
        if (agreed(found)) launch.workspace.start->nonfinite_keys = 1;
        ptx::named_barrier_sync(kConsumersBarrier, 128 * Config::kConsumers);
    } else {
        ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
    }
}

/// Are there any, in the warpgroup's keys? Looked for beside the first scores.
template <class T, Config kConfig>
__device__ __forceinline__ bool ConsumerThread<T, kConfig>::nonfinite_in_keys() const {
    constexpr int kKeys = kConfig.block_kv / Config::kConsumers;
    const int thread = static_cast<int>(threadIdx.x) % 128;
    bool found = false;
    for (const auto& panel : shared.k) {
        found |= any_nonfinite<T, kKeys * kPanelRowBytes, 128, 4>(panel[kKeys * warpgroup], thread);
    }
    return agreed_in_warpgroup(found);
}

/// The same of 64 rows of Q and dO, in tiles with hidden pairs. What was taken out of dO is put back at the end
/// (restore_lost).
template <class T, Config kConfig>
__device__ __forceinline__ void ConsumerThread<T, kConfig>::clean_queries(int half) {
    const Span& first = block().full[0];
    const Span& second = block().full[1];
    const int m = shared.block_q[q.stage];
    if (agreed(m >= max(first.begin, second.begin) && m < min(first.end, second.end))) return;
    block().lost = 1;
    constexpr int kThreads = 128 * Config::kConsumers;
    const int thread = static_cast<int>(threadIdx.x) - 128;
    ptx::named_barrier_sync(kConsumersBarrier, kThreads);  // both warpgroups have made S and dP of it
    static_assert(kConfig.block_q == Config::kRows || sizeof(shared.q[0]) == sizeof(shared.q[0][0]));
    constexpr int kOf = kConfig.block_q / Config::kRows;
    clean<T, sizeof(shared.q[0]) / kOf, kThreads>(shared.q[q.stage][0][Config::kRows * half], thread);
    clean<T, sizeof(shared.d_o[0]) / kOf, kThreads>(shared.d_o[d_o.stage][0][Config::kRows * half], thread);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kConsumersBarrier, kThreads);
}

/// Where store_ds() begins for this thread.
template <class T, Config kConfig>
__device__ __forceinline__ std::uint32_t ConsumerThread<T, kConfig>::ds_address(int panel_number) const {
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x));  // not to be kept in registers over the loop
    const int query = thread % 32 / 16 * 8 + thread % 8;
    const int chunk = thread / 32 % 4 * 2 + thread / 8 % 2;
    return ptx::shared_address(shared.ds[steps % 2][panel_number]) + swizzled(query, chunk);
}

/// dS of 64 queries, transposed on its way into shared memory: rows are queries there. A fence is to follow.
template <class T, Config kConfig>
__device__ __forceinline__ void ConsumerThread<T, kConfig>::store_ds(const std::uint32_t (&ds)[Config::kRows / 16][4],
                                                                     std::uint32_t to) {
#pragma unroll
    for (int step = 0; step < Config::kRows / 16; ++step) {
        // Rows 16 apart have the same swizzle.
        ptx::stmatrix_x4_trans(to + 16 * kPanelRowBytes * step, ds[step][0], ds[step][1], ds[step][2], ds[step][3]);
    }
}

/// A part of dQ, for add_dq(): 16 bytes of a thread beside those of its neighbours.
template <class T, Config kConfig>
__device__ __forceinline__ void ConsumerThread<T, kConfig>::put_dq(const float (&dq)[kConfig.dq_columns() / 2]) {
    auto* out = reinterpret_cast<float4*>(shared.dq[warpgroup]) + threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < kConfig.dq_columns() / 8; ++j) {
        out[128 * j] = make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
    }
}

/// The last to add: dQ of the step whose Q is in this stage, with the sum that add_or_bring_dq() has brought.
template <class T, Config kConfig>
__device__ __forceinline__ void ConsumerThread<T, kConfig>::finish_dq(float (&dq)[kConfig.dq_columns() / 2],
                                                                      int q_stage, bool alone) {
    constexpr int kColumns = kConfig.dq_columns();
    const ForwardParams& p = launch.params.forward;
    const float factor = kHeld<T> ? p.scale / (unit() * kWeightUnit<T>) : p.scale;
    std::uint32_t packed[kColumns / 8][2];
    const auto* sum = reinterpret_cast<const float4*>(shared.dq[warpgroup]) + thread() % 128;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
        const float4 before = alone ? float4{} : sum[128 * j];
        packed[j][0] =
            ptx::pack<T>(fmaf(dq[4 * j] + before.x, factor, 0.0F), fmaf(dq[4 * j + 1] + before.y, factor, 0.0F));
        packed[j][1] =
            ptx::pack<T>(fmaf(dq[4 * j + 2] + before.z, factor, 0.0F), fmaf(dq[4 * j + 3] + before.w, factor, 0.0F));
    }
    // Through the warp's own share of what it has read, so that whole rows are written: row r lies in piece r / 4.
    static_assert(kColumns == kPanelColumns);
    const std::uint32_t own = ptx::shared_address(shared.dq[warpgroup]) + 512 * static_cast<unsigned>(warp());
    const auto place = [own](int row, int chunk) {
        return own + static_cast<unsigned>(2048 * (row / 4) + 128 * (row % 4) + 16 * (chunk ^ row % 8));
    };
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += 2) {
        // Chunk j + lane / 16, j being even. (With a sum there ptxas of CUDA 13.0 once made wrong code of it.)
        ptx::stmatrix_x4(place(lane() % 16, lane() / 16) ^ static_cast<unsigned>(16 * j), packed[j][0], packed[j][1],
                         packed[j + 1][0], packed[j + 1][1]);
    }
    __syncwarp();
    constexpr bool kByColumns = kConfig.block_q == Config::kRows;
    const int chunk = lane() % 8;
    const int column = (kByColumns ? kColumns * warpgroup : 0) + 8 * chunk;
    const int first = shared.block_q[q_stage] * kConfig.block_q + (kByColumns ? 0 : Config::kRows * warpgroup) +
                      warp() * 16 + lane() / 8;
    const Rows& to = launch.params.dq;
    T* out = reinterpret_cast<T*>(to.data) + block().batch * to.batch + shared.head[q_stage] * to.head +
             first * to.row + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 words = ptx::load_shared(place(4 * i + lane() / 8, chunk));
        if (first + 4 * i < block().blocks.len_q && column < p.head_dim) {
            *reinterpret_cast<uint4*>(out + 4 * i * to.row) = words;
        }
    }
    ptx::fence_proxy_async();  // TMA writes the next sum where these rows have lain
    arrive(shared.dq_full[warpgroup]);
}

/// Of a block of keys that is the last to add to some blocks of queries.
template <class T, Config kConfig>
__device__ __forceinline__ void ConsumerThread<T, kConfig>::put_dq_or_finish(float (&dq)[kConfig.dq_columns() / 2],
                                                                             int q_stage) {
    wait_for(shared.dq_empty[warpgroup], steps % 2, warpgroup);
    const DqGoes goes = shared.dq_goes[warpgroup];
    if (agreed(goes != DqGoes::to_sum)) {
        finish_dq(dq, q_stage, agreed(goes == DqGoes::out_alone));
    } else {
        put_dq(dq);
        give_dq();
    }
}

}  // namespace tessera::cuda::fa3::backward
