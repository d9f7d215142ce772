// SPDX-License-Identifier: Apache-2.0
//
// fa2 backward (FlashAttention-2 paper, Algorithm 2): parallel over K/V blocks too. The paper adds to dQ with atomics;
// here the work is cut so that no two tasks ever share a sum, and the order of every sum is fixed:
//
//   Queries and keys of a head are cut into chunks. In round r, key chunk j meets query chunk i = (j + r) mod n, n the
//   larger number of chunks: a Latin square. Within a round every task has its own query chunk (dQ) and its own key
//   chunk (dK, dV); after n rounds every pair has met once. dQ of a chunk is summed over rounds, and so are dK and dV,
//   whoever runs the tasks.
//
// When there are heads enough for all threads, one task runs all rounds of a head, in the same order: same bits, no
// waiting (docs/decisions/deterministic-backward.md).
#include "cpu/gradient.hpp"
#include "cpu/schedules.hpp"

namespace tessera::cpu::fa2 {
namespace {

constexpr std::int64_t kChunk = 256;  // queries, and keys, of one task of a round

/// The chunks of one head.
struct Rounds {
    std::int64_t panels_per_chunk;
    std::int64_t tiles_per_chunk;
    std::int64_t keys_per_chunk;
    std::int64_t query_chunks;
    std::int64_t key_chunks;
    std::int64_t rounds;

    Rounds(const Geometry& g, std::int64_t len_q, std::int64_t len_kv)
        : panels_per_chunk(ceil_div(kChunk, g.block_q)),
          tiles_per_chunk(ceil_div(kChunk, g.block_kv)),
          keys_per_chunk(tiles_per_chunk * g.block_kv),
          query_chunks(ceil_div(ceil_div(len_q, g.block_q), panels_per_chunk)),
          key_chunks(ceil_div(len_kv, keys_per_chunk)),
          rounds(len_q == 0 ? 0 : std::max(query_chunks, key_chunks)) {}
};

/// Key chunk `j` against the query chunk that round `round` gives it.
void run_pair(const Head& head, const Geometry& g, const Rounds& rounds, std::int64_t round, std::int64_t j,
              const GradientMemory& memory, const GradientScratch& scratch, TileTally& tally) {
    const std::int64_t i = (j + round) % rounds.rounds;
    if (j >= rounds.key_chunks || i >= rounds.query_chunks) return;
    const std::int64_t first_panel = i * rounds.panels_per_chunk;
    const std::int64_t last_panel = std::min(first_panel + rounds.panels_per_chunk, ceil_div(head.member.len_q, g.block_q));
    const std::int64_t end = std::min((j + 1) * rounds.keys_per_chunk, head.member.len_kv);
    for (std::int64_t first = j * rounds.keys_per_chunk; first < end; first += g.block_kv) {
        const Range keys{first, std::min(end, first + g.block_kv)};
        const Range queries = head.band.q_range(keys.begin, keys.end);
        const Range touched = queries.empty() ? Range{}
                                              : Range{std::max(first_panel, queries.begin / g.block_q),
                                                      std::min(last_panel, ceil_div(queries.end, g.block_q))};
        tally.skipped(last_panel - first_panel, touched.size());
        if (touched.empty()) continue;
        const KvTile kv = load_kv(head, g, first, keys.size(), scratch, touched.size() == 1);
        for (std::int64_t index = touched.begin; index < touched.end; ++index) {
            const Panel panel(index, g.block_q, head.member.len_q);
            const Coverage coverage = head.coverage(panel, kv);
            backward_tile(head, g, panel, kv, coverage, memory.panel(head, index), scratch,
                          memory.dk(head.member, head.kv_head, first), memory.dv(head.member, head.kv_head, first));
            tally.ran(coverage);
        }
    }
}

/// Enough heads for the threads: each runs alone.
bool heads_fill_threads(const Problem& p, int threads) {
    const std::int64_t heads = p.batch * p.heads_kv;
    return threads == 1 || (heads >= threads && (heads % threads == 0 || heads >= 4 * threads));
}

}  // namespace

std::size_t backward_workspace(const Plan& plan) {
    Arena arena;
    BackwardWorkspace(arena, plan, Geometry(plan));
    return arena.used();
}

void backward(const BackwardCall& call) {
    const Problem& p = call.plan.problem;
    const Geometry g(call.plan);
    Arena arena(call.workspace);
    BackwardWorkspace workspace(arena, call.plan, g);
    workspace.memory.prepare(call);

    const Rounds longest(g, p.len_q, p.len_kv);
    const std::int64_t kv_heads = p.batch * p.heads_kv;
    const auto pair = [&](std::int64_t kv_head, std::int64_t in_group, std::int64_t round, std::int64_t j, int worker, TileTally& tally) {
        const Member member = member_of(call, kv_head / p.heads_kv);
        const Rounds rounds(g, member.len_q, member.len_kv);
        if (round >= rounds.rounds) return;
        const Head head(p, call.args, member, kv_head % p.heads_kv * p.group() + in_group);
        run_pair(head, g, rounds, round, j, workspace.memory, workspace.workers[static_cast<std::size_t>(worker)], tally);
    };
    const auto all_rounds = [&](const auto& body) {
        for (std::int64_t in_group = 0; in_group < p.group(); ++in_group) {
            for (std::int64_t round = 0; round < longest.rounds; ++round) body(in_group, round);
        }
    };
    if (heads_fill_threads(p, call.plan.threads)) {
        call.parallel_for(kv_heads, call.plan.threads, [&](std::int64_t kv_head, int worker) {
            TileTally tally(call.counters);
            all_rounds([&](std::int64_t in_group, std::int64_t round) {
                for (std::int64_t j = 0; j < longest.key_chunks; ++j) pair(kv_head, in_group, round, j, worker, tally);
            });
        });
    } else {
        all_rounds([&](std::int64_t in_group, std::int64_t round) {
            call.parallel_for(kv_heads * longest.key_chunks, call.plan.threads, [&](std::int64_t task, int worker) {
                TileTally tally(call.counters);
                pair(task % kv_heads, in_group, round, task / kv_heads, worker, tally);
            });
        });
    }
    workspace.bias.run(call, workspace.memory, workspace.workers);
    workspace.memory.finish(call);
}

}  // namespace tessera::cpu::fa2
