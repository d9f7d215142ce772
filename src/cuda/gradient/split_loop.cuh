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
#include "cuda/gradient/split_output.cuh"

namespace tessera::cuda::gradient {

template <class T, Config kConfig>
struct SplitLoop : SplitOutput<T, kConfig> {
    using Base = SplitOutput<T, kConfig>;
    using Base::add_rows;
    using Base::adds_dq;
    using Base::clear;
    using Base::first_column;
    using Base::first_row;
    using Base::for_share;
    using Base::inputs;
    using Base::kColumns;
    using Base::kHeadDim;
    using Base::kKeyTiles;
    using Base::kPlanner;
    using Base::kProductItems;
    using Base::kQueries;
    using Base::kStepQueries;
    using Base::kSumItems;
    using Base::kSumTiles;
    using Base::kTiles;
    using Base::kTurns;
    using Base::lane;
    using Base::load_both;
    using Base::make_dq_of_tile;
    using Base::multiply_keys;
    using Base::poisoned;
    using Base::rows;
    using Base::score_place;
    using Base::score_tile;
    using Base::store;
    using Base::turns;
    using Base::two;
    using Base::warp;
    using Base::weights;
    using Base::work;
    using typename Base::Address;
    using typename Base::Plan;
    using typename Base::Planned;
    using typename Base::Scores;
    using typename Base::Sums;
    static constexpr int kReadAhead = kConfig.stages - 1;  // of Q: dO comes two steps ahead

    /// Everything that the block of keys has to do. `to_change`: `work`.
    __device__ __forceinline__ void run_block(KeyWork& to_change) const {
        inputs.load_k();
        inputs.load_v();
        __shared__ Plan plan;
        Sums dv;
        Sums dk;
        clear(dv);
        clear(dk);
        run(plan, dv, dk);
        const bool publishes = plan.count > 0 && adds_dq();
        // Hidden Inf and NaN of Q and dO are rare: only when some have come through is the work done again without
        // them.
        if (plan.cut && plan.count > 0 && __syncthreads_or(static_cast<int>(poisoned(dv) || poisoned(dk)))) {
            if (publishes) this->publish(plan.at(plan.count - 1));
            __syncthreads();
            if (threadIdx.x == 0) to_change.guard(kConfig.block_kv());
            __syncthreads();
            KeyLoop<T, kConfig>{{inputs, work}}.run_block(to_change);
            return;
        }
        const Launch& launch = inputs.launch;
        const ForwardParams& p = launch.params.forward;
        const bool stores_dv = launch.params.dv.data != nullptr;
        const bool stores_dk = launch.params.dk.data != nullptr;
        const float factor_dv = p.keep_scale * (1 / kWeightUnit<T>);
        float factor_dk = p.scale;
        if (Base::kHeld && plan.count > 0) factor_dk /= plan.at(plan.count - 1).ds_unit * kWeightUnit<T>;
        if (work.shares > 1) {
            if (publishes) this->publish(plan.at(plan.count - 1));
            if (stores_dv) this->put_share(true, dv, factor_dv);
            if (stores_dk) this->put_share(false, dk, factor_dk);
            ptx::cp_async_wait<0>();
            return;
        }
        ptx::cp_async_wait<0>();
        if (plan.count == 0) __syncthreads();
        if (stores_dv) this->stage_sums(inputs.v_tile(), dv, factor_dv);
        if (stores_dk) this->stage_sums(inputs.k_tile(), dk, factor_dk);
        __syncthreads();
        // Its fence holds a warp up, and nobody waits for that one here.
        if (publishes) this->publish(plan.at(plan.count - 1));
        if (stores_dv) this->put_sums(inputs.v_tile(), launch.params.dv, p.head_dim_v, launch.vector_dv);
        if (stores_dk) this->put_sums(inputs.k_tile(), launch.params.dk, p.head_dim, launch.vector_dk);
    }

 private:
    /// All steps, and a barrier behind them; that all have added to dQ in the last one is still to be published.
    __device__ __forceinline__ void run(Plan& plan, Sums& dv, Sums& dk) const {
        if (threadIdx.x / 32 == kPlanner) this->begin(plan);
        __syncthreads();
        // With K and V.
        load_both(plan, 0);
        ptx::cp_async_commit();
        this->template load<(kReadAhead > 1), true>(plan, 1);
        ptx::cp_async_commit();
        ptx::cp_async_wait<1>();
        __syncthreads();
        if (plan.cut) {
            const bool special = holds_special<T, kConfig.block_kv(), kHeadDim, kConfig.threads()>(inputs.k_tile());
            const bool any = __syncthreads_or(static_cast<int>(special)) != 0;
            if (threadIdx.x == 0) plan.special_keys = any;
        }
#pragma unroll 1
        for (int i = 0; i < plan.count; ++i) {
            if constexpr (Base::kHeld) hold(dk, plan, i);
            step(plan, i, dv, dk);
        }
        if (plan.count > 0) __syncthreads();
    }
    /// dK goes over to the unit of the next head.
    __device__ __forceinline__ void hold(Sums& dk, Plan& plan, int index) const {
        if (index == 0) return;
        const float before = plan.at(index - 1).ds_unit;
        const float unit = plan.at(index).ds_unit;
        if (unit == before) return;
        const float factor = unit / before;
#pragma unroll
        for (int m = 0; m < kSumTiles; ++m) {
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) dk[m][n][e] *= factor;
            }
        }
    }
    /// What all steps share is read where it is needed: the accumulators leave no registers for it.
    __device__ __forceinline__ void step(Plan& plan, int index, Sums& dv, Sums& dk) const {
        const int stage = index % kConfig.stages;
        const Planned& planned = plan.at(index);
        const auto between = [&] {
            // With two stages Q has room only now, where dK of the step before is done.
            if constexpr (kReadAhead == 1) this->template load<true, false>(plan, index + 1);
            ptx::cp_async_commit();
            if (!adds_dq()) return;
            if (index > 0) this->publish(plan.at(index - 1));
            this->wait(planned);
        };
        if (planned.masked != planned.edge || has_large_scores(stage)) add_dv_careful(dv, planned, stage, between);
        else if (planned.edge) add_dv<true>(dv, planned, stage, between);
        else add_dv<false>(dv, planned, stage, between);
        ptx::cp_async_wait<0>();
        __syncthreads();
        // Here, where no scores are held.
        this->plan_next(plan, index);
        if constexpr (kReadAhead > 1) load_both(plan, index + 2);
        else this->template load<false, true>(plan, index + 2);
        ptx::cp_async_commit();
        if ((planned.masked && plan.special_keys) || !adds_dq()) {
            if (adds_dq()) {
#pragma unroll 1
                for (int t = 0; t < kConfig.query_tiles; ++t) {
                    const int first_query = planned.tile * kStepQueries + t * kBlockQ;
                    if (first_query >= work.member.len_q) break;
                    KeyDq<T, kConfig>{{inputs, work}, t}.add(planned.step(), first_query, planned.masked);
                }
            }
            add_rows(dk, inputs.ds(), inputs.q_tile(stage), NothingBetween{});
        } else if constexpr (Base::kTight) {
            add_dq_at_once_dk(dk, planned, stage);
        } else if (planned.first) {
            add_dq_dk<true>(dk, planned, stage);
        } else {
            add_dq_dk<false>(dk, planned, stage);
        }
    }

    /// S, dP, P and dS, and dV += P^T dO; `between`: what some threads do after the barrier. P is made under dP, dS
    /// under the product that comes next. kEdge: some pairs are hidden by the band.
    template <bool kEdge, class Between>
    __device__ __forceinline__ void add_dv(Sums& dv, const Planned& planned, int stage, const Between& between) const {
        Scores s;
        Scores dp;
        multiply_keys(s, inputs.k_tile(), inputs.q_tile(stage), 0, NothingBetween{});
        if constexpr (kEdge) this->hide_scores(s, planned.tile, 0);
        make_dp(dp, s, stage, 0);
        if constexpr (kTurns > 1) {
            Scores next;
            std::uint32_t ds[kKeyTiles][kTiles][2];  // other warps may still read that of the step before
            const float* const deltas = rows(stage).delta + first_column(0) + lane() % 4 * 2;
            multiply_keys(next, inputs.k_tile(), inputs.q_tile(stage), 1, [&](int item) {
                for_share<kProductItems>(item, [&](int m, int j) {
                    make_ds(dp[m][j], s[m][j], two(deltas, j), planned);
#pragma unroll
                    for (int r = 0; r < 2; ++r) ds[m][j][r] = ptx::pack<T>(dp[m][j][2 * r], dp[m][j][2 * r + 1]);
                });
            });
            if constexpr (kEdge) {
                if (mend_ds(dp, planned.tile, 0)) {
#pragma unroll
                    for (int i = 0; i < kKeyTiles * kTiles; ++i) {
                        float(&x)[4] = dp[i % kKeyTiles][i / kKeyTiles];
#pragma unroll
                        for (int r = 0; r < 2; ++r)
                            ds[i % kKeyTiles][i / kKeyTiles][r] = ptx::pack<T>(x[2 * r], x[2 * r + 1]);
                    }
                }
                this->hide_scores(next, planned.tile, 1);
            }
            make_dp(dp, next, stage, 1);
            __syncthreads();
            between();
            const int at = score_place(0);
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                for (int m = 0; m < kKeyTiles; ++m) store(inputs.ds(score_tile()), at, ds[m][j], m, j);
            }
            add_rows(dv, weights(), inputs.do_tile(stage), make_ds_under<kSumItems>(dp, next, planned, stage, 1));
            if constexpr (kEdge) store_mended(dp, planned.tile, 1);
        } else {
            __syncthreads();
            between();
            add_rows(dv, weights(), inputs.do_tile(stage), make_ds_under<kSumItems>(dp, s, planned, stage, 0));
            if constexpr (kEdge) store_mended(dp, planned.tile, 0);
        }
    }
    /// dP^T, and under it S^T becomes P^T, which is also stored, rounded.
    __device__ __forceinline__ void make_dp(Scores& dp, Scores& s, int stage, int turn) const {
        const int at = score_place(turn);
        char* const to = weights() + score_tile() * kConfig.score_bytes();
        const float factor = inputs.launch.params.forward.scale * kLog2E;
        const float* const offsets = rows(stage).offset + first_column(turn) + lane() % 4 * 2;
        multiply_keys(dp, inputs.v_tile(), inputs.do_tile(stage), turn, [&](int item) {
            for_share<kProductItems>(item, [&](int m, int j) {
                Base::exponentiate(s[m][j], factor, two(offsets, j));
                store(to, at, s[m][j], m, j);
            });
        });
    }
    /// What makes dP^T dS^T, stored, rounded, between `kItems` items of a product.
    template <int kItems>
    __device__ __forceinline__ auto make_ds_under(Scores& dp, const Scores& p, const Planned& planned, int stage,
                                                  int turn) const {
        const int at = score_place(turn);
        char* const to = inputs.ds(score_tile());
        const float* const deltas = rows(stage).delta + first_column(turn) + lane() % 4 * 2;
        return [&dp, &p, &planned, at, to, deltas](int item) {
            for_share<kItems>(item, [&](int m, int j) {
                make_ds(dp[m][j], p[m][j], two(deltas, j), planned);
                store(to, at, dp[m][j], m, j);
            });
        };
    }

    /// 0 times what is no number is none: hidden pairs have P = 0, and dS = 0 here. Returns whether there were any.
    __device__ __forceinline__ bool mend_ds(Scores& ds, int tile, int turn) const {
        if (!poisoned(ds)) return false;
        const int first_key = work.first_key + first_row() + lane() / 4;
        const int first_query = tile * kStepQueries + score_tile() * kBlockQ + first_column(turn) + lane() % 4 * 2;
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) hide(ds[m][j], ds[m][j], first_query + 8 * j, first_key + 16 * m);
        }
        return true;
    }
    __device__ __forceinline__ void store_mended(Scores& ds, int tile, int turn) const {
        if (!mend_ds(ds, tile, turn)) return;
        const int at = score_place(turn);
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) store(inputs.ds(score_tile()), at, ds[m][j], m, j);
        }
    }

    /// The same where some pairs may be hidden, or rows have large scores: nothing is kept over the barrier.
    template <class Between>
    __device__ __forceinline__ void add_dv_careful(Sums& dv, const Planned& planned, int stage,
                                                   const Between& between) const {
        const RowTile& rows = this->rows(stage);
        const int first_key = work.first_key + first_row() + lane() / 4;
        __syncthreads();  // the step before has no need of its dS any more
#pragma unroll 1
        for (int turn = 0; turn < kTurns; ++turn) {
            const int column = first_column(turn) + lane() % 4 * 2;
            const int first_query = planned.tile * kStepQueries + score_tile() * kBlockQ + column;
            const int at = score_place(turn);
            Scores s;
            Scores dp;
            multiply_keys(s, inputs.k_tile(), inputs.q_tile(stage), turn, NothingBetween{});
            multiply_keys(dp, inputs.v_tile(), inputs.do_tile(stage), turn, NothingBetween{});
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                const float2 delta = two(rows.delta + column, j);
#pragma unroll
                for (int m = 0; m < kKeyTiles; ++m) {
                    this->exponentiate_special(s[m][j], rows, column + 8 * j);
                    make_ds(dp[m][j], s[m][j], delta, planned);
                    hide(s[m][j], dp[m][j], first_query + 8 * j, first_key + 16 * m);
                    store(weights() + score_tile() * kConfig.score_bytes(), at, s[m][j], m, j);
                    store(inputs.ds(score_tile()), at, dp[m][j], m, j);
                }
            }
        }
        __syncthreads();
        between();
        add_rows(dv, weights(), inputs.do_tile(stage), NothingBetween{});
    }
    /// Does a row of the step have large scores?
    __device__ __forceinline__ bool has_large_scores(int stage) const {
        const auto* const norms = reinterpret_cast<const float2*>(inputs.rows(stage).norm);
        float2 x = norms[lane()];
        bool any = x.x + x.y != 0.0F;  // none is negative
        if constexpr (kConfig.query_tiles > 1) {
            x = norms[sizeof(RowTile) / sizeof(float2) + lane()];
            any |= x.x + x.y != 0.0F;
        }
        return __any_sync(0xFFFFFFFF, any);
    }
    /// P and dS of pairs that are not visible are 0, whatever dP is.
    __device__ __forceinline__ void hide(float (&p)[4], float (&ds)[4], int query, int key) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (this->sees(query + e % 2, key + e / 2 * 8)) continue;
            p[e] = 0;
            ds[e] = 0;
        }
    }

    /// dQ = dS K, on its way to the workspace under dK += dS^T Q.
    template <bool kFirst>
    __device__ __forceinline__ void add_dq_dk(Sums& dk, const Planned& planned, int stage) const {
        if constexpr (kConfig.query_tiles > 1) {
            const bool exists = planned.tile * kStepQueries + warp() / 4 * kBlockQ < work.member.len_q;
            float dq[2][4][4];  // [16 queries][8 dims][4]
            float* const to = make_dq_of_tile(dq, planned);
            add_dk(dk, stage, [&](int i) {
                constexpr int kColumnTiles = DqTile<kHeadDim>::kColumnTiles;
                const std::int64_t at = DqTile<kHeadDim>::offset(i / 4, i % kColumnTiles, i % 4 / kColumnTiles * 32);
                if (exists) KeyDq<T, kConfig>::template put<kFirst>(to + at, dq[i / 4][i % 4]);
            });
        } else {
            using Dq = KeyDq<T, kConfig>;
            const Dq of_dq{{inputs, work}};
#pragma unroll 1
            for (int part = 0; part < Dq::kColumnParts - 1; ++part) of_dq.add_part(planned.step(), 0, false, part);
            float* const to = Dq::place(planned.dq, Dq::kColumnParts - 1);
            typename Dq::Part dq;
            of_dq.make(dq, 0, false, Dq::kColumnParts - 1);
            add_dk(dk, stage, [&](int i) { Dq::template put_four<kFirst>(to, dq, i); });
        }
    }
    /// The same where a warp makes all of its dQ at once. What of the step is needed is read behind the product: no
    /// register is left for it before.
    __device__ __forceinline__ void add_dq_at_once_dk(Sums& dk, const Planned& planned, int stage) const {
        using Dq = KeyDq<T, kConfig>;
        typename Dq::Part dq;
        Dq{{inputs, work}}.make(dq, 0, false, 0);
        float* const to = Dq::place(*static_cast<float* const volatile*>(&planned.dq), 0);
        if (*static_cast<const volatile bool*>(&planned.first)) {
            add_dk(dk, stage, [&](int i) { Dq::template put_four<true>(to, dq, i); });
        } else {
            add_dk(dk, stage, [&](int i) { Dq::template put_four<false>(to, dq, i); });
        }
    }
    /// dK += dS^T Q; `put`(i) for each of the fours of dQ between the products.
    template <class Put>
    __device__ __forceinline__ void add_dk(Sums& dk, int stage, const Put& put) const {
        constexpr int kFours = kConfig.query_tiles > 1 ? 8 : KeyDq<T, kConfig>::kFours;
        add_rows(dk, inputs.ds(), inputs.q_tile(stage), [&](int item) {
#pragma unroll
            for (int i = item * kFours / kSumItems; i < (item + 1) * kFours / kSumItems; ++i) put(i);
        });
    }
    /// dP^T becomes dS^T, times the unit of its head.
    __device__ static __forceinline__ void make_ds(float (&dp)[4], const float (&p)[4], const float2& delta,
                                                   const Planned& planned) {
        // No register is kept for it.
        const float unit = Base::kHeld ? *static_cast<const volatile float*>(&planned.ds_unit) : 1.0F;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            dp[e] = p[e] * (dp[e] - (e % 2 == 0 ? delta.x : delta.y));
            if constexpr (Base::kHeld) dp[e] *= unit;
        }
    }
};

}  // namespace tessera::cuda::gradient
