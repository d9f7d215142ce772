// SPDX-License-Identifier: Apache-2.0
//
// The split step at head_dim 128 and 256: the warps with the same keys share the columns of dV and dK, and so each
// needs P and dS of the others, too, which go through shared memory. A warp's own come first.
#pragma once

#include "cuda/gradient/split_loop.cuh"

namespace tessera::cuda::gradient {

template <class T, Config kConfig>
struct SplitShared : SplitLoop<T, kConfig> {
    using Base = SplitLoop<T, kConfig>;
    using Base::adds_dq;
    using Base::arrive;
    using Base::first_sum_chunk;
    using Base::first_sum_row;
    using Base::inputs;
    using Base::kColumns;
    using Base::kHeadDim;
    using Base::kOwnItems;
    using Base::kQueries;
    using Base::kSumTiles;
    using Base::lane;
    using Base::query_part;
    using Base::store;
    using Base::wait;
    using Base::warp;
    using Base::weights;
    using Base::work;
    using typename Base::Address;
    using typename Base::Plan;
    using typename Base::Planned;
    using typename Base::Scores;
    using typename Base::Sums;
    static_assert(Base::kTurns == 1 && kSumTiles == Base::kKeyTiles);
    static constexpr int kParts = kConfig.query_parts();  // warps with the same keys
    static constexpr int kOtherItems = (kParts - 1) * kOwnItems;

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
        const int buffer = -(index % 2);  // of two for dS, which others may still read
        if (this->is_careful(planned, stage)) add_dv_careful(dv, planned, stage, buffer, barriers);
        else if (planned.edge) add_dv<true>(dv, planned, stage, buffer, barriers);
        else add_dv<false>(dv, planned, stage, buffer, barriers);
        wait_for_p(index, barriers);
        // With two stages Q has room only now, where dK of the step before is done.
        if constexpr (Base::kReadAhead == 1) this->template load<true, false>(plan, index + 1);
        ptx::cp_async_commit();
        add_others(dv, weights(), inputs.do_tile(stage), NothingBetween{});
        ptx::cp_async_wait<0>();
        arrive(barriers.ds);
        if (adds_dq()) this->take_turns(plan, planned, index, barriers);
        this->add_own_dk(dk, inputs.ds(buffer), inputs.q_tile(stage), 0, NothingBetween{});
        wait(barriers.ds, index);
        this->plan_next(plan, index);
        if constexpr (Base::kReadAhead > 1) this->load_both(plan, index + 2);
        else this->template load<false, true>(plan, index + 2);
        ptx::cp_async_commit();
        if (!adds_dq()) {
            add_others(dk, inputs.ds(buffer), inputs.q_tile(stage), NothingBetween{});
        } else if (planned.masked && plan.nonfinite_keys) {
            wait(barriers.turn, index);
            this->add_dq_tiles(planned, buffer);
            add_others(dk, inputs.ds(buffer), inputs.q_tile(stage), NothingBetween{});
        } else {
            add_dq_dk(dk, planned, stage, buffer, index, barriers);
        }
        arrive(barriers.added);
    }

    template <bool kEdge>
    __device__ __forceinline__ void add_dv(Sums& dv, const Planned& planned, int stage, int buffer,
                                           SplitBarriers& barriers) const {
        Scores p;
        Scores dp;
        this->template make_p<kEdge>(p, dp, planned, stage, 0, [&] {
            return [this, &p, at = Base::score_place(0)](int m, int j) { store(weights(), at, p[m][j], m, j); };
        });
        p_is_there(barriers);
        this->template add_dv_make_ds<kEdge>(dv, dp, p, planned, stage, inputs.ds(buffer), 0);
    }
    __device__ __forceinline__ void add_dv_careful(Sums& dv, const Planned& planned, int stage, int buffer,
                                                   SplitBarriers& barriers) const {
        Scores p;
        Scores ds;
        const int at = Base::score_place(0);
        this->make_careful(p, ds, planned, stage, 0, [&](int m, int j) {
            store(weights(), at, p[m][j], m, j);
            store(inputs.ds(buffer), at, ds[m][j], m, j);
        });
        p_is_there(barriers);
        this->add_own_dv(dv, p, inputs.do_tile(stage), 0, NothingBetween{});
    }

    /// P is for the warps with the same keys. Where those are two, they meet by themselves; where Q's stage is free
    /// once P of all is there, all do.
    static constexpr bool kByTwo = kParts == 2;
    static_assert(!kByTwo || Base::kReadAhead > 1, "Q of the step before may still be read by others");
    __device__ static __forceinline__ int barrier_of(int part) {
        constexpr int kPairs = kConfig.threads() / 64;
        return 1 + part * kPairs + warp() % kPairs;
    }
    __device__ __forceinline__ void p_is_there(SplitBarriers& barriers) const {
        if constexpr (kByTwo) {
            __syncwarp();
            ptx::named_barrier_arrive(barrier_of(query_part()), 64);
        } else {
            arrive(barriers.p);
        }
    }
    __device__ __forceinline__ void wait_for_p(int index, SplitBarriers& barriers) const {
        if constexpr (kByTwo) ptx::named_barrier_sync(barrier_of(1 - query_part()), 64);
        else wait(barriers.p, index);
    }

    /// sums += the products of the other warps' queries. `factors`: [keys][queries].
    template <class Between>
    __device__ __forceinline__ void add_others(Sums& sums, const char* factors, const char* queries,
                                               const Between& between) const {
        constexpr int kSteps = kQueries / 16;  // of a warp's queries
        const int own = query_part();
        const MatrixAddress<kBlockQ> a(factors, first_sum_row() + lane() % 16, own * (kQueries / kChunk) + lane() / 16);
        const Address b(queries, lane() % 16, first_sum_chunk() + lane() / 16);
        multiply<T, kSteps*(kParts - 1), kSumTiles, kColumns>(
            [&](int m) -> float(&)[kColumns][4] { return sums[m]; },
            [&](int step, int m, std::uint32_t(&to)[4]) {
                const int other = 1 + step / kSteps;  // own ^ other: the warp's place among them
                ptx::ldmatrix_x4(to, a.at(16 * m, other * (kQueries / kChunk) + 2 * (step % kSteps)));
            },
            [&](int step, int n, std::uint32_t(&to)[4]) {
                const int other = 1 + step / kSteps;
                const int rows = (own ^ other) * (kQueries * kHeadDim * 2);
                ptx::ldmatrix_x4_trans(to, b.at(16 * (step % kSteps), 2 * n) + rows);
            },
            between);
    }

    /// dQ = dS K, on its way to the workspace under dK += dS^T Q.
    __device__ __forceinline__ void add_dq_dk(Sums& dk, const Planned& planned, int stage, int buffer, int index,
                                              SplitBarriers& barriers) const {
        using Dq = KeyDq<T, kConfig>;
        static_assert(Dq::kColumnParts == 1);
        typename Dq::Part dq;
        Dq{{inputs, work}, 0, buffer}.make(dq, 0, false, 0);
        wait(barriers.turn, index);
        // Read behind the product: at head_dim 256 no register is left for it before.
        float* const to = Dq::place(*static_cast<float* const volatile*>(&planned.dq), 0);
        const auto add = [&](auto first) {
            add_others(dk, inputs.ds(buffer), inputs.q_tile(stage), [&](int item) {
#pragma unroll
                for (int i = item * Dq::kFours / kOtherItems; i < (item + 1) * Dq::kFours / kOtherItems; ++i) {
                    Dq::template put_four<decltype(first)::value>(to, dq, i);
                }
            });
        };
        if (*static_cast<const volatile bool*>(&planned.first)) add(std::true_type{});
        else add(std::false_type{});
    }
};

}  // namespace tessera::cuda::gradient
