// SPDX-License-Identifier: Apache-2.0
//
// Sizes and memory of the backward for few queries per head (few_gradients.cc).
#pragma once

#include <algorithm>

#include "core/arena.hpp"
#include "cpu/fa2/simd/few_gradients.hpp"
#include "cpu/fa2/simd/task.hpp"
#include "cpu/steps/simd/gradient.hpp"
#include "cpu/steps/sinks.hpp"

namespace tessera::cpu::fa2::simd_path {

/// Keys whose dK and dV stay in the L1 cache until they are stored.
inline constexpr std::int64_t kKeysAtOnce = 32;

/// Does the kernel take this sequence? The answer does not depend on the other sequences of the batch.
inline bool has_few_rows(const Problem& p, const Sequence& m) {
    return m.len_q <= kFewQueries && p.group() * m.len_q <= kMostFewRows;
}

/// The sizes of a call.
struct FewLayout {
    Geometry g;
    std::int64_t rows;      ///< at most, of a kv head
    std::int64_t tiles;     ///< at most, of keys of a head
    std::int64_t s_stride;  ///< floats of one row of scores
    bool sums_delta;        ///< O is rounded, so delta is a sum over all keys
    bool in_parts;          ///< dQ may have more than kSumTiles tiles
    int threads;
    bool whole_heads;             ///< a task runs a kv head; otherwise some of its tiles
    std::int64_t tiles_per_task;  ///< if not whole_heads
    std::int64_t slots;           ///< kv heads that have HeadMemory at the same time

    explicit FewLayout(const Plan& plan)
        : g(plan, kFewQueries),
          rows(std::min(plan.problem.group() * g.block_q, kMostFewRows)),
          tiles(ceil_div(plan.problem.len_kv, g.block_kv)),
          s_stride(simd::padded(g.block_kv)),
          sums_delta(plan.problem.dtype != DType::fp32),
          in_parts(tiles > simd::kSumTiles),
          threads(worthwhile_threads(plan)) {
        const std::int64_t kv_heads = plan.problem.batch * plan.problem.heads_kv;
        whole_heads = heads_fill_threads(kv_heads, threads);
        tiles_per_task = std::clamp<std::int64_t>(kv_heads * tiles / (simd_split::kTasksPerThread * threads), 1,
                                                  std::max<std::int64_t>(1, tiles));
        slots = whole_heads ? threads : kv_heads;
    }
};

/// Memory of one kv head.
struct HeadMemory {
    float* q_scaled;  // [rows, k_stride]
    float* q;         // [rows, k_stride]
    float* d_o;       // [rows, v_stride]
    float* lse;       // [rows], +inf for empty rows
    float* delta;     // [rows]
    float* norm;      // [rows + 1], factors of P for rows with a too large LSE; the last: 0 if all are 1
    float* dq;        // [tiles, rows, k_stride], the sums of single tiles
    float* p;         // [tiles, rows, s_stride], if sums_delta
    float* dp;        // likewise
    float* sums;      // [tiles, 2, rows], sums of P and of P * dP, if sums_delta

    HeadMemory(Arena& arena, const FewLayout& layout)
        : q_scaled(arena.take<float>(layout.rows, layout.g.k_stride)),
          q(arena.take<float>(layout.rows, layout.g.k_stride)),
          d_o(arena.take<float>(layout.rows, layout.g.v_stride)),
          lse(arena.take<float>(layout.rows)),
          delta(arena.take<float>(layout.rows)),
          norm(arena.take<float>(layout.rows + 1)),
          dq(arena.take<float>(layout.tiles, layout.rows, layout.g.k_stride)),
          p(arena.take<float>(kept_tiles(layout), layout.rows, layout.s_stride)),
          dp(arena.take<float>(kept_tiles(layout), layout.rows, layout.s_stride)),
          sums(arena.take<float>(kept_tiles(layout), 2, layout.rows)) {}

 private:
    static std::int64_t kept_tiles(const FewLayout& layout) { return layout.sums_delta ? layout.tiles : 0; }
};

/// Memory of one worker.
struct FewScratch {
    float* k;          // [block_kv, k_stride], if K is not used in place
    float* v;          // [block_kv, v_stride]
    float* o;          // [block_q, v_stride]
    float* p;          // [rows, s_stride]
    float* dp;         // [rows, s_stride]
    float* weights;    // [rows], sum of P over a tile
    float* products;   // [rows], sum of P * dP over a tile
    float* dk;         // [kKeysAtOnce, k_stride]
    float* dv;         // [kKeysAtOnce, v_stride]
    float* dq;         // [rows, k_stride]
    double* dq_total;  // [rows, k_stride], if in_parts

    FewScratch(Arena& arena, const FewLayout& layout)
        : k(arena.take<float>(layout.g.block_kv, layout.g.k_stride)),
          v(arena.take<float>(layout.g.block_kv, layout.g.v_stride)),
          o(arena.take<float>(layout.g.block_q, layout.g.v_stride)),
          p(arena.take<float>(layout.rows, layout.s_stride)),
          dp(arena.take<float>(layout.rows, layout.s_stride)),
          weights(arena.take<float>(layout.rows)),
          products(arena.take<float>(layout.rows)),
          dk(arena.take<float>(kKeysAtOnce, layout.g.k_stride)),
          dv(arena.take<float>(kKeysAtOnce, layout.g.v_stride)),
          dq(arena.take<float>(layout.rows, layout.g.k_stride)),
          dq_total(arena.take<double>(layout.in_parts ? layout.rows : 0, layout.g.k_stride)) {}
};

/// Beside longer sequences another kernel has computed dsinks, which are sums over all sequences.
inline bool takes_sinks(const Plan& plan) { return plan.problem.sinks && takes_only_few_gradients(plan); }

/// A call with its sizes and memory.
struct FewRun {
    const BackwardCall& call;
    FewLayout layout;
    SinkRow* sinks;      // [batch, heads_q, block_q], if the call's dsinks are computed here; otherwise null
    std::int64_t* ends;  // of tasks
    WorkerMemory heads;  // of slots
    WorkerMemory workers;

    FewRun(const BackwardCall& c, Arena& arena)
        : call(c),
          layout(c.plan),
          sinks(takes_sinks(c.plan)
                    ? arena.take<SinkRow>(c.plan.problem.batch, c.plan.problem.heads_q, layout.g.block_q)
                    : nullptr),
          ends(take_task_ends(arena, c.plan.problem)),
          heads(arena, static_cast<int>(layout.slots), [&](Arena& one) { HeadMemory(one, layout); }),
          workers(arena, layout.threads, [&](Arena& one) { FewScratch(one, layout); }) {}
    SinkRow* sinks_of(std::int64_t batch, std::int64_t query_head) const {
        return sinks + (batch * call.plan.problem.heads_q + query_head) * layout.g.block_q;
    }
    HeadMemory head(std::int64_t slot) const {
        Arena memory = heads.arena(static_cast<int>(slot));
        return {memory, layout};
    }
    FewScratch scratch(int worker) const {
        Arena memory = workers.arena(worker);
        return {memory, layout};
    }
};

}  // namespace tessera::cpu::fa2::simd_path
