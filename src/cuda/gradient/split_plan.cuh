// SPDX-License-Identifier: Apache-2.0
//
// The steps to come of a block of keys, worked out by one thread for all: where Q, dO and the sum of dQ lie, and what
// has to be told apart. The others have no registers for it, and do not divide.
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

    struct Planned {
        int head;
        int tile;
        int sweep;
        bool masked;
        bool first;           // to add to dQ
        bool whole;           // Q and dO are read 16 bytes at a time, and all rows are there
        const char* q;        // rows of the tile
        const char* d_o;      // likewise
        const RowTile* rows;  // of the tile
        float* dq;            // the tile's sum

        __device__ __forceinline__ Step step() const { return {head, tile, sweep}; }
    };
    static constexpr int kPlanned = 4;
    static constexpr int kPlannedAhead = 3;
    struct Plan {
        Planned steps[kPlanned];
        int count;        // of steps
        bool any_masked;  // of those planned

        __device__ __forceinline__ Planned& at(int index) { return steps[index % kPlanned]; }
    };
    __device__ __forceinline__ void plan(Plan& plan, int index) const {
        if (threadIdx.x != 64 || index >= plan.count) return;
        const Launch& launch = inputs.launch;
        const ForwardParams& p = launch.params.forward;
        const Rows& d_o = launch.params.d_o;
        const Member& m = work.member;
        const Step step(launch, work, index);
        const int first = step.tile * kBlockQ;
        const bool whole = first + kBlockQ <= m.len_q;
        Planned& to = plan.at(index);
        to.head = step.head;
        to.tile = step.tile;
        to.sweep = step.sweep;
        to.masked =
            !whole || !work.visible.full(first, first + kBlockQ, work.first_key, work.first_key + kConfig.block_kv());
        plan.any_masked |= to.masked;
        to.first = turns().first_to_add(step);
        to.whole = whole && launch.vector_q && launch.vector_do;
        to.q = p.q.data + head_offset(p.q, work.batch, m.first_q, step.head, sizeof(T)) + first * p.q.row * kSize;
        to.d_o = d_o.data + head_offset(d_o, work.batch, m.first_q, step.head, sizeof(T)) + first * d_o.row * kSize;
        to.rows = launch.rows + turns().tile(step);
        to.dq = launch.dq + turns().place(step) * DqTile<kHeadDim>::kFloats;
    }

    /// Brings a step's Q and dO, if there is one.
    __device__ __forceinline__ void load_queries(Plan& plan, int index) const {
        if (index >= plan.count) {
            ptx::cp_async_commit();
            return;
        }
        const Planned& planned = plan.at(index);
        const int stage = index % kConfig.stages;
        if (!planned.whole) {
            inputs.load_queries(planned.step(), stage);
            return;
        }
        const ForwardParams& p = inputs.launch.params.forward;
        load_whole(inputs.q_tile(stage), planned.q, p.q.row * kSize, p.head_dim);
        load_whole(inputs.do_tile(stage), planned.d_o, inputs.launch.params.d_o.row * kSize, p.head_dim_v);
        const auto thread = static_cast<int>(threadIdx.x);
        if (thread < static_cast<int>(sizeof(RowTile)) / 16) {
            ptx::cp_async_16(ptx::shared_address(&inputs.rows(stage)) + thread * 16,
                             reinterpret_cast<const char*>(planned.rows) + thread * 16, true);
        }
        ptx::cp_async_commit();
    }
    __device__ static __forceinline__ void load_whole(char* tile, const char* rows, std::int64_t row_bytes, int dim) {
        constexpr int kChunks = kHeadDim / kChunk;
        constexpr int kRowsAtOnce = kConfig.threads() / kChunks;
        const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
        const int chunk = thread % kChunks;
        const int row = thread / kChunks;
        const char* from = rows + row * row_bytes + chunk * 16;
        const std::uint32_t to = ptx::shared_address(tile) + chunk_offset<kHeadDim>(row, chunk);
        const bool inside = chunk * kChunk < dim;
        static_assert(kRowsAtOnce % 8 == 0, "swizzled alike");
#pragma unroll
        for (int i = 0; i < kBlockQ; i += kRowsAtOnce) {
            ptx::cp_async_16(to + i * kHeadDim * 2, from, inside);
            from += kRowsAtOnce * row_bytes;
        }
    }

    __device__ __forceinline__ bool adds_dq() const { return inputs.launch.params.dq.data != nullptr; }
};

}  // namespace tessera::cuda::gradient
