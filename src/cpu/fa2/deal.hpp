// SPDX-License-Identifier: Apache-2.0
//
// How a forward call is dealt to tasks, in both rooms. The keys of a row are always summed in chunks, each with its own
// (m, l, O), which are merged in rising order (what split-KV decoding calls combine). Whether the chunks of a row are
// run by one task or by many changes nothing in that sum, so the bits of a row depend neither on the number of threads
// nor on its batch neighbours (docs/decisions/fixed-split.md). How many panels make a task, and when a split pays, each
// room knows by itself.
#pragma once

#include "cpu/call.hpp"

namespace tessera::cpu::fa2 {

/// The panels of a kv head are those of all query heads that share it, one after another.
struct Deal {
    std::int64_t kv_heads;            ///< of all batch members
    std::int64_t panels_per_kv_head;  ///< of the longest member
    std::int64_t panels_per_task = 1;
    std::int64_t chunks;  ///< of keys, of the longest member
    int threads;          ///< that take part
    bool split = false;   ///< a task is one chunk of keys for its panels, and a second loop merges

    Deal(const Plan& plan, const Geometry& g, std::int64_t keys_per_chunk)
        : kv_heads(plan.problem.batch * plan.problem.heads_kv),
          panels_per_kv_head(plan.problem.group() * g.panels),
          chunks(ceil_div(plan.problem.len_kv, keys_per_chunk)),
          threads(worthwhile_threads(plan)) {}

    std::int64_t panels() const { return kv_heads * panels_per_kv_head; }
    std::int64_t tasks_per_kv_head() const { return ceil_div(panels_per_kv_head, panels_per_task); }
    /// The panels of a kv head's task `index`.
    Range panels_of_task(std::int64_t index) const {
        return {index * panels_per_task, std::min(panels_per_kv_head, (index + 1) * panels_per_task)};
    }
    /// Where the result of a chunk waits to be merged: [kv_heads, panels_per_kv_head, chunks].
    std::int64_t partial(std::int64_t kv_head, std::int64_t panel, std::int64_t chunk) const {
        return (kv_head * panels_per_kv_head + panel) * chunks + chunk;
    }
};

/// Panel `index` of kv head `kv_head` (of all batch members): which panel of which query head that is.
struct DealtPanel {
    Member member;
    std::int64_t query_head;
    std::int64_t index;  ///< of the query head

    DealtPanel(const ForwardCall& call, const Geometry& g, std::int64_t kv_head, std::int64_t of_kv_head)
        : member(member_of(call.plan.problem, call.args.cu_seqlens_q, call.args.cu_seqlens_kv,
                           kv_head / call.plan.problem.heads_kv)),
          query_head(kv_head % call.plan.problem.heads_kv * call.plan.problem.group() + of_kv_head / g.panels),
          index(of_kv_head % g.panels) {}
};

/// Tasks that own their panels from the first key to the last: run(kv_head, panels, worker).
template <class Run>
void deal_whole(const ForwardCall& call, const Deal& deal, const Run& run) {
    const std::int64_t tasks = deal.tasks_per_kv_head();
    const bool later_is_longer = !call.plan.problem.mask.trivial();
    call.parallel_for(deal.kv_heads * tasks, deal.threads, [&](std::int64_t index, int worker) {
        // Under a causal mask the last panels see the most keys: they go first, of all heads, so that the loop ends
        // with short tasks. Otherwise neighbours in time share K and V.
        const std::int64_t kv_head = later_is_longer ? index % deal.kv_heads : index / tasks;
        const std::int64_t task = later_is_longer ? tasks - 1 - index / deal.kv_heads : index % tasks;
        run(kv_head, deal.panels_of_task(task), worker);
    });
}

/// Few panels, many keys: run(kv_head, panels, chunk, worker) for each chunk of keys by itself, and when all are done
/// merge(kv_head, part, worker) for the parts of every kv head that are merged apart.
template <class Run, class Merge>
void deal_split(const ForwardCall& call, const Deal& deal, std::int64_t parts, const Run& run, const Merge& merge) {
    const std::int64_t tasks = deal.tasks_per_kv_head();
    call.parallel_for(deal.kv_heads * tasks * deal.chunks, deal.threads, [&](std::int64_t index, int worker) {
        const std::int64_t task = index / deal.chunks;
        run(task / tasks, deal.panels_of_task(task % tasks), index % deal.chunks, worker);
    });
    call.parallel_for(deal.kv_heads * parts, deal.threads,
                      [&](std::int64_t index, int worker) { merge(index / parts, index % parts, worker); });
}

/// Merges the results of a panel's chunks in rising order: partial(chunk) of those that are seen(chunk). The first is
/// the total so far, later ones go into it by merge(total, next, chunk). Returns the total; not started: no chunk was
/// seen.
template <class Sums, class Seen, class Partial, class Merge>
Sums merge_chunks(const Deal& deal, Sums total, const Seen& seen, const Partial& partial, const Merge& merge) {
    total.started = false;
    for (std::int64_t chunk = 0; chunk < deal.chunks; ++chunk) {
        if (!seen(chunk)) continue;
        const Sums next = partial(chunk);
        if (total.started) {
            merge(total, next, chunk);
        } else {
            total = next;
            total.started = true;
        }
    }
    return total;
}

}  // namespace tessera::cpu::fa2
