// SPDX-License-Identifier: Apache-2.0
//
// The step of the backward where P and dS go through shared memory, in 16 bits: each warp makes both for its own keys
// and queries, in registers, and then has its own keys and columns of dV and dK.
//
//   S^T = K Q^T                                 [16 or 32 keys] x [32 queries] a warp
//   dP^T = V dO^T;  under it: P^T = exp2(S^T - LSE), stored
//   dV += P^T dO;   under it: dS^T = P^T (dP^T - delta), stored
//   dQ = dS K, dK += dS^T Q
#pragma once

#include "cuda/gradient/key_loop.cuh"
#include "cuda/gradient/split_plan.cuh"

namespace tessera::cuda::gradient {

template <class T, Config kConfig>
struct SplitLoop : SplitPlan<T, kConfig> {
    using Base = SplitPlan<T, kConfig>;
    using Base::adds_dq;
    using Base::clear;
    using Base::inputs;
    using Base::kHeadDim;
    using Base::kKeyTiles;
    using Base::kPlannedAhead;
    using Base::lane;
    using Base::load_queries;
    using Base::poisoned;
    using Base::turns;
    using Base::warp;
    using Base::work;
    using typename Base::Plan;
    using typename Base::Planned;
    static constexpr int kRowTiles = kKeyTiles < 2 ? kKeyTiles : 2;  // 16 keys: of the scores that a warp has at once
    static constexpr int kKeyParts = kKeyTiles / kRowTiles;          // that many times a step
    static constexpr int kPartKeys = 4 * 16 * kRowTiles;             // of all warps
    static constexpr int kQueries = kBlockQ / 2;                     // of a warp's scores
    static constexpr int kTiles = kQueries / 8;
    static constexpr int kColumns = kHeadDim / 2 / 8;  // of a warp's sums: 8 dims
    static constexpr int kReadAhead = kConfig.stages - 1;
    using Scores = float[kRowTiles][kTiles][4];  // [16 keys][8 queries][4]
    using PartSums = float[kRowTiles][kColumns][4];
    using Sums = float[kKeyParts][kRowTiles][kColumns][4];  // [parts][16 keys][8 dims][4]
    using Address = MatrixAddress<kHeadDim>;

    /// Everything that the block of keys has to do. `to_change`: `work`.
    __device__ __forceinline__ void run_block(KeyWork& to_change) const {
        inputs.load_k();
        inputs.load_v();
        Sums dv;
        Sums dk;
#pragma unroll
        for (int part = 0; part < kKeyParts; ++part) {
            clear(dv[part]);
            clear(dk[part]);
        }
        const bool masked = run(dv, dk);
        // Hidden Inf and NaN of Q and dO are rare: only when some have come through is the work done again without
        // them.
        if (masked && __syncthreads_or(static_cast<int>(poisoned_sums(dv) || poisoned_sums(dk)))) {
            if (threadIdx.x == 0) to_change.guarded = true;
            __syncthreads();
            KeyLoop<T, kConfig>{{inputs, work}}.run_block(to_change);
            return;
        }
        ptx::cp_async_wait<0>();
        __syncthreads();
        const Launch& launch = inputs.launch;
        const ForwardParams& p = launch.params.forward;
        const bool stores_dv = launch.params.dv.data != nullptr;
        const bool stores_dk = launch.params.dk.data != nullptr;
        if (stores_dv) stage_sums(inputs.v_tile(), dv, p.keep_scale);
        if (stores_dk) stage_sums(inputs.k_tile(), dk, p.scale);
        __syncthreads();
        if (stores_dv) put_sums(inputs.v_tile(), launch.params.dv, p.head_dim_v, launch.vector_dv);
        if (stores_dk) put_sums(inputs.k_tile(), launch.params.dk, p.head_dim, launch.vector_dk);
    }

 private:
    /// The warp's place among those that have the same keys.
    __device__ static __forceinline__ int half() { return warp() / 4; }
    __device__ static __forceinline__ int first_row_of(int part) { return (part * 4 + warp() % 4) * (16 * kRowTiles); }
    __device__ __forceinline__ char* weights() const { return inputs.weights(); }

    __device__ static __forceinline__ bool poisoned_sums(const Sums& sums) {
        bool any = false;
#pragma unroll
        for (int part = 0; part < kKeyParts; ++part) any |= poisoned(sums[part]);
        return any;
    }

    /// All steps. Returns whether any of them was masked.
    __device__ __forceinline__ bool run(Sums& dv, Sums& dk) const {
        __shared__ Plan plan;
        if (threadIdx.x == 64) {
            plan.count = work.own.count() * inputs.launch.params.forward.group;
            plan.any_masked = false;
        }
#pragma unroll 1
        for (int i = 0; i < kPlannedAhead; ++i) this->plan(plan, i);
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < kReadAhead; ++i) load_queries(plan, i);
        if (kReadAhead > 1) {
            ptx::cp_async_wait<kReadAhead - 1>();
            __syncthreads();
        }
#pragma unroll 1
        for (int i = 0; i < plan.count; ++i) step(plan, i, dv, dk);
        if (plan.count == 0) return false;
        __syncthreads();
        if (adds_dq()) turns().publish(plan.at(plan.count - 1).step());
        return plan.any_masked;
    }
    /// What all steps share is read where it is needed: the accumulators leave no registers for it.
    __device__ __forceinline__ void step(Plan& plan, int index, Sums& dv, Sums& dk) const {
        const int stage = index % kConfig.stages;
        if constexpr (kReadAhead == 1) {
            ptx::cp_async_wait<0>();
            __syncthreads();
            load_queries(plan, index + 1);
        }
        const Planned& planned = plan.at(index);
        const auto work_under = [&](int part) {
            if (part == 0 && adds_dq() && index > 0) turns().publish(plan.at(index - 1).step());
            if (part == kKeyParts - 1 && adds_dq()) turns().wait(planned.step());
        };
        add_dv<0>(dv[0], planned, stage, work_under);
        if constexpr (kKeyParts > 1) add_dv<1>(dv[1], planned, stage, work_under);
        if constexpr (kReadAhead > 1) ptx::cp_async_wait<0>();
        __syncthreads();
        // Here, where no scores are held.
        this->plan(plan, index + kPlannedAhead);
        if constexpr (kReadAhead > 1) load_queries(plan, index + kReadAhead);
        if (planned.masked || !adds_dq()) {
            if (adds_dq()) {
                KeyDq<T, kConfig>{{inputs, work}}.add(planned.step(), planned.tile * kBlockQ, planned.masked);
            }
            add_rows<kKeyParts>([&](int part) -> PartSums& { return dk[part]; }, 0, inputs.ds(), inputs.q_tile(stage),
                                NothingBetween{});
        } else if (planned.first) {
            add_dq_dk<true>(dk, planned, stage);
        } else {
            add_dq_dk<false>(dk, planned, stage);
        }
    }

    /// S, dP, P and dS of a part of the keys, and dV += P^T dO.
    template <int kPart, class WorkUnder>
    __device__ __forceinline__ void add_dv(PartSums& dv, const Planned& planned, int stage,
                                           const WorkUnder& work_under) const {
        const RowTile& rows = inputs.rows(stage);
        Scores s;
        Scores dp;
        make_scores(s, dp, planned, stage, kPart);
        __syncthreads();
        work_under(kPart);
        if (planned.masked) {
            make_ds(dp, s, rows, kPart);
            add_rows<1>([&](int) -> PartSums& { return dv; }, kPart, weights(), inputs.do_tile(stage),
                        NothingBetween{});
            return;
        }
        constexpr int kItems = kBlockQ / 16 * (kColumns / 2);
        const int at = score_place(kPart);
        char* const to = inputs.ds();
        const float* const deltas = rows.delta + half() * kQueries + lane() % 4 * 2;
        add_rows<1>([&](int) -> PartSums& { return dv; }, kPart, weights(), inputs.do_tile(stage),
                    [&](int item) {
                        for_share<kItems>(item, [&](int m, int j) {
                            make_ds(dp[m][j], s[m][j], two(deltas, j));
                            store(to, at, dp[m][j], m, j);
                        });
                    });
    }

    /// dQ = dS K, on its way to the workspace under dK += dS^T Q.
    template <bool kFirst>
    __device__ __forceinline__ void add_dq_dk(Sums& dk, const Planned& planned, int stage) const {
        using Dq = KeyDq<T, kConfig>;
        const Dq of_dq{{inputs, work}};
#pragma unroll 1
        for (int part = 0; part < Dq::kColumnParts - 1; ++part) of_dq.add_part(planned.step(), 0, false, part);
        float* const to = Dq::place(planned.dq, Dq::kColumnParts - 1);
        typename Dq::Part dq;
        of_dq.make(dq, 0, false, Dq::kColumnParts - 1);
        constexpr int kItems = kBlockQ / 16 * (kColumns / 2);
        add_rows<kKeyParts>([&](int part) -> PartSums& { return dk[part]; }, 0, inputs.ds(), inputs.q_tile(stage),
                            [&](int item) {
#pragma unroll
                                for (int i = item * Dq::kFours / kItems; i < (item + 1) * Dq::kFours / kItems; ++i) {
                                    Dq::template put_four<kFirst>(to, dq, i);
                                }
                            });
    }

    /// `of_tile`(m, j) for the tiles of scores that come after item `item` of kItems.
    template <int kItems, class OfTile>
    __device__ static __forceinline__ void for_share(int item, const OfTile& of_tile) {
        constexpr int kAll = kRowTiles * kTiles;
#pragma unroll
        for (int t = item * kAll / kItems; t < (item + 1) * kAll / kItems; ++t) of_tile(t % kRowTiles, t / kRowTiles);
    }

    /// S^T and dP^T of a part of the keys; S^T becomes P^T, which is also stored, rounded.
    __device__ __forceinline__ void make_scores(Scores& s, Scores& dp, const Planned& planned, int stage,
                                                int part) const {
        const RowTile& rows = inputs.rows(stage);
        const int first_row = first_row_of(part);
        char* const to = weights();
        const float factor = inputs.launch.params.forward.scale * kLog2E;
        clear(s);
        clear(dp);
        multiply_rows(s, inputs.k_tile(), inputs.q_tile(stage), first_row, NothingBetween{});
        const int at = score_place(part);
        if (planned.masked || __any_sync(0xFFFFFFFF, rows.norm[half() * kQueries + lane()] != 0.0F)) {
            const int column = half() * kQueries + lane() % 4 * 2;
            const int first_query = planned.tile * kBlockQ + column;
            const int first_key = work.first_key + first_row + lane() / 4;
            multiply_rows(dp, inputs.v_tile(), inputs.do_tile(stage), first_row, NothingBetween{});
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m) {
                    this->exponentiate_special(s[m][j], rows, column + 8 * j);
                    if (planned.masked) hide(s[m][j], first_query + 8 * j, first_key + 16 * m);
                    store(to, at, s[m][j], m, j);
                }
            }
            return;
        }
        const float* const offsets = rows.offset + half() * kQueries + lane() % 4 * 2;
        constexpr int kItems = kHeadDim / 16 * (kTiles / 2);
        multiply_rows(dp, inputs.v_tile(), inputs.do_tile(stage), first_row, [&](int item) {
            for_share<kItems>(item, [&](int m, int j) {
                Base::exponentiate(s[m][j], factor, two(offsets, j));
                store(to, at, s[m][j], m, j);
            });
        });
    }

    /// The weight of a pair that is not visible: a zero that tells, for dP of such a pair may be NaN.
    static constexpr float kHidden = -0.0F;
    __device__ __forceinline__ void hide(float (&p)[4], int query, int key) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (!this->sees(query + e % 2, key + e / 2 * 8)) p[e] = kHidden;
        }
    }

    /// dP^T becomes dS^T, and is stored, rounded; some pairs may be hidden.
    __device__ __forceinline__ void make_ds(Scores& dp, const Scores& p, const RowTile& rows, int part) const {
        const int at = score_place(part);
        const float* const deltas = rows.delta + half() * kQueries + lane() % 4 * 2;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            const float2 delta = two(deltas, j);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                make_ds(dp[m][j], p[m][j], delta);
#pragma unroll
                for (int e = 0; e < 4; ++e) dp[m][j][e] = __float_as_int(p[m][j][e]) < 0 ? 0.0F : dp[m][j][e];
                store(inputs.ds(), at, dp[m][j], m, j);
            }
        }
    }
    __device__ static __forceinline__ void make_ds(float (&dp)[4], const float (&p)[4], const float2& delta) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[e] = p[e] * (dp[e] - (e % 2 == 0 ? delta.x : delta.y));
    }

    /// Numbers of a row of the tile that the thread has, for 8 queries: those of its two.
    __device__ static __forceinline__ float2 two(const float* from, int j) {
        return *reinterpret_cast<const float2*>(from + 8 * j);
    }

    /// Where the thread's first scores lie in a [keys][queries] tile.
    __device__ static __forceinline__ int score_place(int part) {
        return chunk_offset<kBlockQ>(first_row_of(part) + lane() / 4, half() * kTiles) + lane() % 4 * 4;
    }
    __device__ static __forceinline__ void store(char* tile, int at, const float (&x)[4], int m, int j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            char* to = tile + (at ^ 16 * j) + (16 * m + 8 * r) * kBlockQ * 2;
            *reinterpret_cast<std::uint32_t*>(to) = ptx::pack<T>(x[2 * r], x[2 * r + 1]);
        }
    }

    /// s += the warp's rows of `keys` times those of `queries`: K Q^T, V dO^T.
    template <class Between>
    __device__ __forceinline__ void multiply_rows(Scores& s, const char* keys, const char* queries, int first_row,
                                                  const Between& between) const {
        const Address a = Address::rows_first(keys, first_row, lane());
        const Address b = Address::chunks_first(queries + half() * kQueries * kHeadDim * 2, lane());
        multiply<T, kHeadDim / 16, kRowTiles, kTiles>(
            [&](int m) -> float(&)[kTiles][4] { return s[m]; },
            [&](int step, int m, std::uint32_t(&to)[4]) { ptx::ldmatrix_x4(to, a.at(16 * m, 2 * step)); },
            [&](int step, int n, std::uint32_t(&to)[4]) { ptx::ldmatrix_x4(to, b.at(16 * n, 2 * step)); }, between);
    }

    /// sums += the warp's rows of `factors`, [keys][queries], times its columns of `queries`: P^T dO, dS^T Q; for
    /// kCount parts of the keys from `first` on, sums_of(part).
    template <int kCount, class SumsOf, class Between>
    __device__ __forceinline__ void add_rows(const SumsOf& sums_of, int first, const char* factors, const char* queries,
                                             const Between& between) const {
        const auto a = MatrixAddress<kBlockQ>::rows_first(factors, first_row_of(first), lane());
        const Address b(queries, lane() % 16, half() * kColumns + lane() / 16);
        multiply<T, kBlockQ / 16, kCount * kRowTiles, kColumns>(
            [&](int m) -> float(&)[kColumns][4] { return sums_of(m / kRowTiles)[m % kRowTiles]; },
            [&](int step, int m, std::uint32_t(&to)[4]) {
                ptx::ldmatrix_x4(to, a.at(m / kRowTiles * kPartKeys + m % kRowTiles * 16, 2 * step));
            },
            [&](int step, int n, std::uint32_t(&to)[4]) { ptx::ldmatrix_x4_trans(to, b.at(16 * step, 2 * n)); },
            between);
    }

    /// The warp's sums, rounded, into a tile of the block's keys in shared memory.
    __device__ __forceinline__ void stage_sums(char* tile, const Sums& sums, float factor) const {
#pragma unroll
        for (int i = 0; i < 2 * kKeyTiles; ++i) {
            const int row = first_row_of(i / (2 * kRowTiles)) + i % (2 * kRowTiles) * 8 + lane() / 4;
            const auto& of_rows = sums[i / (2 * kRowTiles)][i / 2 % kRowTiles];  // [8 dims][4]
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
                // + 0: whether -0 met further products of weight 0 must not show.
                const float low = fmaf(of_rows[n][i % 2 * 2], factor, 0.0F);
                const float high = fmaf(of_rows[n][i % 2 * 2 + 1], factor, 0.0F);
                char* to = tile + chunk_offset<kHeadDim>(row, half() * kColumns + n) + lane() % 4 * 4;
                *reinterpret_cast<std::uint32_t*>(to) = ptx::pack<T>(low, high);
            }
        }
    }
    __device__ __forceinline__ void put_sums(const char* tile, const Rows& rows, int dim, bool vector) const {
        const std::int64_t offset = head_offset(rows, work.batch, work.member.first_kv, work.kv_head, sizeof(T));
        const Target target = target_of<T>(rows, offset, work.member.len_kv, dim, vector);
        constexpr int kRows = kConfig.block_kv() / (kConfig.threads() / 32);
        cuda::store<kHeadDim, kRows>(tile, target, work.first_key, warp() * kRows, lane());
    }
};

}  // namespace tessera::cuda::gradient
