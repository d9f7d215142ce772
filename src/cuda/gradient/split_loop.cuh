// SPDX-License-Identifier: Apache-2.0
//
// The step of the backward where every warp makes P and dS of its own keys and queries, in registers, and everything
// that is no product stands between products: what its two ways (split_own.cuh, split_shared.cuh) have in common, from
// the first copies of a block of keys to dV and dK.
#pragma once

#include "cuda/gradient/key_loop.cuh"
#include "cuda/gradient/split_scores.cuh"

namespace tessera::cuda::gradient {

template <class T, Config kConfig>
struct SplitLoop : SplitScores<T, kConfig> {
    using Base = SplitScores<T, kConfig>;
    using Base::adds_dq;
    using Base::clear;
    using Base::inputs;
    using Base::kColumns;
    using Base::kHeadDim;
    using Base::kPlanner;
    using Base::kStepQueries;
    using Base::kSumTiles;
    using Base::load_both;
    using Base::poisoned;
    using Base::work;
    using typename Base::Plan;
    using typename Base::Planned;
    using typename Base::Sums;
    static constexpr int kReadAhead = kConfig.stages - 1;  // of Q: dO comes two steps ahead

    /// Everything that the block of keys has to do. `to_change`: `work`; `step`(plan, index, dv, dk, barriers).
    template <class OfStep>
    __device__ __forceinline__ void run_block(KeyWork& to_change, const OfStep& step) const {
        inputs.load_k();
        inputs.load_v();
        __shared__ Plan plan;
        __shared__ SplitBarriers barriers;
        if (threadIdx.x == 0) barriers.init(kConfig.threads() / 32);
        Sums dv;
        Sums dk;
        clear(dv);
        clear(dk);
        begin(plan);
#pragma unroll 1
        for (int i = 0; i < plan.count; ++i) {
            if constexpr (Base::kHeld) hold(dk, plan, i);
            step(plan, i, dv, dk, barriers);
        }
        if (plan.count > 0) __syncthreads();
        const bool publishes = plan.count > 0 && adds_dq();
        // Hidden Inf and NaN of Q and dO are rare: only when some have come through is the work done again without
        // them.
        if (plan.cut && plan.count > 0 && __syncthreads_or(static_cast<int>(poisoned(dv) || poisoned(dk)))) {
            if (publishes) this->publish_last(plan);
            __syncthreads();
            if (threadIdx.x == 0) to_change.guard(kConfig.block_kv());
            __syncthreads();
            KeyLoop<T, kConfig>{{inputs, work}}.run_block(to_change);
            return;
        }
        put(plan, dv, dk, publishes);
    }

    /// dQ of the step's tiles, one after the other; K may hold Inf and NaN. `buffer`: where dS lies.
    __device__ __forceinline__ void add_dq_tiles(const Planned& planned, int buffer) const {
#pragma unroll 1
        for (int t = 0; t < kConfig.query_tiles; ++t) {
            const int first_query = planned.tile * kStepQueries + t * kBlockQ;
            if (first_query >= work.sequence.len_q) break;
            KeyDq<T, kConfig>{{inputs, work}, t, buffer}.add(planned.step(), first_query, planned.masked);
        }
    }

 private:
    /// Up to the first step: its operands are there.
    __device__ __forceinline__ void begin(Plan& plan) const {
        // With K and V.
        const bool first_is_loaded = this->load_first();
        if (threadIdx.x / 32 == kPlanner) Base::begin(plan);
        __syncthreads();
        if (!first_is_loaded) load_both(plan, 0);
        ptx::cp_async_commit();
        this->template load<(kReadAhead > 1), true>(plan, 1);
        ptx::cp_async_commit();
        ptx::cp_async_wait<1>();
        __syncthreads();
        if (!plan.cut) return;
        const bool nonfinite = holds_nonfinite<T, kConfig.block_kv(), kHeadDim, kConfig.threads()>(inputs.k_tile());
        const bool any = __syncthreads_or(static_cast<int>(nonfinite)) != 0;
        if (threadIdx.x == 0) plan.nonfinite_keys = any;
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
    /// dV and dK on their way out, after a barrier if there were steps.
    __device__ __forceinline__ void put(Plan& plan, Sums& dv, Sums& dk, bool publishes) const {
        const Launch& launch = inputs.launch;
        const ForwardParams& p = launch.params.forward;
        const bool stores_dv = launch.params.dv.data != nullptr;
        const bool stores_dk = launch.params.dk.data != nullptr;
        const float factor_dv = p.keep_scale * (1 / kWeightUnit<T>);
        float factor_dk = p.scale;
        if (Base::kHeld && plan.count > 0) factor_dk /= plan.at(plan.count - 1).ds_unit * kWeightUnit<T>;
        ptx::cp_async_wait<0>();
        if (plan.count == 0) __syncthreads();
        if constexpr (kConfig.own_sums) this->exchange_sums(dv, dk);
        const auto of_each = [&](const auto& of_sums) {
            if constexpr (kConfig.own_sums) {
                const bool is_dv = this->keeps_dv();
                if (is_dv ? stores_dv : stores_dk) of_sums(is_dv, dv, is_dv ? factor_dv : factor_dk);
            } else {
                if (stores_dv) of_sums(true, dv, factor_dv);
                if (stores_dk) of_sums(false, dk, factor_dk);
            }
        };
        if (work.shares > 1) {
            if (publishes) this->publish_last(plan);
            of_each([&](bool is_dv, const Sums& sums, float factor) { this->put_share(is_dv, sums, factor); });
            return;
        }
        of_each([&](bool is_dv, const Sums& sums, float factor) {
            this->stage_sums(is_dv ? inputs.v_tile() : inputs.k_tile(), sums, factor);
        });
        __syncthreads();
        // Its fence holds a warp up, and nobody waits for that one here.
        if (publishes) this->publish_last(plan);
        if (stores_dv) this->put_sums(inputs.v_tile(), launch.params.dv, p.head_dim_v, launch.vector_dv);
        if (stores_dk) this->put_sums(inputs.k_tile(), launch.params.dk, p.head_dim, launch.vector_dk);
    }
};

}  // namespace tessera::cuda::gradient
