// SPDX-License-Identifier: Apache-2.0
//
// The split step at head_dim 64, where registers hold the sums of 32 keys and all columns: a warp adds P^T dO and dS^T
// Q of its own queries from what it has made, and only dS goes through shared memory, for dQ. Two warps have the same
// keys; their sums become one at the end.
#pragma once

#include "cuda/gradient/split_loop.cuh"

namespace tessera::cuda::gradient {

template <class T, Config kConfig>
struct SplitOwn : SplitLoop<T, kConfig> {
    using Base = SplitLoop<T, kConfig>;
    using Base::add_own_dk;
    using Base::adds_dq;
    using Base::arrive;
    using Base::inputs;
    using Base::kHeadDim;
    using Base::kStepQueries;
    using Base::kTurns;
    using Base::score_tile;
    using Base::store;
    using Base::wait;
    using Base::work;
    using typename Base::Plan;
    using typename Base::Planned;
    using typename Base::Scores;
    using typename Base::Sums;
    static_assert(kTurns == 2);
    static_assert(kConfig.stages > 2, "Q and dO come two steps ahead, while those of this one are read");

    __device__ __forceinline__ void run_block(KeyWork& to_change) const {
        Base::run_block(to_change, [&](Plan& plan, int index, Sums& dv, Sums& dk, SplitBarriers& barriers) {
            step(plan, index, dv, dk, barriers);
        });
    }

 private:
    /// What all steps share is read where it is needed: the accumulators leave no registers for it.
    __device__ __forceinline__ void step(Plan& plan, int index, Sums& dv, Sums& dk, SplitBarriers& barriers) const {
        const int stage = index % kConfig.stages;
        const Planned& planned = plan.at(index);
        const int buffer = index % 2 * -kConfig.query_tiles;  // of two for dS, which others may still read
        if (this->is_careful(planned, stage)) {
#pragma unroll 1
            for (int t = 0; t < kTurns; ++t) add_dv_careful(dv, planned, stage, buffer, t);
        } else if (planned.edge) {
#pragma unroll 1
            for (int t = 0; t < kTurns; ++t) add_dv<true>(dv, planned, stage, buffer, t);
        } else {
            add_dv<false>(dv, planned, stage, buffer, 0);
            add_dv<false>(dv, planned, stage, buffer, 1);
        }
        ptx::cp_async_wait<0>();
        arrive(barriers.ds);
        if (adds_dq()) this->take_turns(plan, planned, index, barriers);
        add_dk(dk, stage, buffer, 0, NothingBetween{});
        wait(barriers.ds, index);
        this->plan_next(plan, index);
        this->load_both(plan, index + 2);
        ptx::cp_async_commit();
        const bool all = planned.tile * kStepQueries + (kStepQueries - kBlockQ) < work.sequence.len_q;
        if (!adds_dq()) {
            add_dk(dk, stage, buffer, 1, NothingBetween{});
        } else if (planned.masked && (plan.nonfinite_keys || !all)) {
            wait(barriers.turn, index);
            this->add_dq_tiles(planned, buffer);
            add_dk(dk, stage, buffer, 1, NothingBetween{});
        } else if (planned.first) {
            add_dq_dk<true>(dk, planned, stage, buffer, index, barriers);
        } else {
            add_dq_dk<false>(dk, planned, stage, buffer, index, barriers);
        }
        arrive(barriers.added);
    }

    template <bool kEdge>
    __device__ __forceinline__ void add_dv(Sums& dv, const Planned& planned, int stage, int buffer, int turn) const {
        Scores p;
        Scores dp;
        this->template make_p<kEdge>(p, dp, planned, stage, turn, [] { return [](int, int) {}; });
        this->template add_dv_make_ds<kEdge>(dv, dp, p, planned, stage, inputs.ds(score_tile() + buffer), turn);
    }
    __device__ __forceinline__ void add_dv_careful(Sums& dv, const Planned& planned, int stage, int buffer,
                                                   int turn) const {
        Scores p;
        Scores ds;
        const int at = Base::score_place(turn);
        this->make_careful(p, ds, planned, stage, turn,
                           [&](int m, int j) { store(inputs.ds(score_tile() + buffer), at, ds[m][j], m, j); });
        this->add_own_dv(dv, p, inputs.do_tile(stage), turn, NothingBetween{});
    }
    template <class Between>
    __device__ __forceinline__ void add_dk(Sums& dk, int stage, int buffer, int turn, const Between& between) const {
        add_own_dk(dk, inputs.ds(score_tile() + buffer), inputs.q_tile(stage), turn, between);
    }
    /// dQ = dS K, on its way to the workspace under dK += dS^T Q of the last turn.
    template <bool kFirst>
    __device__ __forceinline__ void add_dq_dk(Sums& dk, const Planned& planned, int stage, int buffer, int index,
                                              SplitBarriers& barriers) const {
        float dq[2][4][4];  // [16 queries][8 dims][4]
        float* const to = this->make_dq_of_tile(dq, planned, buffer);
        if constexpr (!kFirst) wait(barriers.turn, index);
        add_dk(dk, stage, buffer, kTurns - 1, [&](int i) {
            constexpr int kColumnTiles = DqTile<kHeadDim>::kColumnTiles;
            const std::int64_t at = DqTile<kHeadDim>::offset(i / 4, i % kColumnTiles, i % 4 / kColumnTiles * 32);
            KeyDq<T, kConfig>::template put<kFirst>(to + at, dq[i / 4][i % 4]);
        });
    }
};

}  // namespace tessera::cuda::gradient
