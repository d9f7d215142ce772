// SPDX-License-Identifier: Apache-2.0
//
// The mainloop at head_dim 128 and 256 for plain scores. The warps with the same keys split the queries of S and dP,
// and the columns of dV and dK. So each needs P and dS of the others, which go through shared memory; it begins with
// its own, while the others store theirs.
#pragma once

#include "cuda/gradient/main/dq_gemm.cuh"
#include "cuda/gradient/main/key_block.cuh"

namespace tessera::cuda::gradient {

template <class T, Config kConfig>
struct MainloopSplitColumns {
    using Planner = StepPlanner<T, kConfig>;
    using Warp = WarpTile<T, kConfig>;
    using Sync = StepSync<T, kConfig>;
    using Scores = typename Warp::Scores;
    using Sums = typename Warp::Sums;
    static constexpr int kHeadDim = kConfig.head_dim;
    static constexpr int kQueries = Warp::kQueries;
    static constexpr int kSumTiles = Warp::kSumTiles;
    static constexpr int kColumns = Warp::kColumns;
    static constexpr int kQAhead = KeyBlock<T, kConfig>::kQAhead;
    static constexpr int kParts = kConfig.query_parts();  // warps with the same keys
    static constexpr int kOtherItems = (kParts - 1) * Warp::kSumItems;
    static_assert(Warp::kPasses == 1 && kSumTiles == Warp::kKeyTiles);
    /// If two warps have the same keys, they synchronise P between themselves. If more have, all warps synchronise, and
    /// after that the stage of Q of the previous step is free.
    static constexpr bool kPairBarrier = kParts == 2;
    static_assert(!kPairBarrier || kQAhead > 1, "other warps may still read Q of the step before");

    const CtaTiles<T, kConfig> tiles;
    const Planner planner{tiles};
    const Warp warp{tiles};
    const Sync sync{tiles.work};

    __device__ __forceinline__ void run_block(CtaWork& mutable_work) const {
        KeyBlock<T, kConfig>{tiles}.run(mutable_work,
                                        [&](StepPlan& plan, int index, Sums& dv, Sums& dk, StepBarriers& barriers) {
                                            step(plan, index, dv, dk, barriers);
                                        });
    }

 private:
    /// One step. Values that all steps share are read where they are needed: the accumulators leave no registers.
    __device__ __forceinline__ void step(StepPlan& plan, int index, Sums& dv, Sums& dk, StepBarriers& barriers) const {
        const int stage = index % kConfig.stages;
        const PlannedStep& planned = plan.at(index);
        const int buffer = -(index % 2);  // dS has two buffers: other warps may still read the other one
        if (warp.needs_predicates(planned, stage)) add_dv_with_predicates(dv, planned, stage, buffer, barriers);
        else if (planned.edge) add_dv<true>(dv, planned, stage, buffer, barriers);
        else add_dv<false>(dv, planned, stage, buffer, barriers);
        wait_for_p(index, barriers);
        // With two stages Q can be copied only here, after dK of the previous step.
        if constexpr (kQAhead == 1) planner.template load<true, false>(plan, index + 1);
        ptx::cp_async_commit();
        add_others(dv, tiles.p_tile(), tiles.do_tile(stage), NothingBetween{});
        ptx::cp_async_wait<0>();
        sync.arrive(barriers.ds);
        const bool adds_dq = tiles.launch.params.dq.data != nullptr;
        if (adds_dq) sync.acquire_and_release(plan, planned, index, barriers);
        warp.add_own_dk(dk, tiles.ds_tile(buffer), tiles.q_tile(stage), 0, NothingBetween{});
        sync.wait(barriers.ds, index);
        planner.plan_next(plan, index);
        if constexpr (kQAhead > 1) planner.load_both(plan, index + 2);
        else planner.template load<false, true>(plan, index + 2);
        ptx::cp_async_commit();
        if (!adds_dq) {
            add_others(dk, tiles.ds_tile(buffer), tiles.q_tile(stage), NothingBetween{});
        } else if (planned.masked && plan.nonfinite_keys) {
            sync.wait(barriers.acquired, index);
            const int first_query = planned.tile * Warp::kStepQueries;
            DqGemm<T, kConfig>{tiles, 0, buffer}.add(planned.step(), first_query, planned.masked);
            add_others(dk, tiles.ds_tile(buffer), tiles.q_tile(stage), NothingBetween{});
        } else {
            add_dq_dk(dk, planned, stage, buffer, index, barriers);
        }
        sync.arrive(barriers.added);
    }

    template <bool kEdge>
    __device__ __forceinline__ void add_dv(Sums& dv, const PlannedStep& planned, int stage, int buffer,
                                           StepBarriers& barriers) const {
        Scores p;
        Scores dp;
        warp.template compute_p<kEdge>(p, dp, planned, stage, 0, [&] {
            return [this, &p, offset = Warp::score_offset(0)](int m, int j) {
                Warp::store(tiles.p_tile(), offset, p[m][j], m, j);
            };
        });
        arrive_p(barriers);
        warp.template add_dv_compute_ds<kEdge>(dv, dp, p, planned, stage, tiles.ds_tile(buffer), 0);
    }
    __device__ __forceinline__ void add_dv_with_predicates(Sums& dv, const PlannedStep& planned, int stage, int buffer,
                                                           StepBarriers& barriers) const {
        Scores p;
        Scores ds;
        const int offset = Warp::score_offset(0);
        warp.compute_with_predicates(p, ds, planned, stage, 0, [&](int m, int j) {
            Warp::store(tiles.p_tile(), offset, p[m][j], m, j);
            Warp::store(tiles.ds_tile(buffer), offset, ds[m][j], m, j);
        });
        arrive_p(barriers);
        warp.add_own_dv(dv, p, tiles.do_tile(stage), 0, NothingBetween{});
    }

    __device__ static __forceinline__ int barrier_of(int part) {
        constexpr int kPairs = kConfig.threads() / 64;
        return 1 + part * kPairs + warp_number() % kPairs;
    }
    /// The warp has stored P.
    __device__ __forceinline__ void arrive_p(StepBarriers& barriers) const {
        if constexpr (kPairBarrier) {
            __syncwarp();
            ptx::named_barrier_arrive(barrier_of(Warp::query_part()), 64);
        } else {
            sync.arrive(barriers.p);
        }
    }
    __device__ __forceinline__ void wait_for_p(int index, StepBarriers& barriers) const {
        if constexpr (kPairBarrier) ptx::named_barrier_sync(barrier_of(1 - Warp::query_part()), 64);
        else sync.wait(barriers.p, index);
    }

    /// sums += A^T B over the queries of the other warps. `a`: P or dS, [keys][queries]; `b`: dO or Q.
    template <class Between>
    __device__ __forceinline__ void add_others(Sums& sums, const char* a_tile, const char* b_tile,
                                               const Between& between) const {
        constexpr int kSteps = kQueries / 16;  // steps over the queries of one warp
        const int own = Warp::query_part();
        const MatrixAddress<kBlockQ> a(a_tile, Warp::first_sum_row() + lane_number() % 16,
                                       own * (kQueries / kChunk) + lane_number() / 16);
        const MatrixAddress<kHeadDim> b(b_tile, lane_number() % 16, Warp::first_sum_chunk() + lane_number() / 16);
        multiply<T, kSteps*(kParts - 1), kSumTiles, kColumns>(
            [&](int m) -> float(&)[kColumns][4] { return sums[m]; },
            [&](int step, int m, std::uint32_t(&to)[4]) {
                const int other = 1 + step / kSteps;  // the other warp's number is own ^ other
                ptx::ldmatrix_x4(to, a.at(16 * m, other * (kQueries / kChunk) + 2 * (step % kSteps)));
            },
            [&](int step, int n, std::uint32_t(&to)[4]) {
                const int other = 1 + step / kSteps;
                const int rows = (own ^ other) * (kQueries * kHeadDim * 2);
                ptx::ldmatrix_x4_trans(to, b.at(16 * (step % kSteps), 2 * n) + rows);
            },
            between);
    }

    /// dQ = dS K, added in the workspace between the mma of dK += dS^T Q.
    __device__ __forceinline__ void add_dq_dk(Sums& dk, const PlannedStep& planned, int stage, int buffer, int index,
                                              StepBarriers& barriers) const {
        using Dq = DqGemm<T, kConfig>;
        static_assert(Dq::kColumnParts == 1);
        typename Dq::Part dq;
        Dq{tiles, 0, buffer}.multiply(dq, 0, false, 0);
        sync.wait(barriers.acquired, index);
        // Read after the GEMM: at head_dim 256 no register is left for it earlier.
        float* const to = Dq::destination(*static_cast<float* const volatile*>(&planned.dq), 0);
        const auto add = [&](auto first) {
            add_others(dk, tiles.ds_tile(buffer), tiles.q_tile(stage), [&](int item) {
#pragma unroll
                for (int i = item * Dq::kFours / kOtherItems; i < (item + 1) * Dq::kFours / kOtherItems; ++i) {
                    Dq::template add_four<decltype(first)::value>(to, dq, i);
                }
            });
        };
        if (*static_cast<const volatile bool*>(&planned.first)) add(std::true_type{});
        else add(std::false_type{});
    }
};

}  // namespace tessera::cuda::gradient
