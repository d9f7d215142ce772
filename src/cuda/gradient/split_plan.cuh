// SPDX-License-Identifier: Apache-2.0
//
// The steps to come of a block of keys, worked out by one warp for all, a step a lane: where Q, dO and the sum of dQ
// lie, and what has to be told apart. The others have no registers for it, and do not divide.
#pragma once

#include "cuda/gradient/key_scores.cuh"
#include "cuda/tile/ahead.cuh"

namespace tessera::cuda::gradient {

template <class T, Config kConfig>
struct SplitPlan : KeyScores<T, kConfig> {
    using Base = KeyScores<T, kConfig>;
    using Base::inputs;
    using Base::kHeadDim;
    using Base::turns;
    using Base::work;
    static constexpr std::int64_t kSize = sizeof(T);
    static constexpr int kStepQueries = kConfig.query_tiles * kBlockQ;
    /// Threads that bring Q and dO.
    static constexpr int kCopiers = kHeadDim > 128 ? kConfig.threads() : kConfig.threads() / 2;

    /// No registers are left for what could be worked out once.
    static constexpr bool kTight = kHeadDim > 128;

    struct Planned {
        int head;
        int tile;
        int sweep;
        bool masked;
        bool edge;            // masked by the band alone: all queries and keys are there
        bool first;           // to add to dQ
        bool whole;           // Q and dO are read 16 bytes at a time, and all rows are there
        const char* q;        // rows of the tile
        const char* d_o;      // likewise
        const RowTile* rows;  // of the tile
        float* dq;            // the tile's sum
        int* done;            // the word that tells who has added to it
        int before;           // the block that adds before this one; -1: none is waited for
        float ds_unit;        // that dS of the head is held times, where P is times kWeightUnit

        __device__ __forceinline__ Step step() const { return {head, tile, sweep}; }
    };
    static constexpr int kPlannedAtOnce = 32;
    static constexpr int kPlanned = 2 * kPlannedAtOnce;
    static constexpr int kPlanner = 2;  // a warp that neither publishes nor waits
    struct Plan {
        Planned steps[kPlanned];
        int count;            // of steps
        bool cut;             // some of them are masked
        bool nonfinite_keys;  // Inf or NaN in K, looked for where steps are masked

        __device__ __forceinline__ Planned& at(int index) { return steps[index % kPlanned]; }
    };
    static constexpr bool kHeld = std::is_same_v<T, __half>;

    /// By the planning warp.
    __device__ __forceinline__ void begin(Plan& plan) const {
        const int first = work.own.begin * kStepQueries;
        const int end = work.own.end * kStepQueries;
        plan.count = work.own.count() * work.heads;
        plan.cut = end > work.sequence.len_q ||
                   !work.visible.full(first, end, work.first_key, work.first_key + kConfig.block_kv());
        plan.nonfinite_keys = false;
        __syncwarp();
        plan_step(plan, static_cast<int>(threadIdx.x) % 32);
    }
    /// Plans the steps after those that are planned, when only `kLeft` of these are left; `index`: the step at work.
    __device__ __forceinline__ void plan_next(Plan& plan, int index) const {
        constexpr int kLeft = 8;
        // At head_dim 256 no registers are left for what could be worked out of it once (nothing is spilled at 128).
        const int number = static_cast<int>(threadIdx.x);
        const int thread = kTight ? ptx::opaque(number) : number;
        if (index % kPlannedAtOnce != kPlannedAtOnce - kLeft || thread / 32 != kPlanner) return;
        plan_step(plan, index + kLeft + thread % 32);
    }
    __device__ __forceinline__ void plan_step(Plan& plan, int index) const {
        if (index >= plan.count) return;
        const Launch& launch = inputs.launch;
        const ForwardParams& p = launch.params.forward;
        const Rows& d_o = launch.params.d_o;
        const Sequence& m = work.sequence;
        const Step step(launch, work, index);
        const int first = step.tile * kStepQueries;
        const bool whole = first + kStepQueries <= m.len_q;
        Planned& to = plan.at(index);
        to.head = step.head;
        to.tile = step.tile;
        to.sweep = step.sweep;
        to.masked = !whole || !work.visible.full(first, first + kStepQueries, work.first_key,
                                                 work.first_key + kConfig.block_kv());
        to.edge = to.masked && whole && work.first_key + kConfig.block_kv() <= m.len_kv;
        to.before = turns().before(step);
        to.first = to.before < 0;
        if (!work.waits) to.before = -1;
        if constexpr (kHeld) to.ds_unit = this->unit_of(step.head) * (1 / kWeightUnit<T>);
        to.whole = whole && launch.vector_q && launch.vector_do;
        to.q = p.q.data + head_offset(p.q, work.batch, m.first_q, step.head, sizeof(T)) + first * p.q.row * kSize;
        to.d_o = d_o.data + head_offset(d_o, work.batch, m.first_q, step.head, sizeof(T)) + first * d_o.row * kSize;
        to.rows = launch.rows + turns().tile(step);
        to.dq = launch.dq + turns().place(step) * DqTile<kHeadDim>::kFloats;
        to.done = launch.done + turns().place(step);
    }

    /// Brings Q, row data and dO of a step. At head_dim 64 they share what is worked out of addresses; the others have
    /// no registers for that.
    __device__ __forceinline__ void load_both(Plan& plan, int index) const {
        if constexpr (kHeadDim == 64) {
            load<true, true>(plan, index);
        } else {
            load<true, false>(plan, index);
            load<false, true>(plan, index);
        }
    }
    /// Brings Q and row data of a step, or dO, or both, if there is such a step.
    template <bool kQ, bool kDo>
    __device__ __forceinline__ void load(Plan& plan, int index) const {
        if constexpr (kTight) index = ptx::opaque(index);
        if (index >= plan.count) return;
        const Planned& planned = plan.at(index);
        const int stage = index % kConfig.stages;
        if (!planned.whole) {
#pragma unroll 1
            for (int t = 0; t < kConfig.query_tiles; ++t) {
                const int tile = planned.tile * kConfig.query_tiles + t;
                if constexpr (kQ) inputs.load_q(planned.head, tile, stage, t);
                if constexpr (kDo) inputs.load_do(planned.head, tile, stage, t);
            }
            return;
        }
        copy_rows<kQ, kDo>(stage, planned.q, planned.d_o, planned.rows);
    }
    /// Brings all of the first step before it is planned, as only a step can be whose rows are all there and lie
    /// together. Returns whether it did.
    __device__ __forceinline__ bool load_first() const {
        const Launch& launch = inputs.launch;
        const Rows& q = launch.params.forward.q;
        const Rows& d_o = launch.params.d_o;
        const Sequence& m = work.sequence;
        const Step step(work.first_head, work.own.tile(0), work.own.sweep(0));
        const int first = step.tile * kStepQueries;
        if (work.own.count() * work.heads == 0 || first + kStepQueries > m.len_q) return false;
        if (!launch.vector_q || !launch.vector_do) return false;
        const std::int64_t row = m.first_q + first;
        copy_rows<true, true>(0, q.data + head_offset(q, work.batch, row, step.head, sizeof(T)),
                              d_o.data + head_offset(d_o, work.batch, row, step.head, sizeof(T)),
                              launch.rows + turns().tile(step));
        return true;
    }
    template <bool kQ, bool kDo>
    __device__ __forceinline__ void copy_rows(int stage, const char* q, const char* d_o, const RowTile* rows) const {
        constexpr int kChunks = kHeadDim / kChunk;
        const ForwardParams& p = inputs.launch.params.forward;
        int thread = ptx::opaque(static_cast<int>(threadIdx.x)) - (kConfig.threads() - kCopiers);
        if (thread < 0) return;
        thread &= kCopiers - 1;
        const int chunk = thread % kChunks;
        const int row = thread / kChunks;
        const std::uint32_t to = ptx::shared_address(inputs.q_tile(stage)) + chunk_offset<kHeadDim>(row, chunk);
        if constexpr (kQ) {
            copy(to, q, row, chunk, p.q.row * kSize, p.head_dim);
            constexpr int kCopies = kConfig.query_tiles * static_cast<int>(sizeof(RowTile)) / 16;
            if (thread < kCopies) {
                ptx::cp_async_16(ptx::shared_address(&inputs.rows(stage)) + thread * 16,
                                 reinterpret_cast<const char*>(rows) + thread * 16, true);
            }
        }
        if constexpr (kDo) {
            copy(to + kConfig.query_tiles * kConfig.q_bytes(), d_o, row, chunk, inputs.launch.params.d_o.row * kSize,
                 p.head_dim_v);
        }
    }
    /// The thread's chunks of all rows of a step, from `row` on.
    __device__ static __forceinline__ void copy(std::uint32_t to, const char* rows, int row, int chunk,
                                                std::int64_t row_bytes, int dim) {
        constexpr int kRowsAtOnce = kCopiers / (kHeadDim / kChunk);
        static_assert(kRowsAtOnce % 8 == 0, "swizzled alike");
        const char* from = rows + row * row_bytes + chunk * 16;
        const bool inside = chunk * kChunk < dim;
#pragma unroll
        for (int i = 0; i < kStepQueries; i += kRowsAtOnce) {
            ptx::cp_async_16(to + i * kHeadDim * 2, from, inside);
            from += kRowsAtOnce * row_bytes;
        }
    }

    __device__ __forceinline__ bool adds_dq() const { return inputs.launch.params.dq.data != nullptr; }
};

}  // namespace tessera::cuda::gradient
