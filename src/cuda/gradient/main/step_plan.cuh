// SPDX-License-Identifier: Apache-2.0
//
// The plan of the steps of a CTA: addresses of Q, dO and the dQ accumulator, and the conditions that hold for a step.
// One warp works them out for all, a step a lane, 32 steps at once; the other warps have no registers for it.
#pragma once

#include "cuda/gradient/main/cta_tiles.cuh"

namespace tessera::cuda::gradient {

struct PlannedStep {
    int head;
    int tile;
    int accumulator;
    bool masked;          // some pairs are not visible
    bool edge;            // masked, but by the band alone: all queries and keys exist
    bool first;           // no key block adds to the dQ accumulator before this one
    bool whole;           // all rows exist, and Q and dO are read 16 bytes at a time
    const char* q;        // row 0 of the query tile
    const char* d_o;      // row 0 of the query tile
    const RowTile* rows;  // row data of the query tile
    float* dq;            // the accumulator
    int* semaphore;       // the dQ semaphore of the accumulator
    int predecessor;      // the key block that is waited for; -1: none
    float ds_scale;       // fp16: the scale of dS of the head, divided by kPScale

    __device__ __forceinline__ Step step() const { return {head, tile, accumulator}; }
};

/// The plan in shared memory: a ring of steps.
struct StepPlan {
    static constexpr int kAtOnce = 32;  // steps that are planned together
    PlannedStep steps[2 * kAtOnce];
    int count;            // the number of all steps
    bool any_masked;      // some step is masked
    bool nonfinite_keys;  // K holds Inf or NaN; determined only if some step is masked

    __device__ __forceinline__ PlannedStep& at(int index) { return steps[index % (2 * kAtOnce)]; }
};

/// Plans steps, and starts the copies of their operands.
template <class T, Config kConfig>
struct StepPlanner {
    static constexpr int kHeadDim = kConfig.head_dim;
    static constexpr std::int64_t kSize = sizeof(T);
    static constexpr int kStepQueries = kConfig.query_tiles * kBlockQ;
    static constexpr bool kFp16 = std::is_same_v<T, __half>;
    /// Threads that copy Q and dO.
    static constexpr int kCopiers = kHeadDim > 128 ? kConfig.threads() : kConfig.threads() / 2;
    /// At head_dim 256 no registers are left for values that could be computed once.
    static constexpr bool kFewRegisters = kHeadDim > 128;
    /// The warp that plans. It neither acquires nor releases in the steps in which it plans (StepSync).
    static constexpr int kWarp = 2;

    const CtaTiles<T, kConfig> tiles;

    /// Plans the first steps. The planning warp calls it.
    __device__ __forceinline__ void begin(StepPlan& plan) const {
        const CtaWork& work = tiles.work;
        const int first = work.order.own.begin * kStepQueries;
        const int end = work.order.own.end * kStepQueries;
        plan.count = work.steps();
        plan.any_masked = end > work.sequence.len_q ||
                          !work.band32.full(first, end, work.first_key, work.first_key + kConfig.block_kv());
        plan.nonfinite_keys = false;
        __syncwarp();
        plan_step(plan, static_cast<int>(threadIdx.x) % 32);
    }
    /// Plans the next steps when only kLeft planned ones are left after step `index`.
    __device__ __forceinline__ void plan_next(StepPlan& plan, int index) const {
        constexpr int kLeft = 8;
        const int number = static_cast<int>(threadIdx.x);
        const int thread = kFewRegisters ? ptx::opaque(number) : number;
        if (index % StepPlan::kAtOnce != StepPlan::kAtOnce - kLeft || thread / 32 != kWarp) return;
        plan_step(plan, index + kLeft + thread % 32);
    }

    /// Copies Q, row data and dO of a step, if there is such a step. At head_dim 64 they share computed addresses; the
    /// other shapes have no registers for that.
    __device__ __forceinline__ void load_both(StepPlan& plan, int index) const {
        if constexpr (kHeadDim == 64) {
            load<true, true>(plan, index);
        } else {
            load<true, false>(plan, index);
            load<false, true>(plan, index);
        }
    }
    /// Copies Q and row data (kQ), or dO (kDo), or both.
    template <bool kQ, bool kDo>
    __device__ __forceinline__ void load(StepPlan& plan, int index) const {
        if constexpr (kFewRegisters) index = ptx::opaque(index);
        if (index >= plan.count) return;
        const PlannedStep& planned = plan.at(index);
        const int stage = index % kConfig.stages;
        if (!planned.whole) {
#pragma unroll 1
            for (int t = 0; t < kConfig.query_tiles; ++t) {
                const int tile = planned.tile * kConfig.query_tiles + t;
                if constexpr (kQ) tiles.load_q(planned.head, tile, stage, t);
                if constexpr (kDo) tiles.load_do(planned.head, tile, stage, t);
            }
            return;
        }
        copy_rows<kQ, kDo>(stage, planned.q, planned.d_o, planned.rows);
    }
    /// Copies the operands of the first step before it is planned, if it is a whole one. Returns whether it did.
    __device__ __forceinline__ bool load_first() const {
        const Launch& launch = tiles.launch;
        const CtaWork& work = tiles.work;
        const Rows& q = launch.params.forward.q;
        const Rows& d_o = launch.params.d_o;
        const Sequence& m = work.sequence;
        const Step step(work.first_head, work.order.own.query_block_of(0), work.order.own.accumulator_of(0));
        const int first = step.tile * kStepQueries;
        if (work.steps() == 0 || first + kStepQueries > m.len_q) return false;
        if (!launch.vector_q || !launch.vector_do) return false;
        const std::int64_t row = m.first_q + first;
        copy_rows<true, true>(0, q.data + head_offset(q, work.batch, row, step.head, sizeof(T)),
                              d_o.data + head_offset(d_o, work.batch, row, step.head, sizeof(T)),
                              launch.rows + tiles.dq_semaphore().tile(step));
        return true;
    }

 private:
    __device__ __forceinline__ void plan_step(StepPlan& plan, int index) const {
        if (index >= plan.count) return;
        const Launch& launch = tiles.launch;
        const CtaWork& work = tiles.work;
        const ForwardParams& p = launch.params.forward;
        const Rows& d_o = launch.params.d_o;
        const Sequence& m = work.sequence;
        const DqSemaphore semaphore = tiles.dq_semaphore();
        const Step step(launch, work, index);
        const int first = step.tile * kStepQueries;
        const bool exist = first + kStepQueries <= m.len_q;
        PlannedStep& to = plan.at(index);
        to.head = step.head;
        to.tile = step.tile;
        to.accumulator = step.accumulator;
        to.masked = !exist ||
                    !work.band32.full(first, first + kStepQueries, work.first_key, work.first_key + kConfig.block_kv());
        to.edge = to.masked && exist && work.first_key + kConfig.block_kv() <= m.len_kv;
        to.predecessor = semaphore.predecessor(step);
        to.first = to.predecessor < 0;
        if (!work.waits) to.predecessor = -1;
        if constexpr (kFp16) to.ds_scale = tiles.ds_scale(step.head) * (1 / kPScale<T>);
        to.whole = exist && launch.vector_q && launch.vector_do;
        to.q = p.q.data + head_offset(p.q, work.batch, m.first_q, step.head, sizeof(T)) + first * p.q.row * kSize;
        to.d_o = d_o.data + head_offset(d_o, work.batch, m.first_q, step.head, sizeof(T)) + first * d_o.row * kSize;
        to.rows = launch.rows + semaphore.tile(step);
        to.dq = launch.dq + semaphore.index(step) * DqTile<kHeadDim>::kFloats;
        to.semaphore = launch.dq_semaphores + semaphore.index(step);
    }

    template <bool kQ, bool kDo>
    __device__ __forceinline__ void copy_rows(int stage, const char* q, const char* d_o, const RowTile* rows) const {
        constexpr int kChunks = kHeadDim / kChunk;
        const ForwardParams& p = tiles.launch.params.forward;
        int thread = ptx::opaque(static_cast<int>(threadIdx.x)) - (kConfig.threads() - kCopiers);
        if (thread < 0) return;
        thread &= kCopiers - 1;
        const int chunk = thread % kChunks;
        const int row = thread / kChunks;
        const std::uint32_t to = ptx::shared_address(tiles.q_tile(stage)) + chunk_offset<kHeadDim>(row, chunk);
        if constexpr (kQ) {
            copy(to, q, row, chunk, p.q.row * kSize, p.head_dim);
            constexpr int kCopies = kConfig.query_tiles * static_cast<int>(sizeof(RowTile)) / 16;
            if (thread < kCopies) {
                ptx::cp_async_16(ptx::shared_address(&tiles.rows(stage)) + thread * 16,
                                 reinterpret_cast<const char*>(rows) + thread * 16, true);
            }
        }
        if constexpr (kDo) {
            copy(to + kConfig.query_tiles * kConfig.q_bytes(), d_o, row, chunk, tiles.launch.params.d_o.row * kSize,
                 p.head_dim_v);
        }
    }
    /// Copies the thread's chunk of every kRowsAtOnce-th row of a step, from `row` on.
    __device__ static __forceinline__ void copy(std::uint32_t to, const char* rows, int row, int chunk,
                                                std::int64_t row_bytes, int dim) {
        constexpr int kRowsAtOnce = kCopiers / (kHeadDim / kChunk);
        static_assert(kRowsAtOnce % 8 == 0, "all rows of a thread have the same swizzle");
        const char* from = rows + row * row_bytes + chunk * 16;
        const bool inside = chunk * kChunk < dim;
#pragma unroll
        for (int i = 0; i < kStepQueries; i += kRowsAtOnce) {
            ptx::cp_async_16(to + i * kHeadDim * 2, from, inside);
            from += kRowsAtOnce * row_bytes;
        }
    }
};

}  // namespace tessera::cuda::gradient
