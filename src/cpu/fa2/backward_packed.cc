// SPDX-License-Identifier: Apache-2.0
//
// fa2 backward on packed bf16 tiles (FlashAttention-2 paper, Algorithm 2). The order of every sum is fixed: dK and dV
// of a key over query heads and queries rising, dQ of a query over keys rising, each in steps of 32, without atomics.
//
// Heads enough for all threads: one task runs a kv head, key blocks outer, query blocks inner, five products for each
// tile. Fewer heads: some tasks make dK and dV of a few keys over all queries, the others dQ of a few queries over all
// keys. Scores and dP are made twice (seven products), but no task waits for another, and one head keeps all threads
// busy. The sums are the same, so the bits are (docs/decisions/packed-bf16.md).
#include "cpu/fa2/backward_packed.hpp"

#include <vector>

#include "cpu/gradient.hpp"
#include "cpu/packed_gradient_tile.hpp"

namespace tessera::cpu::fa2 {
namespace {

constexpr std::int64_t kBlockQ = 128;   // queries of a tile: 4 steps of 32 for a product of dK and dV
constexpr std::int64_t kBlockKv = 256;  // keys of a tile: with their dK and dV they stay in the second-level cache
constexpr double kTwiceCost = 1.7;      // of making dK, dV and dQ apart, relative to together
constexpr std::int64_t kTasksPerWorker = 3;

struct Workspace {
    PackedGradients memory;
    std::vector<PackedGradientScratch> workers;

    Workspace(Arena& arena, const Plan& plan, const PackedGeometry& g) : memory(arena, plan, g) {
        for (int worker = 0; worker < plan.threads; ++worker) workers.emplace_back(arena, g, kBlockQ, kBlockKv);
    }
};

/// The tiles of one call.
class Run {
 public:
    explicit Run(const BackwardCall& call)
        : call_(call),
          p_(call.plan.problem),
          threads_(worthwhile_threads(call.plan)),
          g_(call.plan, kBlockQ),
          workspace_(make(call, g_)) {}

    void all() const {
        if (workspace_.memory.prepare(call_)) normalise();
        const std::int64_t heads = p_.batch * p_.heads_kv;
        const auto together = static_cast<double>(ceil_div(heads, threads_));
        const double apart = kTwiceCost * static_cast<double>(heads) / threads_;
        if (together <= apart) whole_heads();
        else parts();
        if (call_.counters != nullptr) count();
    }

 private:
    static Workspace make(const BackwardCall& call, const PackedGeometry& g) {
        Arena arena(call.workspace);
        return Workspace(arena, call.plan, g);
    }
    const PackedGradientScratch& scratch(int worker) const {
        return workspace_.workers[static_cast<std::size_t>(worker)];
    }
    PackedPanel head(const Member& member, std::int64_t query_head) const {
        return {p_, call_.args, g_, member, query_head, 0};
    }

    /// Keys [begin, end), at most kBlockKv, against all queries that see them; writes dK and dV.
    void run_keys(const Member& member, std::int64_t kv_head, const Range& keys, int worker, bool with_queries) const {
        const PackedGradientScratch& at = scratch(worker);
        std::fill_n(at.dk, keys.size() * k_stride(), 0.0F);
        std::fill_n(at.dv, keys.size() * v_stride(), 0.0F);
        for (std::int64_t h = kv_head * p_.group(); h < (kv_head + 1) * p_.group(); ++h) {
            PackedPanel work = head(member, h);
            const Range queries = work.head.band.q_range(keys.begin, keys.end);
            for (std::int64_t q = queries.begin / kBlockQ * kBlockQ; q < queries.end; q += kBlockQ) {
                packed_gradient_tile(workspace_.memory, at, work, {q, std::min(member.len_q, q + kBlockQ)}, keys,
                                     call_.args, {.keys = true, .queries = with_queries});
            }
        }
        const auto scale = static_cast<float>(p_.effective_scale());
        const auto kept = static_cast<float>(1 / (1 - p_.dropout.probability));  // weights were packed without it
        tile::store_rows(at.dk, k_stride(), keys.size(), g_.head_dim, scale,
                         head_rows(call_.args.dk, member, member.first_kv, kv_head), keys.begin);
        tile::store_rows(at.dv, v_stride(), keys.size(), g_.head_dim_v, kept,
                         head_rows(call_.args.dv, member, member.first_kv, kv_head), keys.begin);
    }

    /// dQ of queries [begin, end), at most kBlockQ.
    void run_queries(const Member& member, std::int64_t query_head, const Range& queries, int worker) const {
        PackedPanel work = head(member, query_head);
        const Range keys = work.head.band.kv_range(queries.begin, queries.end);
        for (std::int64_t k = keys.begin / kBlockKv * kBlockKv; k < keys.end; k += kBlockKv) {
            packed_gradient_tile(workspace_.memory, scratch(worker), work, queries,
                                 {k, std::min(member.len_kv, k + kBlockKv)}, call_.args,
                                 {.keys = false, .queries = true});
        }
        store_queries(work.head, queries);
    }

    void store_queries(const Head& of, const Range& queries) const {
        for (std::int64_t q = queries.begin; q < queries.end; q += tile::kTileDepth) {
            workspace_.memory.store_queries(call_.args, of, q);
        }
    }

    /// Rows whose LSE is too large, before the tiles need their factors.
    void normalise() const {
        call_.parallel_for(p_.batch * p_.heads_q, threads_, [&](std::int64_t task, int worker) {
            const tile::PackedSession session(*tile::packed_words());
            PackedPanel work = head(member_of(call_, task / p_.heads_q), task % p_.heads_q);
            for (std::int64_t q = 0; q < work.head.member.len_q; q += tile::kTileDepth) {
                packed_normalise(workspace_.memory, scratch(worker), work, q);
            }
        });
    }

    void whole_heads() const {
        call_.parallel_for(p_.batch * p_.heads_kv, threads_, [&](std::int64_t task, int worker) {
            const tile::PackedSession session(*tile::packed_words());
            const Member member = member_of(call_, task / p_.heads_kv);
            const std::int64_t kv_head = task % p_.heads_kv;
            for (std::int64_t k = 0; k < member.len_kv; k += kBlockKv) {
                run_keys(member, kv_head, {k, std::min(member.len_kv, k + kBlockKv)}, worker, true);
            }
            for (std::int64_t h = kv_head * p_.group(); h < (kv_head + 1) * p_.group(); ++h) {
                store_queries(Head(p_, call_.args, member, h), {0, member.len_q});
            }
        });
    }

    /// Rows of a task: as many as leave some tasks for every worker, from `most` down.
    std::int64_t rows_per_task(std::int64_t heads, std::int64_t len, std::int64_t most) const {
        while (most > tile::kTileDepth && heads * ceil_div(len, most) < kTasksPerWorker * threads_) most /= 2;
        return most;
    }

    void parts() const {
        const std::int64_t rows_kv = rows_per_task(p_.batch * p_.heads_kv, p_.len_kv, kBlockKv);
        const std::int64_t rows_q = rows_per_task(p_.batch * p_.heads_q, p_.len_q, kBlockQ);
        const std::int64_t parts_kv = ceil_div(p_.len_kv, rows_kv);
        const std::int64_t parts_q = ceil_div(p_.len_q, rows_q);
        const std::int64_t tasks_kv = p_.batch * p_.heads_kv * parts_kv;
        // Under a causal mask the first keys and the last queries have the most to do: they go first.
        call_.parallel_for(tasks_kv + p_.batch * p_.heads_q * parts_q, threads_, [&](std::int64_t task, int worker) {
            const tile::PackedSession session(*tile::packed_words());
            if (task < tasks_kv) {
                const std::int64_t head = task % (p_.batch * p_.heads_kv);
                const Member member = member_of(call_, head / p_.heads_kv);
                const std::int64_t k = task / (p_.batch * p_.heads_kv) * rows_kv;
                const Range keys{k, std::min(member.len_kv, k + rows_kv)};
                if (!keys.empty()) run_keys(member, head % p_.heads_kv, keys, worker, false);
            } else {
                const std::int64_t index = task - tasks_kv;
                const std::int64_t head = index % (p_.batch * p_.heads_q);
                const Member member = member_of(call_, head / p_.heads_q);
                const std::int64_t q = (parts_q - 1 - index / (p_.batch * p_.heads_q)) * rows_q;
                const Range queries{q, std::min(member.len_q, q + rows_q)};
                if (!queries.empty()) run_queries(member, head % p_.heads_q, queries, worker);
            }
        });
    }

    /// Tiles of the plan's size, whoever ran them.
    void count() const {
        TileTally tally(call_.counters);
        for (std::int64_t head = 0; head < p_.batch * p_.heads_q; ++head) {
            const Head of(p_, call_.args, member_of(call_, head / p_.heads_q), head % p_.heads_q);
            for (std::int64_t q = 0; q < of.member.len_q; q += kBlockQ) {
                for (std::int64_t k = 0; k < of.member.len_kv; k += kBlockKv) {
                    const Coverage coverage = of.band.coverage(q, std::min(of.member.len_q, q + kBlockQ), k,
                                                               std::min(of.member.len_kv, k + kBlockKv));
                    const std::int64_t elements =
                        std::min(kBlockQ, of.member.len_q - q) * std::min(kBlockKv, of.member.len_kv - k);
                    if (coverage == Coverage::empty) tally.skipped(1, 0);
                    else tally.ran(coverage, elements);
                }
            }
        }
    }

    std::int64_t k_stride() const { return g_.dim_tiles * tile::kTileRows; }
    std::int64_t v_stride() const { return g_.dim_tiles_v * tile::kTileRows; }

    const BackwardCall& call_;
    const Problem& p_;
    int threads_;  ///< that take part
    PackedGeometry g_;
    Workspace workspace_;
};

}  // namespace

bool backward_packed_fits(const Plan& plan) {
    return packed_fits(plan) && !plan.problem.bias_gradient && plan.tile.block_q == kBlockQ &&
           plan.tile.block_kv == kBlockKv;
}

std::size_t backward_packed_workspace(const Plan& plan) {
    Arena arena;
    Workspace(arena, plan, PackedGeometry(plan, kBlockQ));
    return arena.used();
}

void backward_packed(const BackwardCall& call) { Run(call).all(); }

}  // namespace tessera::cpu::fa2
