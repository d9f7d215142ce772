// SPDX-License-Identifier: Apache-2.0
//
// A key block from the first copies to dV and dK: prologue, loop over the steps, epilogue. Both mainloops with a plan
// of steps (mainloop_split_queries.cuh, mainloop_split_columns.cuh) use it.
#pragma once

#include "cuda/gradient/main/mainloop_warp_pairs.cuh"
#include "cuda/gradient/main/step_sync.cuh"
#include "cuda/gradient/main/warp_tile.cuh"
#include "cuda/tile/output.cuh"

namespace tessera::cuda::gradient {

template <class T, Config kConfig>
struct KeyBlock {
    using Planner = StepPlanner<T, kConfig>;
    using Warp = WarpTile<T, kConfig>;
    using Sync = StepSync<T, kConfig>;
    using Sums = typename Warp::Sums;
    static constexpr int kHeadDim = kConfig.head_dim;
    static constexpr int kSumTiles = Warp::kSumTiles;
    static constexpr int kColumns = Warp::kColumns;
    static constexpr int kQAhead = kConfig.stages - 1;  // steps that Q is copied ahead; dO is copied two steps ahead

    const CtaTiles<T, kConfig> tiles;

    /// Processes the key block: loads, steps, epilogue. `step`(plan, index, dv, dk, barriers) computes one step.
    /// `mutable_work` is the CTA's own CtaWork.
    template <class OfStep>
    __device__ __forceinline__ void run(CtaWork& mutable_work, const OfStep& step) const {
        tiles.load_k();
        tiles.load_v();
        __shared__ StepPlan plan;
        __shared__ StepBarriers barriers;
        if (threadIdx.x == 0) barriers.init(kConfig.threads() / 32);
        Sums dv;
        Sums dk;
        clear(dv);
        clear(dk);
        prologue(plan);
#pragma unroll 1
        for (int i = 0; i < plan.count; ++i) {
            if constexpr (Warp::kFp16) rescale_dk(dk, plan, i);
            step(plan, i, dv, dk, barriers);
        }
        if (plan.count > 0) __syncthreads();
        const bool releases = plan.count > 0 && tiles.launch.params.dq.data != nullptr;
        // Inf and NaN in hidden Q and dO are rare. Only if they reached dV or dK is the work done again without them.
        if (plan.any_masked && plan.count > 0 &&
            __syncthreads_or(static_cast<int>(any_nonfinite(dv) || any_nonfinite(dk)))) {
            if (releases) sync().release_last(plan);
            __syncthreads();
            if (threadIdx.x == 0) mutable_work.start_over(kConfig.block_kv());
            __syncthreads();
            MainloopWarpPairs<T, kConfig>{tiles}.run_block(mutable_work);
            return;
        }
        epilogue(plan, dv, dk, releases);
    }

 private:
    __device__ __forceinline__ Sync sync() const { return {tiles.work}; }

    /// The work before the first step. On return the operands of the first step have arrived.
    __device__ __forceinline__ void prologue(StepPlan& plan) const {
        const Planner planner{tiles};
        const bool first_is_loaded = planner.load_first();  // in one group with K and V
        if (threadIdx.x / 32 == Planner::kWarp) planner.begin(plan);
        __syncthreads();
        if (!first_is_loaded) planner.load_both(plan, 0);
        ptx::cp_async_commit();
        planner.template load<(kQAhead > 1), true>(plan, 1);
        ptx::cp_async_commit();
        ptx::cp_async_wait<1>();
        __syncthreads();
        if (!plan.any_masked) return;
        const bool nonfinite = holds_nonfinite<T, kConfig.block_kv(), kHeadDim, kConfig.threads()>(tiles.k_tile());
        const bool any = __syncthreads_or(static_cast<int>(nonfinite)) != 0;
        if (threadIdx.x == 0) plan.nonfinite_keys = any;
    }
    /// Rescales dK from the fp16 scale of the previous head to that of the step's head.
    __device__ __forceinline__ void rescale_dk(Sums& dk, StepPlan& plan, int index) const {
        if (index == 0) return;
        const float before = plan.at(index - 1).ds_scale;
        const float scale = plan.at(index).ds_scale;
        if (scale == before) return;
        const float factor = scale / before;
#pragma unroll
        for (int m = 0; m < kSumTiles; ++m) {
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) dk[m][n][e] *= factor;
            }
        }
    }

    /// Writes dV and dK. A barrier of all threads follows the last step.
    __device__ __forceinline__ void epilogue(StepPlan& plan, Sums& dv, Sums& dk, bool releases) const {
        const Launch& launch = tiles.launch;
        const ForwardParams& p = launch.params.forward;
        const bool stores_dv = launch.params.dv.data != nullptr;
        const bool stores_dk = launch.params.dk.data != nullptr;
        const float factor_dv = p.keep_scale * (1 / kPScale<T>);
        float factor_dk = p.scale;
        if (Warp::kFp16 && plan.count > 0) factor_dk /= plan.at(plan.count - 1).ds_scale * kPScale<T>;
        ptx::cp_async_wait<0>();
        if (plan.count == 0) __syncthreads();
        if constexpr (kConfig.split_queries) reduce_sums(dv, dk);
        const auto for_each = [&](const auto& store) {
            if constexpr (kConfig.split_queries) {
                const bool is_dv = keeps_dv();
                if (is_dv ? stores_dv : stores_dk) store(is_dv, dv, is_dv ? factor_dv : factor_dk);
            } else {
                if (stores_dv) store(true, dv, factor_dv);
                if (stores_dk) store(false, dk, factor_dk);
            }
        };
        if (tiles.work.sums_in_workspace()) {
            if (releases) sync().release_last(plan);
            for_each([&](bool is_dv, const Sums& sums, float factor) { store_partial_sums(is_dv, sums, factor); });
            return;
        }
        for_each([&](bool is_dv, const Sums& sums, float factor) {
            store_shared(is_dv ? tiles.v_tile() : tiles.k_tile(), sums, factor);
        });
        __syncthreads();
        // The fence of a release delays its warp, but no other warp waits for it here.
        if (releases) sync().release_last(plan);
        if (stores_dv) store_global(tiles.v_tile(), launch.params.dv, p.head_dim_v, launch.vector_dv);
        if (stores_dk) store_global(tiles.k_tile(), launch.params.dk, p.head_dim, launch.vector_dk);
    }

    /// The first of two warps with the same keys has dV in the end, the other one dK.
    __device__ static __forceinline__ bool keeps_dv() { return Warp::query_part() == 0; }
    /// Adds up the sums of the two warps with the same keys, through the shared memory of Q and dO. On return `dv`
    /// holds the gradient that the warp keeps, dV or dK.
    __device__ __forceinline__ void reduce_sums(Sums& dv, const Sums& dk) const {
        auto* const own = reinterpret_cast<float4*>(tiles.q_tile(0)) + tiles.thread();
        const bool keeps = keeps_dv();
#pragma unroll
        for (int i = 0; i < kSumTiles * kColumns; ++i) {
            float(&v)[4] = dv[i / kColumns][i % kColumns];
            const float(&k)[4] = dk[i / kColumns][i % kColumns];
            float sent[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                sent[e] = keeps ? k[e] : v[e];
                if (!keeps) v[e] = k[e];
            }
            own[i * kConfig.threads()] = make_float4(sent[0], sent[1], sent[2], sent[3]);
        }
        __syncthreads();
        const float4* const other = keeps ? own + kConfig.threads() / 2 : own - kConfig.threads() / 2;
#pragma unroll
        for (int i = 0; i < kSumTiles * kColumns; ++i) {
            const float4 x = other[i * kConfig.threads()];
            float(&sum)[4] = dv[i / kColumns][i % kColumns];
            sum[0] += x.x;
            sum[1] += x.y;
            sum[2] += x.z;
            sum[3] += x.w;
        }
    }

    /// Writes the warp's sums to the workspace, as those of the CTA's split; from the second part of the queries on,
    /// adds them there.
    __device__ __forceinline__ void store_partial_sums(bool dv, const Sums& sums, float factor) const {
        const int row = Warp::first_sum_row() + lane_number() / 4;
        float* const to = tiles.partial_row(dv, row) + 8 * Warp::first_sum_chunk() + lane_number() % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2 * kSumTiles; ++i) {
            if (tiles.work.first_key + row + 8 * i >= tiles.work.sequence.len_kv) continue;
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
                store_partial(to + 8 * i * kHeadDim + 8 * n, sums[i / 2][n], i % 2, factor, tiles.work.part > 0);
            }
        }
    }

    /// Rounds the warp's sums into a tile of the block's keys in shared memory. fmaf(x, f, 0) turns -0 into +0.
    __device__ __forceinline__ void store_shared(char* tile, const Sums& sums, float factor) const {
        const int at = chunk_offset<kHeadDim>(Warp::first_sum_row() + lane_number() / 4, Warp::first_sum_chunk()) +
                       lane_number() % 4 * 4;
#pragma unroll
        for (int i = 0; i < 2 * kSumTiles; ++i) {
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
                const float low = fmaf(sums[i / 2][n][i % 2 * 2], factor, 0.0F);
                const float high = fmaf(sums[i / 2][n][i % 2 * 2 + 1], factor, 0.0F);
                char* to = tile + (at ^ 16 * n) + 8 * i * kHeadDim * 2;
                *reinterpret_cast<std::uint32_t*>(to) = ptx::pack<T>(low, high);
            }
        }
    }
    __device__ __forceinline__ void store_global(const char* tile, const Rows& rows, int dim, bool vector) const {
        const CtaWork& work = tiles.work;
        const std::int64_t offset = head_offset(rows, work.batch, work.sequence.first_kv, work.kv_head, sizeof(T));
        const Target target = target_of<T>(rows, offset, work.sequence.len_kv, dim, vector);
        constexpr int kRows = kConfig.block_kv() / (kConfig.threads() / 32);
        store<kHeadDim, kRows>(tile, target, work.first_key, warp_number() * kRows, lane_number());
    }
};

}  // namespace tessera::cuda::gradient
