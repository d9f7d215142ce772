// SPDX-License-Identifier: Apache-2.0
//
// The tasks of a forward call on a matrix unit, and their memory.
#pragma once

#include <array>

#include "core/split.hpp"
#include "cpu/fa2/work_split.hpp"
#include "cpu/matrix/few_queries.hpp"
#include "cpu/simd/few_queries.hpp"
#include "cpu/steps/matrix/step.hpp"

namespace tessera::cpu::fa2::matrix_path {

using matrix_split::kMaxPanels, matrix_split::kTasksOfShortRows, matrix_split::kTasksPerThread;
inline constexpr std::int64_t kScoreRows = 128;  // keys whose scores are computed, masked and transformed
inline constexpr std::int64_t kSliceKeys = 64;   // keys of a slice in decode; 32 and 128 measure the same within noise
inline constexpr std::int64_t kExactBlock = 64;  // keys of a tile when an overflow is recomputed in fp32
inline constexpr double kCachePerThread = 1 << 20;  // bytes
inline constexpr double kMostPartials = 1 << 28;    // bytes, if K and V are not larger

/// The assignment of panels to tasks; a chunk is a block of keys. Each task packs the keys of its panels into its own
/// core's cache, since fetching another core's packed keys takes longer. Packing a key costs as much as one panel's
/// work on it, so a task has as many panels as possible.
struct ForwardWorkSplit : WorkSplit {
    bool from_memory;  ///< the keys of a thread exceed its caches

    ForwardWorkSplit(const Plan& plan, const matrix::Layout& g) : WorkSplit(plan, g, g.block_kv) {
        const double keys = bytes_of_keys(plan.problem);
        panels_per_task = kMaxPanels;
        split = chunks > 1 && too_few_tasks(kTasksPerThread) && bytes_of_partials(g) <= std::max(kMostPartials, keys);
        if (chunks <= 1) split_short_rows();
        while (chunks > 1 && panels_per_task > 1 && too_few_tasks(kTasksPerThread)) panels_per_task /= 2;
        panels_per_task = std::clamp<std::int64_t>(panels_per_kv_head, 1, panels_per_task);
        from_memory = keys > threads * kCachePerThread;
    }

    /// Is there memory for the partial results of two tasks for each thread?
    bool partials_of_tasks_fit(const Problem& p, const matrix::Layout& g) const;

 private:
    /// The number of tasks of `panels` panels each.
    std::int64_t tasks_of(std::int64_t panels) const {
        return kv_heads * ceil_div(panels_per_kv_head, panels) * (split ? chunks : 1);
    }
    bool too_few_tasks(std::int64_t per_worker) const {
        return threads > 1 && tasks_of(panels_per_task) < per_worker * threads;
    }
    void split_short_rows() {
        while (panels_per_task > 1 && too_few_tasks(kTasksOfShortRows)) panels_per_task /= 2;
        // Fewer, larger tasks, as long as they don't take longer.
        const auto time = [&](std::int64_t panels) { return ceil_div(tasks_of(panels), threads) * panels; };
        while (panels_per_task < kMaxPanels && time(2 * panels_per_task) <= time(panels_per_task)) panels_per_task *= 2;
    }
    double bytes_of_keys(const Problem& p) const {
        return static_cast<double>(kv_heads) * static_cast<double>(p.len_kv) *
               static_cast<double>((p.head_dim + p.head_dim_v) * size_of(p.dtype));
    }
    double bytes_of_partials(const matrix::Layout& g) const;
};

/// Does each kv head have a single panel that fits in one lane tile? Decoding does if the query heads of a group can be
/// stacked (stack_heads.hpp).
inline bool queries_as_rows(const ForwardWorkSplit& work_split, const matrix::Layout& g) {
    return g.lanes == matrix::kTileRows && work_split.panels_per_kv_head == 1;
}

/// Do the primitives with keys in the lanes (matrix/few_queries.hpp) run? They take scores that are only scaled.
inline bool few_queries(const Problem& p, const matrix::Layout& g) {
    return matrix::primitives_of_unit()->of_rows != nullptr && g.parts == 1 && g.block_q <= matrix::kMostRows &&
           p.effective_scale() > 0 && p.softcap == 0 && !p.alibi && !p.bias && p.dropout.probability == 0;
}

/// The rows of O^T as the GEMMs write it: 16 * dim_tiles_v. bf16 multiplies rounded weights, so it has another tile,
/// whose first row is their sum.
inline std::int64_t sum_row(const matrix::Layout& g) { return g.dim_tiles_v * matrix::kTileRows; }
inline std::int64_t value_rows(const matrix::Layout& g) { return sum_row(g) + (g.parts == 1 ? matrix::kTileRows : 0); }
/// Rows that a merge must combine.
inline std::int64_t merged_rows(const matrix::Layout& g) { return sum_row(g) + (g.parts == 1 ? 1 : 0); }

/// A panel's result: m, l, O^T [value_rows, lanes], or O [lanes, value_rows] if queries are rows.
inline std::int64_t sums_floats(const matrix::Layout& g) { return (2 + value_rows(g)) * g.lanes; }

inline double ForwardWorkSplit::bytes_of_partials(const matrix::Layout& g) const {
    return static_cast<double>(panels()) * static_cast<double>(chunks * sums_floats(g)) * sizeof(float);
}

inline bool ForwardWorkSplit::partials_of_tasks_fit(const Problem& p, const matrix::Layout& g) const {
    const double sums = 2.0 * threads * static_cast<double>(panels_per_task) * static_cast<double>(chunks);
    const double bytes = sums * static_cast<double>(sums_floats(g)) * sizeof(float);
    return bytes <= std::max(kMostPartials, bytes_of_keys(p));
}

/// The data of a step between its pipeline stages; two steps are in flight.
struct Stage {
    Bf16* p;               // pair tiles [block_kv / 32][lanes / 16]
    simd::RowState state;  // [lanes] each, of this step alone
    float* maximum;        // [lanes], of s before scaling
    float* rounded_l;      // [lanes], with dropout in bf16: sums of the rounded weights without it

    Stage(Arena& arena, const matrix::Layout& g)
        : p(arena.take<Bf16>(g.block_kv_rows(), g.lanes * g.parts)),
          state{arena.take<float>(g.lanes), arena.take<float>(g.lanes)},
          maximum(arena.take<float>(g.lanes)),
          rounded_l(arena.take<float>(g.lanes)) {}
};

/// Memory for storing a panel's result, and for recomputing an overflow.
struct EpilogueScratch {
    Geometry exact;
    simd::TileScratch exact_tiles;
    float* q_t;      // [head_dim, lanes]
    float* other_o;  // [head_dim_v, lanes]
    float* spare_o;  // [head_dim_v, lanes]
    simd::PanelSums again;

    EpilogueScratch(Arena& arena, const matrix::Layout& g)
        : exact(exact_geometry(g)),
          exact_tiles(arena, exact),
          q_t(arena.take<float>(g.head_dim, g.lanes)),
          other_o(arena.take<float>(g.head_dim_v, g.lanes)),
          spare_o(arena.take<float>(g.head_dim_v, g.lanes)),
          again(arena, exact) {}

    static Geometry exact_geometry(const Geometry& g) {
        Geometry exact = g;
        exact.block_kv = std::min(g.block_kv, kExactBlock);
        return exact;
    }
};

/// Memory of one worker.
struct PanelsScratch {
    std::array<Stage, 2> stages;
    float* s;                // [block_kv, lanes]
    Bf16* ones;              // a row tile whose first row is 1: times P it gives the sum of the weights
    Bf16* k;                 // row tiles [keys / 16][depth_tiles] of a block
    Bf16* v[2];              // row tiles [keys / 32][dim_tiles_v] of the current and the previous block
    float* block_o;          // [value_rows, lanes]
    float* bias_or_dropout;  // [block_kv, lanes]: bias, dropout factors
    std::array<Bf16*, kMaxPanels> queries{};   // per panel: pair tiles [depth_tiles][lanes / 16]
    std::array<float*, kMaxPanels> offsets{};  // per panel: [lanes], rounding_offsets()
    std::array<float*, kMaxPanels> totals{};   // per panel: m, l, O^T
    EpilogueScratch finish;

    PanelsScratch(Arena& arena, const matrix::Layout& g, const ForwardWorkSplit& work_split)
        : stages{Stage(arena, g), Stage(arena, g)},
          s(arena.take<float>(g.block_kv_rows(), g.lanes)),
          ones(arena.take<Bf16>(matrix::kTileElements)),
          block_o(arena.take<float>(value_rows(g), g.lanes)),
          bias_or_dropout(arena.take<float>(g.block_kv_rows(), g.lanes)),
          finish(arena, g) {
        k = arena.take<Bf16>(g.block_kv_rows(), g.depth_row(g.depth_tiles));
        for (Bf16*& block : v) block = arena.take<Bf16>(g.block_kv_rows(), g.dim_row(g.dim_tiles_v));
        for (std::size_t i = 0; i < static_cast<std::size_t>(work_split.panels_per_task); ++i) {
            queries[i] = arena.take<Bf16>(g.depth_row(g.depth_tiles), g.lanes);
            offsets[i] = arena.take<float>(g.lanes);
            totals[i] = arena.take<float>(sums_floats(g));
        }
    }
};

/// Memory of one worker if queries are rows. matrix::Sums: m, l [lanes], O [lanes, value_rows].
struct DecodeScratch {
    Stage stage;
    float* s;                // [block_kv, lanes]
    float* bias_or_dropout;  // [block_kv, lanes]: bias, dropout factors
    Bf16* ones;              // a pair tile
    Bf16* queries;           // pair tiles [depth_tiles][1]
    float* offsets;          // [lanes], rounding_offsets()
    Bf16* k;                 // row tiles [kSliceKeys / 16][depth_tiles]
    Bf16* v;                 // pair tiles [kRowsBuffer][dim_tiles_v]
    float* total;            // sums
    float* block;            // sums
    float* columns;          // [value_rows, lanes]: O^T
    EpilogueScratch finish;

    DecodeScratch(Arena& arena, const matrix::Layout& g)
        : stage(arena, g),
          s(arena.take<float>(g.block_kv_rows(), g.lanes)),
          bias_or_dropout(arena.take<float>(g.block_kv_rows(), g.lanes)),
          ones(arena.take<Bf16>(matrix::kTileElements)),
          queries(arena.take<Bf16>(g.depth_row(g.depth_tiles), g.lanes)),
          offsets(arena.take<float>(g.lanes)),
          k(arena.take<Bf16>(kSliceKeys, g.depth_row(g.depth_tiles))),
          v(arena.take<Bf16>(matrix::kRowsBuffer, g.dim_tiles_v, g.tile_elements())),
          total(arena.take<float>(sums_floats(g))),
          block(arena.take<float>(sums_floats(g))),
          columns(arena.take<float>(value_rows(g), g.lanes)),
          finish(arena, g) {}
};

/// Memory of one worker with few_queries(). Rows are the queries of all panels of a task.
struct FewQueriesScratch {
    DecodeScratch decode;  // first, as ForwardRun::decode_scratch() expects
    Bf16* q;               // [rows, depth]
    float* s;              // [rows, block_kv]
    Bf16* p;               // [rows, block_kv]
    float* row;            // [head_dim_v]
    const void** k_rows;   // [block_kv + kRowsAhead]: addresses of rows in pages
    const void** v_rows;
    std::array<float*, kMaxPanels> totals{};  // per panel: sums
    std::array<float*, kMaxPanels> blocks{};  // per panel: sums

    FewQueriesScratch(Arena& arena, const matrix::Layout& g, const ForwardWorkSplit& work_split) : decode(arena, g) {
        const std::int64_t rows = work_split.panels_per_task * g.block_q;
        q = arena.take<Bf16>(rows, g.depth_row(g.depth_tiles));
        s = arena.take<float>(rows, g.block_kv_rows());
        p = arena.take<Bf16>(rows, g.block_kv_rows());
        row = arena.take<float>(g.v_stride);
        k_rows = arena.take<const void*>(g.block_kv + simd::kRowsAhead);
        v_rows = arena.take<const void*>(g.block_kv + simd::kRowsAhead);
        for (std::size_t i = 0; i < static_cast<std::size_t>(work_split.panels_per_task); ++i) {
            totals[i] = arena.take<float>(sums_floats(g));
            blocks[i] = arena.take<float>(sums_floats(g));
        }
    }
};

struct ForwardWorkspace {
    std::int64_t* ends = nullptr;  // take_task_ends()
    LongSequences long_sequences;  // of few_queries()
    /// [kv_heads, panels_per_kv_head, chunks, sums] if keys are split, or
    /// [long_sequences.most, panels_per_task, chunks, sums]
    float* partials = nullptr;
    WorkerMemory workers;  // a PanelsScratch, DecodeScratch or FewQueriesScratch each

    ForwardWorkspace(Arena& arena, const Problem& p, const matrix::Layout& g, const ForwardWorkSplit& work_split)
        : ends(take_task_ends(arena, p)),
          long_sequences(arena, p, work_split, few_queries(p, g) && work_split.partials_of_tasks_fit(p, g)) {
        const std::int64_t split =
            work_split.split ? work_split.panels() : long_sequences.most * work_split.panels_per_task;
        partials = arena.take<float>(split, work_split.chunks, sums_floats(g));
        workers = WorkerMemory(arena, work_split.threads, [&](Arena& one) {
            if (few_queries(p, g)) FewQueriesScratch(one, g, work_split);
            else if (queries_as_rows(work_split, g)) DecodeScratch(one, g);
            else PanelsScratch(one, g, work_split);
        });
    }
};

}  // namespace tessera::cpu::fa2::matrix_path
