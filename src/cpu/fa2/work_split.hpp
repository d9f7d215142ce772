// SPDX-License-Identifier: Apache-2.0
//
// The split of a forward call into tasks, for both paths. The keys of a row are always summed in chunks, each with its
// own (m, l, O), and merged in ascending order, as in split-KV decoding. One task or many may run the chunks of a row.
// The bits of a row therefore depend neither on the number of threads nor on its batch neighbours
// (docs/decisions/fixed-split.md). Each path decides how many panels make a task and when splitting the keys pays.
#pragma once

#include "cpu/steps/call.hpp"

namespace tessera::cpu::fa2 {

/// The split of a call into tasks. The panels of a kv head are those of all its query heads, one after another.
struct WorkSplit {
    std::int64_t kv_heads;            ///< kv heads of all sequences
    std::int64_t panels_per_kv_head;  ///< panels in the longest sequence that the Problem allows
    std::int64_t panels_per_task = 1;
    std::int64_t chunks;  ///< chunks of keys in the longest sequence
    std::int64_t keys_per_chunk;
    std::int64_t query_heads;  ///< query heads that share a kv head
    std::int64_t block_q;
    int threads;         ///< threads used
    bool split = false;  ///< each task is one chunk of keys, and a second loop merges them

    WorkSplit(const Plan& plan, const Geometry& g, std::int64_t chunk)
        : kv_heads(plan.problem.batch * plan.problem.heads_kv),
          panels_per_kv_head(plan.problem.group() * g.panels),
          chunks(ceil_div(plan.problem.len_kv, chunk)),
          keys_per_chunk(chunk),
          query_heads(plan.problem.group()),
          block_q(g.block_q),
          threads(worthwhile_threads(plan)) {}

    std::int64_t panels() const { return kv_heads * panels_per_kv_head; }
    /// The panels, chunks and tasks of a kv head of this sequence.
    std::int64_t panels_of(const Sequence& m) const { return query_heads * ceil_div(m.len_q, block_q); }
    std::int64_t chunks_of(const Sequence& m) const { return ceil_div(m.len_kv, keys_per_chunk); }
    std::int64_t tasks_of(const Sequence& m) const { return ceil_div(panels_of(m), panels_per_task); }
    /// The panels of task `index` of a kv head of this sequence.
    Range panels_of_task(const Sequence& m, std::int64_t index) const {
        return {index * panels_per_task, std::min(panels_of(m), (index + 1) * panels_per_task)};
    }
    /// The index of a chunk's result in [kv_heads, panels_per_kv_head, chunks].
    std::int64_t partial(std::int64_t kv_head, std::int64_t panel, std::int64_t chunk) const {
        return (kv_head * panels_per_kv_head + panel) * chunks + chunk;
    }
};

/// Panel `index` of kv head `kv_head` (of all sequences), resolved to a panel of a query head.
struct AssignedPanel {
    Sequence sequence;
    std::int64_t query_head;
    std::int64_t index;  ///< panel of the query head

    AssignedPanel(const ForwardCall& call, const Geometry& g, std::int64_t kv_head, std::int64_t of_kv_head)
        : sequence(sequence_of(call, kv_head / call.plan.problem.heads_kv)) {
        const std::int64_t panels = std::max<std::int64_t>(1, g.panels_of(sequence));  // panels of a query head
        query_head = kv_head % call.plan.problem.heads_kv * call.plan.problem.group() + of_kv_head / panels;
        index = of_kv_head % panels;
    }
};

/// Runs tasks that own their panels from the first key to the last: run(kv_head, panels, worker). ends:
/// take_task_ends()
template <class Run>
void run_unsplit(const ForwardCall& call, const WorkSplit& work_split, std::int64_t* ends, const Run& run) {
    const Problem& p = call.plan.problem;
    const HeadTasks tasks(call, p.heads_kv, ends, [&](const Sequence& m) { return work_split.tasks_of(m); });
    call.parallel_for(tasks.total(), work_split.threads, [&](std::int64_t index, int worker) {
        // Under a causal mask the last panels of all heads see the most keys. They go first, so that the loop ends with
        // short tasks. Otherwise consecutive tasks share K and V.
        HeadTask task = p.mask.trivial() ? tasks.by_head(index) : tasks.by_index(index);
        if (!p.mask.trivial()) task.index = task.tasks - 1 - task.index;
        run(task.head, work_split.panels_of_task(sequence_of(call, task.head / p.heads_kv), task.index), worker);
    });
}

/// Splits the keys, for few panels and many keys. Calls run(kv_head, panels, chunk, worker) for each chunk of keys;
/// when all are done, calls merge(kv_head, part, worker) for the parts_of(sequence) of every kv head.
template <class PartsOf, class Run, class Merge>
void run_split_keys(const ForwardCall& call, const WorkSplit& work_split, std::int64_t* ends, const PartsOf& parts_of,
                    const Run& run, const Merge& merge) {
    const std::int64_t heads_kv = call.plan.problem.heads_kv;
    const HeadTasks chunks(call, heads_kv, ends,
                           [&](const Sequence& m) { return work_split.tasks_of(m) * work_split.chunks_of(m); });
    call.parallel_for(chunks.total(), work_split.threads, [&](std::int64_t index, int worker) {
        const HeadTask task = chunks.by_head(index);
        const Sequence sequence = sequence_of(call, task.head / heads_kv);
        const std::int64_t of_panels = work_split.chunks_of(sequence);
        run(task.head, work_split.panels_of_task(sequence, task.index / of_panels), task.index % of_panels, worker);
    });
    const HeadTasks parts(call, heads_kv, ends, parts_of);
    call.parallel_for(parts.total(), work_split.threads, [&](std::int64_t index, int worker) {
        const HeadTask part = parts.by_head(index);
        merge(part.head, part.index, worker);
    });
}

/// Merges the results of a panel's `chunks` in ascending order: partial(chunk) of those that are seen(chunk). The first
/// becomes the total, later ones are merged by merge(total, next, chunk). Returns the total; it is not started if no
/// chunk was seen.
template <class Sums, class Seen, class Partial, class Merge>
Sums merge_chunks(std::int64_t chunks, Sums total, const Seen& seen, const Partial& partial, const Merge& merge) {
    total.started = false;
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
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
