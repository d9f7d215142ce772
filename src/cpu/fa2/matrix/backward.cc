// SPDX-License-Identifier: Apache-2.0
//
// fa2 backward on a matrix unit (FlashAttention-2 paper, Algorithm 2). The order of every sum is fixed, without
// atomics. dK and dV of a key sum over ascending queries for each query head and then over the heads. dQ of a query
// sums over ascending keys. Each sum advances in steps of 32 rows and in parts of matrix::sum_rows().
//
// With enough heads for all threads, each tile takes five GEMMs: key blocks outer, stripes of queries inner, whose next
// blocks are handed out as they become ready (stripes.hpp). With fewer heads, some tasks compute dK and dV of a few
// keys over all queries, the others dQ of a few queries over all keys. Scores and dP are then computed twice (seven
// GEMMs), but no task waits for another. The sums have the same order and the same bits (docs/decisions/bf16-tiles.md).
#include "cpu/fa2/paths.hpp"

#include "core/split.hpp"
#include "cpu/fa2/matrix/stripes.hpp"
#include "cpu/fa2/simd/few_gradients.hpp"
#include "cpu/steps/matrix/gradient_step.hpp"
#include "cpu/steps/simd/gradient.hpp"

namespace tessera::cpu::fa2::matrix_path {
namespace {

using matrix_split::kBlockKv, matrix_split::kBlockQ, matrix_split::kStripesPerThread;
static_assert(matrix::sum_rows(1) % kBlockKv == 0 && matrix::sum_rows(3) % kBlockKv == 0 && kBlockKv % kBlockQ == 0);
constexpr std::int64_t kQueryTasksPerWorker = 2;
constexpr double kMostSums = 1 << 28;  // bytes of dK and dV of query heads that share keys, if queries are not larger

/// The assignment of tiles to tasks.
struct BackwardPartition {
    int threads;           ///< threads that take part
    std::int64_t heads;    ///< query heads of all sequences; each has sums of dK and dV of its own
    std::int64_t stripes;  ///< stripes of a head: at most as many as key blocks, since no more could run at once
    bool striped;          ///< stripes of five GEMMs; otherwise separate tasks for dK, dV and for dQ

    explicit BackwardPartition(const Plan& plan)
        : threads(worthwhile_threads(plan)), heads(plan.problem.batch * plan.problem.heads_q) {
        const std::int64_t blocks = std::max<std::int64_t>(1, ceil_div(plan.problem.len_kv, kBlockKv));
        const std::int64_t tiles = std::max<std::int64_t>(1, ceil_div(plan.problem.len_q, kBlockQ));
        const std::int64_t wanted = ceil_div(kStripesPerThread * threads, std::max<std::int64_t>(1, heads));
        stripes = threads == 1 ? 1 : std::min({wanted, blocks, tiles});
        striped = (heads >= threads || heads * stripes >= kStripesPerThread * threads) && sums_fit(plan.problem);
    }

 private:
    /// Does the memory for sums of query heads that share keys fit? With few queries it may exceed all other memory.
    static bool sums_fit(const Problem& p) {
        const auto dims = static_cast<double>(p.head_dim + p.head_dim_v) * sizeof(float);
        const auto heads = static_cast<double>(p.batch) * static_cast<double>(p.heads_q);
        const double queries = heads * static_cast<double>(p.len_q) * dims;
        return p.heads_q == p.heads_kv || heads * static_cast<double>(p.len_kv) * dims <= std::max(kMostSums, queries);
    }
};

/// Memory of one worker.
struct BackwardScratch : matrix::GradientScratch {
    float* group_dk = nullptr;  // [kBlockKv, 16 * dim_tiles], sums over query heads that share a kv head
    float* group_dv = nullptr;  // [kBlockKv, 16 * dim_tiles_v]

    BackwardScratch(Arena& arena, const matrix::Layout& g, bool grouped, bool in_parts)
        : matrix::GradientScratch(arena, g, kBlockQ, kBlockKv) {
        if (in_parts) {
            dk_total = arena.take<double>(kBlockKv, g.dim_tiles * matrix::kTileRows);
            dv_total = arena.take<double>(kBlockKv, g.dim_tiles_v * matrix::kTileRows);
        }
        if (!grouped) return;
        group_dk = arena.take<float>(kBlockKv, g.dim_tiles * matrix::kTileRows);
        group_dv = arena.take<float>(kBlockKv, g.dim_tiles_v * matrix::kTileRows);
    }
};

/// Do several query heads share a kv head?
bool grouped(const Problem& p) { return p.heads_q != p.heads_kv; }

/// Are sums over queries cut into parts?
bool in_parts(const Problem& p) { return p.len_q > matrix::sum_rows(matrix::parts_of(p.dtype)); }

struct BackwardWorkspace {
    matrix::GradientMemory memory;
    WorkerMemory workers;
    float* dk = nullptr;         // [heads_q, padded keys, k_stride], used if sums outlast a task's block
    float* dv = nullptr;         // likewise, v_stride
    double* dk_total = nullptr;  // like dk and dv, for earlier parts, if in_parts()
    double* dv_total = nullptr;

    BackwardWorkspace(Arena& arena, const Plan& plan, const matrix::Layout& g, const BackwardPartition& part)
        : memory(arena, plan, g) {
        workers = WorkerMemory(arena, part.threads, [&](Arena& one) {
            BackwardScratch(one, g, grouped(plan.problem), in_parts(plan.problem));
        });
        if (!part.striped || (part.stripes == 1 && !grouped(plan.problem))) return;
        const std::int64_t rows = plan.problem.heads_q * matrix::padded_keys(plan.problem);
        dk = arena.take<float>(rows, g.dim_tiles * matrix::kTileRows);
        dv = arena.take<float>(rows, g.dim_tiles_v * matrix::kTileRows);
        if (!in_parts(plan.problem)) return;
        dk_total = arena.take<double>(rows, g.dim_tiles * matrix::kTileRows);
        dv_total = arena.take<double>(rows, g.dim_tiles_v * matrix::kTileRows);
    }
};

/// The tiles of one call.
class BackwardRun {
 public:
    explicit BackwardRun(const BackwardCall& call)
        : call_(call),
          p_(call.plan.problem),
          partition_(call.plan),
          threads_(partition_.threads),
          g_(call.plan, kBlockQ),
          workspace_(make(call, g_, partition_)) {}

    void all() const {
        if (workspace_.memory.prepare(call_)) fill_norms();
        if (g_.parts == 1) sum_deltas();
        workspace_.memory.store_sinks(call_);
        partition_.striped ? stripes() : separate_passes();
        if (partition_.striped && grouped(p_)) sum_groups();
        if (call_.counters != nullptr) count();
    }

 private:
    static BackwardWorkspace make(const BackwardCall& call, const matrix::Layout& g, const BackwardPartition& part) {
        Arena arena(call.workspace);
        return BackwardWorkspace(arena, call.plan, g, part);
    }
    BackwardScratch scratch(int worker) const {
        Arena memory = workspace_.workers.arena(worker);
        return {memory, g_, grouped(p_), in_parts(p_)};
    }
    matrix::TilePanel head(const Sequence& sequence, std::int64_t query_head) const {
        return {p_, call_.args, g_, sequence, query_head, 0};
    }

    /// Runs keys [begin, end), at most kBlockKv, against tiles [begin, end) of a head's queries; adds to dK and dV of
    /// `at`.
    void run_keys(const Sequence& sequence, std::int64_t query_head, const Range& keys, const Range& tiles,
                  const matrix::GradientScratch& at, bool with_queries) const {
        matrix::TilePanel work = head(sequence, query_head);
        for (std::int64_t q = tiles.begin * kBlockQ; q < std::min(sequence.len_q, tiles.end * kBlockQ); q += kBlockQ) {
            const Range seen = work.head.band.q_range(keys.begin, keys.end);
            if (matrix::begins_part(q, seen, g_.parts)) {
                simd::move_to_total(at.dk, at.dk_total, keys.size(), k_stride());
                simd::move_to_total(at.dv, at.dv_total, keys.size(), v_stride());
            }
            if (seen.begin >= q + kBlockQ || seen.end <= q) continue;
            matrix::backward_tile(workspace_.memory, at, work, {q, std::min(sequence.len_q, q + kBlockQ)}, keys,
                                  call_.args, {.keys = true, .queries = with_queries});
        }
    }

    template <class T>
    void clear_keys(const Range& keys, T* dk, T* dv) const {
        std::fill_n(dk, keys.size() * k_stride(), T{});
        std::fill_n(dv, keys.size() * v_stride(), T{});
    }
    void clear_keys(const Range& keys, const matrix::GradientScratch& at) const {
        clear_keys(keys, at.dk, at.dv);
        if (in_parts(p_)) clear_keys(keys, at.dk_total, at.dv_total);
    }
    /// Adds the earlier parts to the last one.
    void add_totals(const Range& keys, const matrix::GradientScratch& at) const {
        if (!in_parts(p_)) return;
        simd::add_total(at.dk, at.dk_total, keys.size(), k_stride());
        simd::add_total(at.dv, at.dv_total, keys.size(), v_stride());
    }

    /// Adds a query head's dK and dV to the sums of its group.
    void add_to_group(const matrix::GradientScratch& from, const Range& keys, const BackwardScratch& to) const {
        for (std::int64_t i = 0; i < keys.size() * k_stride(); ++i) to.group_dk[i] += from.dk[i];
        for (std::int64_t i = 0; i < keys.size() * v_stride(); ++i) to.group_dv[i] += from.dv[i];
    }

    void store_keys(const float* dk, const float* dv, const Sequence& sequence, std::int64_t kv_head,
                    const Range& keys) const {
        const auto scale = static_cast<float>(p_.effective_scale());
        const auto kept = static_cast<float>(1 / (1 - p_.dropout.probability));  // the packed weights lack this factor
        if (call_.args.dk.given()) {
            simd::store_rows(dk, k_stride(), keys.size(), g_.head_dim, scale,
                             head_rows(call_.args.dk, sequence, sequence.first_kv, kv_head), keys.begin);
        }
        if (call_.args.dv.given()) {
            simd::store_rows(dv, v_stride(), keys.size(), g_.head_dim_v, kept,
                             head_rows(call_.args.dv, sequence, sequence.first_kv, kv_head), keys.begin);
        }
    }

    /// Computes dQ of queries [begin, end), at most kBlockQ.
    void run_queries(const Sequence& sequence, std::int64_t query_head, const Range& queries, int worker) const {
        matrix::TilePanel work = head(sequence, query_head);
        const Range keys = work.head.band.kv_range(queries.begin, queries.end);
        const BackwardScratch at = scratch(worker);
        for (std::int64_t k = keys.begin / kBlockKv * kBlockKv; k < keys.end; k += kBlockKv) {
            matrix::backward_tile(workspace_.memory, at, work, queries, {k, std::min(sequence.len_kv, k + kBlockKv)},
                                  call_.args, {.keys = false, .queries = true});
        }
        store_queries(work.head, queries);
    }

    void store_queries(const Head& of, const Range& queries) const {
        for (std::int64_t q = queries.begin; q < queries.end; q += matrix::kTileDepth) {
            workspace_.memory.store_queries(call_.args, of, q);
        }
    }

    /// Fills the factors of rows with a too large LSE; the tiles need them.
    void fill_norms() const {
        call_.parallel_for(p_.batch * p_.heads_q, threads_, [&](std::int64_t task, int worker) {
            const matrix::Session session(*matrix::primitives_of_unit());
            matrix::TilePanel work = head(sequence_of(call_, task / p_.heads_q), task % p_.heads_q);
            for (std::int64_t q = 0; q < work.head.sequence.len_q; q += matrix::kTileDepth) {
                matrix::fill_norm(workspace_.memory, scratch(worker), work, call_.args, q);
            }
        });
    }

    /// Completes delta in 16 bits; the tiles need it.
    void sum_deltas() const {
        const std::int64_t rows = rows_per_task(p_.batch * p_.heads_q, p_.len_q, kBlockQ, kQueryTasksPerWorker);
        const HeadTasks parts = parts_of_queries(rows);
        // Under a causal mask the last queries have the most work, so they go first.
        call_.parallel_for(parts.total(), threads_, [&](std::int64_t index, int worker) {
            const matrix::Session session(*matrix::primitives_of_unit());
            const HeadTask task = parts.by_index(index);
            const Sequence sequence = sequence_of(call_, task.head / p_.heads_q);
            const std::int64_t first = (task.tasks - 1 - task.index) * rows;
            const Range queries{first, std::min(sequence.len_q, first + rows)};
            matrix::TilePanel work = head(sequence, task.head % p_.heads_q);
            matrix::sum_delta(workspace_.memory, scratch(worker), work, call_.args, queries);
        });
    }

    /// A scratch whose sums of the keys outlast the block, because another stripe continues them or each query head of
    /// a group has its own.
    matrix::GradientScratch sums_of(const Sequence& sequence, std::int64_t query_head, const Range& keys,
                                    int worker) const {
        matrix::GradientScratch at = scratch(worker);
        if (workspace_.dk == nullptr) return at;
        const std::int64_t row =
            query_head * matrix::padded_keys(p_) + matrix::first_padded_key(p_, sequence) + keys.begin;
        at.dk = workspace_.dk + row * k_stride();
        at.dv = workspace_.dv + row * v_stride();
        if (!in_parts(p_)) return at;
        at.dk_total = workspace_.dk_total + row * k_stride();
        at.dv_total = workspace_.dv_total + row * v_stride();
        return at;
    }

    void stripes() const {
        const auto blocks_of = [&](std::int64_t head) {
            return std::max<std::int64_t>(1, ceil_div(sequence_of(call_, head / p_.heads_q).len_kv, kBlockKv));
        };
        if (partition_.stripes == 1 && (threads_ == 1 || partition_.heads >= kStripesPerThread * threads_)) {
            call_.parallel_for(partition_.heads, threads_, [&](std::int64_t head, int worker) {
                const matrix::Session session(*matrix::primitives_of_unit());
                const std::int64_t blocks = blocks_of(head);
                for (std::int64_t j = 0; j < blocks; ++j) run_block({head, 0, j, j + 1 == blocks, true}, worker);
            });
            return;
        }
        Stripes stripes(partition_.heads, partition_.stripes);
        for (std::int64_t head = 0; head < partition_.heads; ++head) stripes.set_blocks(head, blocks_of(head));
        const std::int64_t workers = std::min<std::int64_t>(threads_, partition_.heads * partition_.stripes);
        call_.parallel_for(workers, threads_, [&](std::int64_t, int worker) {
            const matrix::Session session(*matrix::primitives_of_unit());
            stripes.work([&](const Stripes::Block& block) { run_block(block, worker); });
        });
    }

    void run_block(const Stripes::Block& block, int worker) const {
        const Sequence sequence = sequence_of(call_, block.head / p_.heads_q);
        const std::int64_t query_head = block.head % p_.heads_q;
        const Range keys{std::min(sequence.len_kv, block.block * kBlockKv),
                         std::min(sequence.len_kv, (block.block + 1) * kBlockKv)};
        const std::int64_t tiles = ceil_div(sequence.len_q, kBlockQ);
        const Range mine{tiles * block.stripe / partition_.stripes, tiles * (block.stripe + 1) / partition_.stripes};
        const matrix::GradientScratch at = sums_of(sequence, query_head, keys, worker);
        if (block.stripe == 0) clear_keys(keys, at);
        run_keys(sequence, query_head, keys, mine, at, true);
        if (block.last_of_block) add_totals(keys, at);
        if (block.last_of_block && !grouped(p_)) store_keys(at.dk, at.dv, sequence, query_head, keys);
        if (!block.last_of_stripe) return;
        const Head of(p_, call_.args, sequence, query_head);
        store_queries(of, {mine.begin * kBlockQ, std::min(sequence.len_q, mine.end * kBlockQ)});
    }

    /// Computes dK and dV of kv heads from those of their query heads.
    void sum_groups() const {
        const HeadTasks blocks = parts_of_keys(kBlockKv);
        call_.parallel_for(blocks.total(), threads_, [&](std::int64_t index, int worker) {
            const HeadTask task = blocks.by_head(index);
            const Sequence sequence = sequence_of(call_, task.head / p_.heads_kv);
            const std::int64_t kv_head = task.head % p_.heads_kv;
            const std::int64_t first = task.index * kBlockKv;
            const Range keys{first, std::min(sequence.len_kv, first + kBlockKv)};
            const BackwardScratch to = scratch(worker);
            clear_keys(keys, to.group_dk, to.group_dv);
            for (std::int64_t i = 0; i < p_.group(); ++i) {
                add_to_group(sums_of(sequence, kv_head * p_.group() + i, keys, worker), keys, to);
            }
            store_keys(to.group_dk, to.group_dv, sequence, kv_head, keys);
        });
    }

    /// Rows of a task: halved from `most` down until there are `tasks` tasks for every worker.
    std::int64_t rows_per_task(std::int64_t heads, std::int64_t len, std::int64_t most, std::int64_t tasks) const {
        while (most > matrix::kTileDepth && heads * ceil_div(len, most) < tasks * threads_) most /= 2;
        return most;
    }

    /// Tasks of `rows` rows of every query head, or of every kv head.
    HeadTasks parts_of_queries(std::int64_t rows) const {
        return {call_, p_.heads_q, workspace_.memory.task_ends(0),
                [&](const Sequence& m) { return ceil_div(m.len_q, rows); }};
    }
    HeadTasks parts_of_keys(std::int64_t rows) const {
        return {call_, p_.heads_kv, workspace_.memory.task_ends(1),
                [&](const Sequence& m) { return ceil_div(m.len_kv, rows); }};
    }

    /// Computes dK and dV of keys, at most kBlockKv, over all query heads of a kv head.
    void run_group(const Sequence& sequence, std::int64_t kv_head, const Range& keys, const BackwardScratch& at) const {
        const bool sums = grouped(p_);
        if (sums) clear_keys(keys, at.group_dk, at.group_dv);
        for (std::int64_t i = 0; i < p_.group(); ++i) {
            clear_keys(keys, at);
            run_keys(sequence, kv_head * p_.group() + i, keys, {0, ceil_div(sequence.len_q, kBlockQ)}, at, false);
            add_totals(keys, at);
            if (sums) add_to_group(at, keys, at);
        }
        store_keys(sums ? at.group_dk : at.dk, sums ? at.group_dv : at.dv, sequence, kv_head, keys);
    }

    void separate_passes() const {
        // The tasks of keys go first; those of queries then balance the load.
        const std::int64_t rows_kv = rows_per_task(p_.batch * p_.heads_kv, p_.len_kv, kBlockKv, 1);
        const std::int64_t rows_q = rows_per_task(p_.batch * p_.heads_q, p_.len_q, kBlockQ, kQueryTasksPerWorker);
        const HeadTasks of_keys = parts_of_keys(rows_kv);
        const HeadTasks of_queries = parts_of_queries(rows_q);
        // Under a causal mask the first keys and the last queries have the most work, so they go first.
        call_.parallel_for(of_keys.total() + of_queries.total(), threads_, [&](std::int64_t index, int worker) {
            const matrix::Session session(*matrix::primitives_of_unit());
            if (index < of_keys.total()) {
                const HeadTask task = of_keys.by_index(index);
                const Sequence sequence = sequence_of(call_, task.head / p_.heads_kv);
                const std::int64_t k = task.index * rows_kv;
                run_group(sequence, task.head % p_.heads_kv, {k, std::min(sequence.len_kv, k + rows_kv)},
                          scratch(worker));
            } else {
                const HeadTask task = of_queries.by_index(index - of_keys.total());
                const Sequence sequence = sequence_of(call_, task.head / p_.heads_q);
                const std::int64_t q = (task.tasks - 1 - task.index) * rows_q;
                run_queries(sequence, task.head % p_.heads_q, {q, std::min(sequence.len_q, q + rows_q)}, worker);
            }
        });
    }

    /// Counts tiles of the plan's size, whichever task ran them.
    void count() const {
        TileTally tally(call_.counters);
        for (std::int64_t head = 0; head < p_.batch * p_.heads_q; ++head) {
            const Head of(p_, call_.args, sequence_of(call_, head / p_.heads_q), head % p_.heads_q);
            for (std::int64_t q = 0; q < of.sequence.len_q; q += kBlockQ) {
                for (std::int64_t k = 0; k < of.sequence.len_kv; k += kBlockKv) {
                    const Coverage coverage = of.band.coverage(q, std::min(of.sequence.len_q, q + kBlockQ), k,
                                                               std::min(of.sequence.len_kv, k + kBlockKv));
                    const std::int64_t elements =
                        std::min(kBlockQ, of.sequence.len_q - q) * std::min(kBlockKv, of.sequence.len_kv - k);
                    if (coverage == Coverage::empty) tally.skipped(1, 0);
                    else tally.ran(coverage, elements);
                }
            }
        }
    }

    std::int64_t k_stride() const { return g_.dim_tiles * matrix::kTileRows; }
    std::int64_t v_stride() const { return g_.dim_tiles_v * matrix::kTileRows; }

    const BackwardCall& call_;
    const Problem& p_;
    BackwardPartition partition_;
    int threads_;
    matrix::Layout g_;
    BackwardWorkspace workspace_;
};

}  // namespace

bool takes_backward(const Plan& plan) {
    return matrix::takes(plan) && !plan.problem.bias_gradient && plan.tile.block_q == kBlockQ &&
           plan.tile.block_kv == kBlockKv && !simd_path::takes_only_few_gradients(plan);
}

std::size_t backward_workspace(const Plan& plan) {
    Arena arena;
    BackwardWorkspace(arena, plan, matrix::Layout(plan, kBlockQ), BackwardPartition(plan));
    return arena.used();
}

void backward(const BackwardCall& call) { BackwardRun(call).all(); }

}  // namespace tessera::cpu::fa2::matrix_path
