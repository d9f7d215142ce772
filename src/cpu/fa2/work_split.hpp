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

/// Sequences of a call whose keys are split although the call has panels for all threads. The lengths of its sequences
/// differ, and a task of such a sequence would take longer than half of a thread's share of all chunks.
struct LongSequences {
    std::int64_t most;    ///< tasks that may be split; 0: none is, and the call may have no lengths of its own
    std::int64_t* first;  // [batch]: number of a sequence's first task among those that are split; -1: it is not
    std::int64_t* ends;   // take_task_ends()

    LongSequences(Arena& arena, const Problem& p, const WorkSplit& work_split, bool allowed = true)
        : most(allowed && own_lengths(p) && !work_split.split && work_split.threads > 1 && work_split.chunks > 1
                   ? std::min<std::int64_t>(
                         kSharesOfThread * work_split.threads,
                         work_split.kv_heads * ceil_div(work_split.panels_per_kv_head, work_split.panels_per_task))
                   : 0),
          first(arena.take<std::int64_t>(most > 0 ? p.batch : 0)),
          ends(most > 0 ? take_task_ends(arena, p) : nullptr) {}

    /// Finds the sequences of a call. Fewer than `most` tasks have more chunks than that share.
    void choose(const ForwardCall& call, const WorkSplit& work_split) const {
        const Problem& p = call.plan.problem;
        std::int64_t total = 0;
        for (std::int64_t b = 0; b < p.batch; ++b) {
            const Sequence m = sequence_of(call, b);
            total += p.heads_kv * work_split.tasks_of(m) * work_split.chunks_of(m);
        }
        const std::int64_t share = std::max<std::int64_t>(1, total / (kSharesOfThread * work_split.threads));
        std::int64_t next = 0;
        for (std::int64_t b = 0; b < p.batch; ++b) {
            const Sequence m = sequence_of(call, b);
            const bool is_long = work_split.tasks_of(m) > 0 && work_split.chunks_of(m) > share;
            first[b] = is_long ? next : -1;
            if (is_long) next += p.heads_kv * work_split.tasks_of(m);
        }
    }
    bool split(const Sequence& m) const { return first[m.batch] >= 0; }

 private:
    static constexpr std::int64_t kSharesOfThread = 2;
};

/// Runs the tasks of a call, some of which are split: those of the sequences that LongSequences::choose() found. First
/// chunk(kv_head, panels, number, chunk, worker) runs for each chunk of the split tasks, and whole(kv_head, panels,
/// worker) for the other tasks. Then merge(kv_head, panels, number, worker) runs for the split tasks, which `number`
/// counts.
template <class Whole, class Chunk, class Merge>
void run_long_sequences(const ForwardCall& call, const WorkSplit& work_split, const LongSequences& long_sequences,
                        std::int64_t* ends, const Whole& whole, const Chunk& chunk, const Merge& merge) {
    const std::int64_t heads_kv = call.plan.problem.heads_kv;
    const auto number_of = [&](const Sequence& m, std::int64_t kv_head, std::int64_t task) {
        return long_sequences.first[m.batch] + kv_head % heads_kv * work_split.tasks_of(m) + task;
    };
    const HeadTasks chunks(call, heads_kv, ends, [&](const Sequence& m) {
        return long_sequences.split(m) ? work_split.tasks_of(m) * work_split.chunks_of(m) : 0;
    });
    const HeadTasks others(call, heads_kv, long_sequences.ends,
                           [&](const Sequence& m) { return long_sequences.split(m) ? 0 : work_split.tasks_of(m); });
    call.parallel_for(chunks.total() + others.total(), work_split.threads, [&](std::int64_t index, int worker) {
        const bool is_chunk = index < chunks.total();
        const HeadTask task = is_chunk ? chunks.by_head(index) : others.by_head(index - chunks.total());
        const Sequence m = sequence_of(call, task.head / heads_kv);
        if (!is_chunk) return whole(task.head, work_split.panels_of_task(m, task.index), worker);
        const std::int64_t of_task = work_split.chunks_of(m);
        const std::int64_t at = task.index / of_task;
        chunk(task.head, work_split.panels_of_task(m, at), number_of(m, task.head, at), task.index % of_task, worker);
    });
    const HeadTasks split(call, heads_kv, ends,
                          [&](const Sequence& m) { return long_sequences.split(m) ? work_split.tasks_of(m) : 0; });
    call.parallel_for(split.total(), work_split.threads, [&](std::int64_t index, int worker) {
        const HeadTask task = split.by_head(index);
        const Sequence m = sequence_of(call, task.head / heads_kv);
        merge(task.head, work_split.panels_of_task(m, task.index), number_of(m, task.head, task.index), worker);
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
