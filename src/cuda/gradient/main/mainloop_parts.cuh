// SPDX-License-Identifier: Apache-2.0
//
// The mainloop in fp32 by three bf16 parts on the tensor cores (tile/parts.cuh). Keys are the rows of all GEMMs but dQ.
// A warp has 16 keys, and all queries of a step or half of them. It multiplies P^T from the registers in which it was
// computed; dS^T goes through shared memory, where dQ needs the keys of all warps.
#pragma once

#include "cuda/gradient/main/cta_work.cuh"
#include "cuda/gradient/main/tile_fp32.cuh"
#include "cuda/tile/parts.cuh"

namespace tessera::cuda::gradient {

template <PartsConfig kConfig>
struct MainloopParts {
    static constexpr int kHeadDim = kConfig.head_dim;
    static constexpr int kBlockKv = kConfig.block_kv;
    static constexpr int kThreads = PartsConfig::kThreads;
    static constexpr int kQueries = kBlockQ / kConfig.query_warps;  // of a warp
    static constexpr int kTiles = kQueries / 8;
    static constexpr int kChain = kHeadDim > 64 ? 2 : 4;
    static constexpr int kDqColumns = kHeadDim / 2;  // of a warp
    using Keys = PartTile<kBlockKv, kHeadDim, kThreads>;
    using Queries = PartTile<kBlockQ, kHeadDim, kThreads>;
    using Gradients = PartTile<kBlockKv, kBlockQ, kThreads>;  // dS^T: [keys][queries]
    using Scores = float[kTiles][4];                          // S^T: [16 keys][8 queries][4]
    using Sums = float[kHeadDim / 8][4];                      // dV, dK: [16 keys][8 columns][4]
    static constexpr int kSharedBytes = 2 * Keys::kBytes + 2 * Queries::kBytes + Gradients::kBytes;
    static_assert(kSharedBytes == kConfig.shared_bytes());

    const Launch& launch;
    const CtaWork& work;
    char* const shared;  // K, V, Q, dO, dS

    __device__ __forceinline__ void run(Sums& dv, Sums& dk) const {
        const int count = work.steps();
        const DqSemaphore semaphore{launch, work};
        const bool adds = work.adds_dq(launch);
        if (count > 0) {
            Queries::start_copy(q_tile(), q(Step(launch, work, 0)), first_query(0));
            Queries::start_copy(do_tile(), d_o(Step(launch, work, 0)), first_query(0));
        }
        __shared__ TileExtremes extremes[2];  // of K and V; in shared memory, since registers are few
        const TileExtremes of_k(Keys::load(k_tile(), k(), work.first_key));
        const TileExtremes of_v(Keys::load(v_tile(), v(), work.first_key));
        if (thread() == 0) extremes[0] = of_k, extremes[1] = of_v;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const Step step(launch, work, i);
            const bool any_large = thread() < kBlockQ && is_large(rows_of(step), thread());
            const bool repairs = split_queries(extremes, any_large, [&] {
                if (adds && i > 0) semaphore.release(Step(launch, work, i - 1));
            });
            const int first = first_query(i);
            const bool full = first + kBlockQ <= work.sequence.len_q &&
                              work.band32.full(first, first + kBlockQ, work.first_key, work.first_key + kBlockKv);
            PartFragments p[kTiles / 2];
            compute_scores(step, first, full, repairs, p);
            const bool cleans = repairs && !full;  // 0 * NaN is NaN
            if (cleans) clean();
            const int first_row = query_part() * kQueries;
            add_columns<Queries>(dv, p, Queries::Address::rows_first(do_tile(), first_row, lane()));
            if (adds) semaphore.acquire(step);
            __syncthreads();  // dS is there, and dO has been read
            const bool more = i + 1 < count;
            if (more) Queries::start_copy(do_tile(), d_o(Step(launch, work, i + 1)), first_query(i + 1));
            PartFragments ds[kTiles / 2];
#pragma unroll
            for (int n = 0; n < kTiles / 2; ++n) {
                Gradients::read(ds[n], Gradients::Address::rows_first(ds_tile(), first_key(), lane()), 0,
                                first_row / 8 + 2 * n);
            }
            add_columns<Queries>(dk, ds, Queries::Address::rows_first(q_tile(), first_row, lane()));
            __syncthreads();  // Q has been read
            if (more) Queries::start_copy(q_tile(), q(Step(launch, work, i + 1)), first_query(i + 1));
            if (adds) add_dq(step, first, cleans);
            if (cleans) restore(step, first, dv, dk);
        }
        __syncthreads();
        if (adds && count > 0) semaphore.release(Step(launch, work, count - 1));
        if constexpr (kConfig.query_warps > 1) exchange(dv, dk);
    }

    /// After run(): writes dV and dK of the block, or adds them to those of the earlier parts of the queries.
    __device__ __forceinline__ void store(const Sums& dv, const Sums& dk) const {
        const ForwardParams& p = launch.params.forward;
        if constexpr (kConfig.query_warps == 1) {
            store(dv, launch.params.dv, p.head_dim_v, 1.0F, launch.vector_dv);
            store(dk, launch.params.dk, p.head_dim, p.scale, launch.vector_dk);
        } else {
            const bool is_dv = query_part() == 0;
            store(dv, is_dv ? launch.params.dv : launch.params.dk, is_dv ? p.head_dim_v : p.head_dim,
                  is_dv ? 1.0F : p.scale, is_dv ? launch.vector_dv : launch.vector_dk);
        }
    }

 private:
    __device__ __forceinline__ char* k_tile() const { return shared; }
    __device__ __forceinline__ char* v_tile() const { return shared + Keys::kBytes; }
    __device__ __forceinline__ char* q_tile() const { return shared + 2 * Keys::kBytes; }
    __device__ __forceinline__ char* do_tile() const { return q_tile() + Queries::kBytes; }
    __device__ __forceinline__ char* ds_tile() const { return do_tile() + Queries::kBytes; }

    __device__ static __forceinline__ int thread() { return ptx::opaque(static_cast<int>(threadIdx.x)); }
    __device__ static __forceinline__ int lane() { return thread() % 32; }
    /// The warp's first key in the block, and its part of the step's queries.
    __device__ static __forceinline__ int first_key() { return thread() / 32 / kConfig.query_warps * 16; }
    __device__ static __forceinline__ int query_part() { return thread() / 32 % kConfig.query_warps; }
    /// The thread's first key in the sequence.
    __device__ __forceinline__ int key() const { return work.first_key + first_key() + lane() / 4; }

    __device__ __forceinline__ int first_query(int index) const { return Step(launch, work, index).tile * kBlockQ; }

    /// Splits Q and dO of a step, which lie in fp32 where their parts will be. `between` is called when all threads are
    /// done with the step before. `any_large`: is the maximum of the thread's row large? Returns whether some products
    /// need a repair.
    template <class Between>
    __device__ __forceinline__ bool split_queries(const TileExtremes (&of_keys)[2], bool any_large,
                                                  const Between& between) const {
        Extremes of_q;
        Extremes of_do;
        ptx::cp_async_wait<0>();
        Queries::split_copy(q_tile(), of_q, between);
        Queries::split_copy(do_tile(), of_do, [] {});
        return __syncthreads_or(any_large || of_keys[0].fails_with(of_q) || of_keys[1].fails_with(of_do)) != 0;
    }

    __device__ __forceinline__ SourceFp32 rows_of_queries(const Rows& rows, const Step& step, int dim,
                                                          bool vector) const {
        const std::int64_t offset = head_offset(rows, work.batch, work.sequence.first_q, step.head, sizeof(float));
        return {rows, offset, work.sequence.len_q, dim, vector};
    }
    __device__ __forceinline__ SourceFp32 rows_of_keys(const Rows& rows, int dim, bool vector) const {
        const std::int64_t offset = head_offset(rows, work.batch, work.sequence.first_kv, work.kv_head, sizeof(float));
        return {rows, offset, work.sequence.len_kv, dim, vector};
    }
    __device__ __forceinline__ SourceFp32 q(const Step& step) const {
        return rows_of_queries(launch.params.forward.q, step, launch.params.forward.head_dim, launch.vector_q);
    }
    __device__ __forceinline__ SourceFp32 d_o(const Step& step) const {
        return rows_of_queries(launch.params.d_o, step, launch.params.forward.head_dim_v, launch.vector_do);
    }
    __device__ __forceinline__ SourceFp32 k() const {
        return rows_of_keys(launch.params.forward.k, launch.params.forward.head_dim, launch.vector_k);
    }
    __device__ __forceinline__ SourceFp32 v() const {
        return rows_of_keys(launch.params.forward.v, launch.params.forward.head_dim_v, launch.vector_v);
    }

    /// P as fragments, and dS in shared memory; both are 0 where a query does not see a key.
    __device__ __forceinline__ void compute_scores(const Step& step, int first_query, bool full, bool repairs,
                                                   PartFragments (&p)[kTiles / 2]) const {
        const int first_row = query_part() * kQueries;
        Scores s;
        Scores dp;
        const auto keys_of = [&](const char* tile) { return Keys::Address::rows_first(tile, first_key(), lane()); };
        const auto queries_of = [&](const char* tile) {
            auto address = Queries::Address::chunks_first(tile, lane());
            address.move(first_row * kHeadDim * 2);
            return address;
        };
        multiply_rows<Keys, Queries, kChain>(s, keys_of(k_tile()), queries_of(q_tile()));
        multiply_rows<Keys, Queries, kChain>(dp, keys_of(v_tile()), queries_of(do_tile()));
        const int column = first_row + lane() % 4 * 2;  // the thread's first query in the tile
        const RowTile& rows = rows_of(step);
        if (repairs) {
            const auto key_of = [&](int i) { return key() + 8 * row_of(i); };
            const auto query_of = [&](int i) { return first_query + column + column_of(i); };
            repair_products(s, k(), q(step), key_of, query_of,
                            [&](int i) { return is_large(rows, column + column_of(i)); });
            repair_products(dp, v(), d_o(step), key_of, query_of, [](int) { return false; });
        }
        const ForwardParams& params = launch.params.forward;
        const ScoresFp32 scores(params, work.sequence, work.band32, work.batch, step.head);
        const bool plain =
            params.softcap == 0 && scores.inputs.slope == 0 && scores.inputs.bias == nullptr && !params.drops();
        if (plain) {
#pragma unroll
            for (int i = 0; i < 4 * kTiles; ++i) {
                const int row = column + i / 4 * 8 + i % 2;
                float& prob = s[i / 4][i % 4];
                float& gradient = dp[i / 4][i % 4];
                prob = probability(rows, row, __fmul_rn(prob, params.scale));
                gradient = prob * (gradient - rows.delta[row]);
            }
            if (!full) hide(s, dp, first_query + column);
        } else {
#pragma unroll
            for (int i = 0; i < 4 * kTiles; ++i) {
                const int row = column + i / 4 * 8 + i % 2;
                modify(scores, rows, row, first_query + row, key() + 8 * row_of(i), s[i / 4][i % 4], dp[i / 4][i % 4]);
            }
        }
        char* const to = ds_tile() + lane() % 4 * 4;
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
            split(p[n], s[2 * n], s[2 * n + 1]);
            PartFragments ds;
            split(ds, dp[2 * n], dp[2 * n + 1]);
#pragma unroll
            for (int i = 0; i < 4 * kParts; ++i) {
                const int at =
                    chunk_offset<kBlockQ>(first_key() + lane() / 4 + i % 2 * 8, first_row / 8 + 2 * n + i % 4 / 2);
                *reinterpret_cast<std::uint32_t*>(to + at + i / 4 * Gradients::kPartBytes) = ds[i / 4][i % 4];
            }
        }
    }

    __device__ __forceinline__ const RowTile& rows_of(const Step& step) const {
        return launch.rows[DqSemaphore{launch, work}.tile(step)];
    }
    /// Is the row's |maximum| so large that its scores have to be those of the kernel that found it, delta_fp32_kernel?
    /// Another rounding of them would be another P.
    __device__ static __forceinline__ bool is_large(const RowTile& rows, int row) {
        constexpr float kLogOfMostKeys = 22;  // an LSE is above its maximum by this at most
        return !(fabsf(rows.max[row]) < kOrdinaryLse - kLogOfMostKeys);
    }

    /// P of a visible pair. The difference first: it is exact near 0, where weights are large.
    __device__ static __forceinline__ float probability(const RowTile& rows, int row, float score) {
        return ptx::exp2_approx(__fmul_rn(__fadd_rn(score, -rows.max[row]), kLog2E)) * rows.norm[row];
    }

    /// P and dS become 0 where a query does not see a key. `first_query`: the thread's first one.
    __device__ __forceinline__ void hide(Scores& p, Scores& ds, int first_query) const {
        const Band32 band = work.band32;
        const int first_of_keys = key();
        const int last_query = work.sequence.len_q - 1;
#pragma unroll
        for (int i = 0; i < 4 * kTiles; ++i) {
            const int query = first_query + column_of(i);
            const int key = first_of_keys + 8 * row_of(i);
            // & in place of &&, which would be branches.
            const bool seen = static_cast<int>(query <= last_query) & static_cast<int>(key >= band.first(query)) &
                              static_cast<int>(key <= band.last(query));
            p[i / 4][i % 4] = seen ? p[i / 4][i % 4] : 0.0F;
            ds[i / 4][i % 4] = seen ? ds[i / 4][i % 4] : 0.0F;
        }
    }

    /// From Q K^T and dP to P and dS of one pair.
    __device__ __forceinline__ void modify(const ScoresFp32& scores, const RowTile& rows, int row, int query, int key,
                                           float& s, float& dp) const {
        if (!scores.sees(query, key)) {
            s = dp = 0;
            return;
        }
        float slope;
        const float prob = probability(rows, row, scores.score(s, query, key, slope));
        const float factor = scores.params.drops() ? scores.dropout(query, key) : 1.0F;
        s = factor == 0 ? 0.0F : prob * factor;
        dp = prob * ((factor == 0 ? 0.0F : dp * factor) - rows.delta[row]) * slope;
    }

    /// Replaces Inf and NaN by 0 in the tiles that are multiplied by P and dS.
    __device__ __forceinline__ void clean() const {
        __syncthreads();
        Queries::clean(q_tile());
        Queries::clean(do_tile());
        Keys::clean(k_tile());
        __syncthreads();
    }
    /// Adds to dV and dK what clean() has removed, and loads K again.
    __device__ __forceinline__ void restore(const Step& step, int first_query, Sums& dv, Sums& dk) const {
        const auto sees = [&](int key, int query) { return work.band32.sees(query, key); };
        const int begin = first_query + query_part() * kQueries;
        add_nonfinite(dv, d_o(step), key(), lane() % 4 * 2, begin, begin + kQueries, 0.0F, sees);
        add_nonfinite(dk, q(step), key(), lane() % 4 * 2, begin, begin + kQueries, 0.0F, sees);
        __syncthreads();
        Keys::load(k_tile(), k(), work.first_key);
    }

    /// Adds dQ of the query tile to the sum of the earlier key blocks in the workspace, [queries][columns]. A warp has
    /// 16 queries and half of the columns.
    __device__ __forceinline__ void add_dq(const Step& step, int first_query, bool cleaned) const {
        const int warp = thread() / 32;
        const int row = warp / 2 * 16;
        const int first_column = warp % 2 * kDqColumns;
        float dq[kDqColumns / 8][4] = {};
        constexpr int kAtOnce = kHeadDim > 64 ? 2 : 4;
#pragma unroll
        for (int begin = 0; begin < kBlockKv / 16; begin += kAtOnce) {
            PartFragments ds[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                Gradients::read_transposed(ds[i], Gradients::Address::chunks_first(ds_tile(), lane()), 16 * (begin + i),
                                           row / 8);
            }
            auto keys = Keys::Address::rows_first(k_tile(), 0, lane());
            keys.move(16 * begin * kHeadDim * 2);
            add_columns<Keys>(dq, ds, keys, first_column / 8);
        }
        const DqSemaphore semaphore{launch, work};
        const int query = first_query + row + lane() / 4;
        if (cleaned) {
            add_nonfinite(dq, k(), query, first_column + lane() % 4 * 2, work.first_key, work.first_key + kBlockKv,
                          0.0F, [&](int of, int key) { return of < work.sequence.len_q && work.band32.sees(of, key); });
        }
        float* const to = launch.dq + semaphore.index(step) * kBlockQ * kHeadDim + (row + lane() / 4) * kHeadDim +
                          first_column + lane() % 4 * 2;
        const bool first = semaphore.is_first(step);
#pragma unroll
        for (int i = 0; i < kDqColumns / 4; ++i) {
            auto* const at = reinterpret_cast<float2*>(to + i % 2 * 8 * kHeadDim + i / 2 * 8);
            float2 sum = {dq[i / 2][i % 2 * 2], dq[i / 2][i % 2 * 2 + 1]};
            if (!first) {
                const float2 old = __ldcg(at);
                sum = {old.x + sum.x, old.y + sum.y};
            }
            __stcg(at, sum);
        }
    }

    /// Adds up the sums of the two warps with the same keys. On return `dv` holds dV in the first, dK in the second.
    __device__ __forceinline__ void exchange(Sums& dv, const Sums& dk) const {
        auto* const own = reinterpret_cast<float4*>(q_tile()) + thread();
        const bool keeps_dv = query_part() == 0;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            float sent[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                sent[e] = keeps_dv ? dk[n][e] : dv[n][e];
                if (!keeps_dv) dv[n][e] = dk[n][e];
            }
            own[n * kThreads] = make_float4(sent[0], sent[1], sent[2], sent[3]);
        }
        __syncthreads();
        const float4* const other = keeps_dv ? own + 32 : own - 32;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            const float4 x = other[n * kThreads];
            dv[n][0] += x.x;
            dv[n][1] += x.y;
            dv[n][2] += x.z;
            dv[n][3] += x.w;
        }
    }

    /// fmaf(x, f, 0) turns -0 into +0.
    __device__ __forceinline__ void store(const Sums& sums, const Rows& rows, int dim, float factor,
                                          bool vector) const {
        if (rows.data == nullptr) return;
        auto* to = reinterpret_cast<float*>(rows.data +
                                            head_offset(rows, work.batch, work.sequence.first_kv, work.kv_head, 4));
#pragma unroll
        for (int i = 0; i < kHeadDim / 4; ++i) {
            const int row = key() + i % 2 * 8;
            const int column = i / 2 * 8 + lane() % 4 * 2;
            if (row >= work.sequence.len_kv || column >= dim) continue;
            float* const at = to + row * rows.row + column * rows.column;
            const float(&sum)[4] = sums[i / 2];
            if (vector) {
                const float2 before = work.part > 0 ? *reinterpret_cast<float2*>(at) : float2{0, 0};
                *reinterpret_cast<float2*>(at) = {fmaf(sum[i % 2 * 2], factor, before.x),
                                                  fmaf(sum[i % 2 * 2 + 1], factor, before.y)};
                continue;
            }
            *at = fmaf(sum[i % 2 * 2], factor, work.part > 0 ? *at : 0.0F);
            if (column + 1 >= dim) continue;
            at[rows.column] = fmaf(sum[i % 2 * 2 + 1], factor, work.part > 0 ? at[rows.column] : 0.0F);
        }
    }
};

}  // namespace tessera::cuda::gradient
