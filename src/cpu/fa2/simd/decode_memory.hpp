// SPDX-License-Identifier: Apache-2.0
//
// Sizes and memory of the forward for few queries per head (decode.cc).
#pragma once

#include <algorithm>

#include "core/arena.hpp"
#include "cpu/fa2/simd/task.hpp"
#include "cpu/simd/few_queries.hpp"
#include "cpu/steps/simd/step.hpp"

namespace tessera::cpu::fa2::simd_path {

/// The sizes of a call's rows.
struct RowsLayout {
    std::int64_t rows;      ///< at most, of a task
    std::int64_t lanes;     ///< of the state of these rows
    std::int64_t s_stride;  ///< floats of one row of scores
    std::int64_t o_stride;  ///< of O

    RowsLayout(const Geometry& g, const WorkSplit& work_split)
        : rows(std::min(work_split.panels_per_task, work_split.panels_per_kv_head) * g.block_q),
          lanes(simd::padded(rows)),
          s_stride(simd::padded(g.block_kv)),
          o_stride(g.v_stride) {}

    /// Floats of the sums of a task's rows: m, l [lanes], O [rows, o_stride].
    std::int64_t sums_floats() const { return 2 * lanes + rows * o_stride; }
};

/// A view of such sums.
inline simd::PanelSums sums_in(float* memory, const RowsLayout& layout, const Geometry& g) {
    simd::PanelSums sums(nullptr, g);
    if (memory == nullptr) return sums;
    sums.state = {memory, memory + layout.lanes};
    sums.o = memory + 2 * layout.lanes;
    return sums;
}

/// Memory of one worker.
struct DecodeScratch {
    simd::TileScratch tiles;  // with queries in the lanes, for score rules and overflows
    float* q;                 // [rows, k_stride]
    float* s;                 // [rows, s_stride]
    float* factors;           // [rows, s_stride], of dropout
    float* rescale;           // [lanes]
    float* total;             // sums
    float* chunk;             // sums
    float* q_t;               // [head_dim, g.lanes]
    float* spare_o;           // [head_dim_v, g.lanes]
    simd::PanelSums panel;
    const void** k_rows;  // [block_kv + kRowsAhead]: addresses of rows in pages
    const void** v_rows;

    DecodeScratch(Arena& arena, const Geometry& g, const RowsLayout& layout)
        : tiles(arena, g),
          q(arena.take<float>(layout.rows, g.k_stride)),
          s(arena.take<float>(layout.rows, layout.s_stride)),
          factors(arena.take<float>(layout.rows, layout.s_stride)),
          rescale(arena.take<float>(layout.lanes)),
          total(arena.take<float>(layout.sums_floats())),
          chunk(arena.take<float>(layout.sums_floats())),
          q_t(arena.take<float>(g.head_dim, g.lanes)),
          spare_o(arena.take<float>(g.head_dim_v, g.lanes)),
          panel(arena, g),
          k_rows(arena.take<const void*>(g.block_kv + simd::kRowsAhead)),
          v_rows(arena.take<const void*>(g.block_kv + simd::kRowsAhead)) {}
};

/// A call with its sizes and memory.
struct DecodeRun {
    const ForwardCall& call;
    Geometry g;
    WorkSplit work_split;
    RowsLayout layout;
    std::int64_t* ends;  // of tasks
    WorkerMemory workers;
    LongSequences long_sequences;
    float* partials = nullptr;  // [kv_heads, panels_per_kv_head, chunks, sums] if keys are split, or
                                // [long_sequences.most, chunks, sums]

    DecodeRun(const ForwardCall& c, Arena& arena)
        : call(c),
          g(c.plan),
          work_split(work_split_of(c.plan, g)),
          layout(g, work_split),
          ends(take_task_ends(arena, c.plan.problem)),
          workers(arena, work_split.threads, [&](Arena& one) { DecodeScratch(one, g, layout); }),
          long_sequences(arena, c.plan.problem, work_split) {
        const std::int64_t split = work_split.split ? work_split.panels() : long_sequences.most;
        partials = arena.take<float>(split, work_split.chunks, layout.sums_floats());
    }
    DecodeScratch scratch(int worker) const {
        Arena memory = workers.arena(worker);
        return {memory, g, layout};
    }
    simd::PanelSums partial(std::int64_t kv_head, std::int64_t panel, std::int64_t chunk) const {
        return sums_in(partials + work_split.partial(kv_head, panel, chunk) * layout.sums_floats(), layout, g);
    }
    /// The partial sums of task `number`, which is one of a long sequence.
    simd::PanelSums partial(std::int64_t number, std::int64_t chunk) const {
        return sums_in(partials + (number * work_split.chunks + chunk) * layout.sums_floats(), layout, g);
    }
};

}  // namespace tessera::cpu::fa2::simd_path
