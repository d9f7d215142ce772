// SPDX-License-Identifier: Apache-2.0
//
// How a forward call on packed tiles is cut into tasks, and what memory it takes.
#pragma once

#include <array>
#include <vector>

#include "cpu/packed_panel.hpp"

namespace tessera::cpu::fa2 {

inline constexpr std::int64_t kMaxPanels = 8;  // of a task: they share a block of K and V in the second-level cache
inline constexpr std::int64_t kTasksPerWorker = 3;
inline constexpr std::int64_t kTasksOfShortRows = 2;  // of a worker, where rows have a single block of keys
inline constexpr std::int64_t kFewestPackedKeys = tile::kTileDepth;  // of a task that packs for all
inline constexpr std::int64_t kScoreRows = 128;  // keys whose scores are made, masked and transformed at a time
inline constexpr std::int64_t kExactBlock = 64;  // keys of a tile where an overflow is computed again in fp32

/// How the panels are dealt out; those of a kv head are those of all query heads that share it.
struct Partition {
    std::int64_t panels_per_kv_head;
    std::int64_t panels_per_task = kMaxPanels;
    std::int64_t tasks_per_kv_head;
    std::int64_t kv_heads;         ///< of all batch members
    std::int64_t blocks;           ///< of keys, of the longest member
    int threads;                   ///< that take part
    bool split;                    ///< a task is one block of keys, and a second loop merges
    bool pack_in_task;             ///< each task packs the keys of its panels for itself, into its own cache
    std::int64_t packed_together;  ///< keys of a task that packs for all

    Partition(const Plan& plan, const PackedGeometry& g)
        : panels_per_kv_head(plan.problem.group() * g.panels),
          kv_heads(plan.problem.batch * plan.problem.heads_kv),
          blocks(ceil_div(plan.problem.len_kv, g.block_kv)),
          threads(worthwhile_threads(plan)) {
        const std::int64_t panels = kv_heads * panels_per_kv_head;
        const bool short_rows = plan.problem.len_kv <= g.block_kv;
        while (threads > 1 && panels_per_task > 1 &&
               panels < panels_per_task * threads * (short_rows ? kTasksOfShortRows : kTasksPerWorker)) {
            panels_per_task /= 2;
        }
        // Not less than fewer tasks at a time would take: each packs for itself.
        const auto time = [&](std::int64_t each) { return ceil_div(ceil_div(panels, each), threads) * each; };
        while (short_rows && panels_per_task < kMaxPanels && time(2 * panels_per_task) <= time(panels_per_task)) {
            panels_per_task *= 2;
        }
        split = threads > 1 && blocks > 1 && panels < 2 * threads;
        if (split) panels_per_task = std::min(panels_per_kv_head, kMaxPanels);
        tasks_per_kv_head = ceil_div(panels_per_kv_head, std::max<std::int64_t>(1, panels_per_task));
        // To pack a key takes the time of two panels with it; to fetch it from the core that did takes as long.
        pack_in_task = tasks_per_kv_head <= 1 || short_rows;
        packed_together = g.block_kv_rows();
        while (packed_together > kFewestPackedKeys &&
               kv_heads * ceil_div(plan.problem.len_kv, packed_together) < kTasksPerWorker * threads) {
            packed_together = round_up(packed_together / 2, tile::kTileDepth);
        }
    }
};

/// O^T as products write it: 16 * dim_tiles_v rows; in bf16, whose product takes rounded weights, also a tile whose
/// first row is their sum.
inline std::int64_t sum_row(const PackedGeometry& g) { return g.dim_tiles_v * tile::kTileRows; }
inline std::int64_t value_rows(const PackedGeometry& g) { return sum_row(g) + (g.parts == 1 ? tile::kTileRows : 0); }
/// Rows that a merge takes along.
inline std::int64_t merged_rows(const PackedGeometry& g) { return sum_row(g) + (g.parts == 1 ? 1 : 0); }

/// A panel's result: m, l, O^T [value_rows, lanes].
inline std::int64_t sums_floats(const PackedGeometry& g) { return (2 + value_rows(g)) * g.lanes; }

/// What a step holds between its stages; two are in flight.
struct Stage {
    Bf16* p;               // pair tiles [block_kv / 32][lanes / 16]
    tile::RowState state;  // [lanes] each, of this step alone
    float* maximum;        // [lanes], of s before its scale

    Stage(Arena& arena, const PackedGeometry& g)
        : p(arena.take<Bf16>(g.block_kv_rows(), g.lanes * g.parts)),
          state{arena.take<float>(g.lanes), arena.take<float>(g.lanes)},
          maximum(arena.take<float>(g.lanes)) {}
};

/// Memory of one worker.
struct Scratch {
    std::array<Stage, 2> stages;
    float* s;                                 // [block_kv, lanes]
    Bf16* ones;                               // a row tile, its first row 1: times P the sum of the weights
    Bf16* k = nullptr;                        // row tiles [block_kv / 16][depth_tiles], when tasks pack for themselves
    Bf16* v[2] = {};                          // row tiles [block_kv / 32][dim_tiles_v] of even and odd blocks, likewise
    float* block_o;                           // [value_rows, lanes]
    float* other;                             // [block_kv, lanes]: bias, dropout factors
    std::array<Bf16*, kMaxPanels> queries{};  // per panel: pair tiles [depth_tiles][lanes / 16]
    std::array<float*, kMaxPanels> totals{};  // per panel: m, l, O^T
    Geometry exact;
    TileScratch exact_tiles;
    float* q_t;      // [head_dim, lanes]
    float* spare_o;  // [head_dim_v, lanes]

    Scratch(Arena& arena, const PackedGeometry& g, const Partition& part)
        : stages{Stage(arena, g), Stage(arena, g)},
          s(arena.take<float>(g.block_kv_rows(), g.lanes)),
          ones(arena.take<Bf16>(tile::kTileElements)),
          block_o(arena.take<float>(value_rows(g), g.lanes)),
          other(arena.take<float>(g.block_kv_rows(), g.lanes)),
          exact(exact_geometry(g)),
          exact_tiles(arena, exact),
          q_t(arena.take<float>(g.head_dim, g.lanes)),
          spare_o(arena.take<float>(g.head_dim_v, g.lanes)) {
        if (part.pack_in_task) {
            k = arena.take<Bf16>(g.block_kv_rows(), g.depth_row(g.depth_tiles));
            for (Bf16*& block : v) block = arena.take<Bf16>(g.block_kv_rows(), g.dim_row(g.dim_tiles_v));
        }
        for (std::size_t i = 0; i < static_cast<std::size_t>(part.panels_per_task); ++i) {
            queries[i] = arena.take<Bf16>(g.depth_row(g.depth_tiles), g.lanes);
            totals[i] = arena.take<float>(sums_floats(g));
        }
    }

    static Geometry exact_geometry(const Geometry& g) {
        Geometry exact = g;
        exact.block_kv = std::min(g.block_kv, kExactBlock);
        return exact;
    }
};

struct Workspace {
    Bf16* k;                    // [heads_kv], row tiles [packed rows / 16][depth_tiles]
    Bf16* v;                    // [heads_kv], row tiles [packed rows / 32][dim_tiles_v]
    char* k_finite;             // [kv_heads, key groups]: of 32 keys each
    char* v_finite;             // likewise
    float* partials = nullptr;  // [panel, block, sums], when keys are split
    std::vector<Scratch> workers;

    Workspace(Arena& arena, const Plan& plan, const PackedGeometry& g, const Partition& part) {
        const std::int64_t rows = part.pack_in_task ? 0 : packed_keys(plan.problem);
        k = arena.take<Bf16>(plan.problem.heads_kv, rows, g.depth_row(g.depth_tiles));
        v = arena.take<Bf16>(plan.problem.heads_kv, rows, g.dim_row(g.dim_tiles_v));
        k_finite = arena.take<char>(part.pack_in_task ? 0 : part.kv_heads, key_groups(plan));
        v_finite = arena.take<char>(part.pack_in_task ? 0 : part.kv_heads, key_groups(plan));
        if (part.split) {
            partials = arena.take<float>(part.kv_heads * part.panels_per_kv_head, part.blocks, sums_floats(g));
        }
        workers.reserve(static_cast<std::size_t>(part.threads));
        for (int worker = 0; worker < part.threads; ++worker) workers.emplace_back(arena, g, part);
    }
    static std::int64_t key_groups(const Plan& plan) { return ceil_div(plan.problem.len_kv, tile::kTileDepth); }
};

}  // namespace tessera::cpu::fa2
