// SPDX-License-Identifier: Apache-2.0
//
// The mainloop at head_dim 64 for plain scores. Two warps have the same keys and split the queries of a step. Registers
// hold dV and dK of 32 keys and all columns, so each warp adds P^T dO and dS^T Q of its own queries alone. The epilogue
// adds up the sums of the two warps. Only dQ needs dS of other warps.
#pragma once

#include "cuda/gradient/main/dq_gemm.cuh"
#include "cuda/gradient/main/key_block.cuh"

namespace tessera::cuda::gradient {

template <class T, Config kConfig>
struct MainloopSplitQueries {
    using Planner = StepPlanner<T, kConfig>;
    using Warp = WarpTile<T, kConfig>;
    using Sync = StepSync<T, kConfig>;
    using Scores = typename Warp::Scores;
    using Sums = typename Warp::Sums;
    static constexpr int kHeadDim = kConfig.head_dim;
    static constexpr int kStepQueries = Warp::kStepQueries;
    static constexpr int kPasses = Warp::kPasses;
    static_assert(kHeadDim == 64 && kPasses == 2);
    static_assert(kConfig.stages > 2, "Q and dO are copied two steps ahead, while those of this step are read");

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
        const int buffer = index % 2 * -kConfig.query_tiles;  // dS has two buffers: other warps may read the other
        if (warp.needs_predicates(planned, stage)) {
#pragma unroll 1
            for (int pass = 0; pass < kPasses; ++pass) add_dv_with_predicates(dv, planned, stage, buffer, pass);
        } else if (planned.edge) {
#pragma unroll 1
            for (int pass = 0; pass < kPasses; ++pass) add_dv<true>(dv, planned, stage, buffer, pass);
        } else {
            add_dv<false>(dv, planned, stage, buffer, 0);
            add_dv<false>(dv, planned, stage, buffer, 1);
        }
        ptx::cp_async_wait<0>();
        sync.arrive(barriers.ds);
        const bool adds_dq = tiles.launch.params.dq.data != nullptr;
        if (adds_dq) sync.acquire_and_release(plan, planned, index, barriers);
        add_dk(dk, stage, buffer, 0, NothingBetween{});
        sync.wait(barriers.ds, index);
        planner.plan_next(plan, index);
        planner.load_both(plan, index + 2);
        ptx::cp_async_commit();
        const bool all = planned.tile * kStepQueries + (kStepQueries - kBlockQ) < tiles.work.sequence.len_q;
        if (!adds_dq) {
            add_dk(dk, stage, buffer, 1, NothingBetween{});
        } else if (planned.masked && (plan.nonfinite_keys || !all)) {
            sync.wait(barriers.acquired, index);
            add_dq_tiles(planned, buffer);
            add_dk(dk, stage, buffer, 1, NothingBetween{});
        } else if (planned.first) {
            add_dq_dk<true>(dk, planned, stage, buffer, index, barriers);
        } else {
            add_dq_dk<false>(dk, planned, stage, buffer, index, barriers);
        }
        sync.arrive(barriers.added);
    }

    __device__ __forceinline__ char* own_ds_tile(int buffer) const { return tiles.ds_tile(warp.query_tile() + buffer); }

    template <bool kEdge>
    __device__ __forceinline__ void add_dv(Sums& dv, const PlannedStep& planned, int stage, int buffer,
                                           int pass) const {
        Scores p;
        Scores dp;
        warp.template compute_p<kEdge>(p, dp, planned, stage, pass, [] { return [](int, int) {}; });
        warp.template add_dv_compute_ds<kEdge>(dv, dp, p, planned, stage, own_ds_tile(buffer), pass);
    }
    __device__ __forceinline__ void add_dv_with_predicates(Sums& dv, const PlannedStep& planned, int stage, int buffer,
                                                           int pass) const {
        Scores p;
        Scores ds;
        const int offset = Warp::score_offset(pass);
        warp.compute_with_predicates(p, ds, planned, stage, pass,
                                     [&](int m, int j) { Warp::store(own_ds_tile(buffer), offset, ds[m][j], m, j); });
        warp.add_own_dv(dv, p, tiles.do_tile(stage), pass, NothingBetween{});
    }
    template <class Between>
    __device__ __forceinline__ void add_dk(Sums& dk, int stage, int buffer, int pass, const Between& between) const {
        warp.add_own_dk(dk, own_ds_tile(buffer), tiles.q_tile(stage), pass, between);
    }

    /// The slow path, for K with Inf or NaN and for missing queries: dQ of the step's tiles one after the other.
    __device__ __forceinline__ void add_dq_tiles(const PlannedStep& planned, int buffer) const {
#pragma unroll 1
        for (int t = 0; t < kConfig.query_tiles; ++t) {
            const int first_query = planned.tile * kStepQueries + t * kBlockQ;
            if (first_query >= tiles.work.sequence.len_q) break;
            DqGemm<T, kConfig>{tiles, t, buffer}.add(planned.step(), first_query, planned.masked);
        }
    }
    /// dQ = dS K, added in the workspace between the mma of dK += dS^T Q of the last pass.
    template <bool kFirst>
    __device__ __forceinline__ void add_dq_dk(Sums& dk, const PlannedStep& planned, int stage, int buffer, int index,
                                              StepBarriers& barriers) const {
        float dq[2][4][4];  // [16 queries][8 dims][4]
        float* const to = multiply_ds(dq, planned, buffer);
        if constexpr (!kFirst) sync.wait(barriers.acquired, index);
        add_dk(dk, stage, buffer, kPasses - 1, [&](int i) {
            constexpr int kColumnTiles = DqTile<kHeadDim>::kColumnTiles;
            const std::int64_t at = DqTile<kHeadDim>::offset(i / 4, i % kColumnTiles, i % 4 / kColumnTiles * 32);
            DqGemm<T, kConfig>::template add_four<kFirst>(to + at, dq[i / 4][i % 4]);
        });
    }
    /// Computes dQ of one of the step's two tiles with half of the warps. Each warp has 32 queries and half of the
    /// columns: the part of two warps of DqTile. Returns where its first float4 lies in the workspace.
    __device__ __forceinline__ float* multiply_ds(float (&dq)[2][4][4], const PlannedStep& planned, int buffer) const {
        const int queries = warp_number() % 4 / 2;
        const int columns = warp_number() % 2;
        const MatrixAddress<kBlockQ> ds(tiles.ds_tile(warp_number() / 4 + buffer),
                                        lane_number() / 16 * 8 + lane_number() % 8,
                                        queries * 4 + lane_number() / 8 % 2);
        const MatrixAddress<kHeadDim> k(tiles.k_tile(), lane_number() % 16, columns * 4 + lane_number() / 16);
        clear(dq);
        multiply<T, kConfig.block_kv() / 16, 2, 4>(
            [&](int m) -> float(&)[4][4] { return dq[m]; },
            [&](int step, int m, std::uint32_t(&a)[4]) { ptx::ldmatrix_x4_trans(a, ds.at(16 * step, 2 * m)); },
            [&](int step, int n, std::uint32_t(&b)[4]) { ptx::ldmatrix_x4_trans(b, k.at(16 * step, 2 * n)); },
            NothingBetween{});
        return planned.dq + warp_number() / 4 * DqTile<kHeadDim>::kFloats +
               DqTile<kHeadDim>::offset(0, 0, (queries * 4 + columns * 2) * 32 + lane_number());
    }
};

}  // namespace tessera::cuda::gradient
