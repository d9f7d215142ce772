// SPDX-License-Identifier: Apache-2.0
//
// fa2 forward on AVX512-BF16 for few queries per head, by the primitives of matrix/few_queries.hpp, which read K and V
// at the speed of memory. The rows of a task are the queries of all its panels: query heads that share a kv head read
// its keys once. The counterpart on the SIMD path is ../simd/decode.cc.
#include "cpu/fa2/matrix/few_queries.hpp"

#include <cmath>
#include <span>
#include <vector>

#include "cpu/fa2/matrix/decode_task.hpp"

namespace tessera::cpu::fa2::matrix_path {
namespace {

/// The rows of some panels of one kv head.
class RowsTask {
 public:
    RowsTask(const ForwardRun& run, std::int64_t kv_head, Range panels, int worker)
        : run_(run), g_(run.g), scratch_(run.few_queries_scratch(worker)) {
        panels_.reserve(kMaxPanels);  // constants, so that memory does not depend on the task
        index_.reserve(kMaxPanels);
        seen_.reserve(kMaxPanels);
        offsets_.reserve(kMaxPanels * matrix::kMostRows);
        o_.reserve(kMaxPanels * matrix::kMostRows);
        for (std::int64_t index = panels.begin; index < panels.end; ++index) {
            DecodeTask panel(run, kv_head, index, worker);
            if (panel.work().panel.queries == 0) continue;
            panels_.push_back(panel);
            index_.push_back(index);
        }
    }

    std::size_t panels() const { return panels_.size(); }
    bool empty() const { return panels_.empty(); }
    std::int64_t index(std::size_t i) const { return index_[i]; }
    const Sequence& sequence() const { return panels_.front().work().head.sequence; }
    std::vector<simd::PanelSums> totals() const { return views(scratch_.totals); }
    std::vector<simd::PanelSums> of_block() const { return views(scratch_.blocks); }

    void load_queries() {
        offsets_.clear();
        for (DecodeTask& panel : panels_) {
            panel.pack_queries();
            const matrix::TilePanel& work = panel.work();
            for (std::int64_t i = 0; i < work.panel.queries; ++i) {
                Bf16* q = scratch_.q + rows() * depth();
                const HeadRows& from = work.head.q;
                const auto* at = static_cast<const Bf16*>(from.at(work.panel.first + i, 0));
                for (std::int64_t c = 0; c < depth(); ++c) q[c] = c < g_.head_dim ? at[c * from.column_stride] : Bf16{};
                offsets_.push_back(panel.offsets()[i]);
            }
        }
    }

    /// Computes the result of one block of keys alone, for each panel that sees some of them.
    void run_block(std::int64_t block, std::span<simd::PanelSums> sums) {
        Range keys{};
        seen_.clear();
        {
            TileTally tally(run_.call.counters);
            for (const DecodeTask& panel : panels_) {
                const Range seen = keys_seen(run_, panel.work(), block, &tally).keys;
                if (keys.empty()) keys = seen;
                else if (!seen.empty()) keys = {std::min(keys.begin, seen.begin), std::max(keys.end, seen.end)};
                seen_.push_back(seen);
            }
        }
        for (std::size_t i = 0; i < panels(); ++i) sums[i].started = !seen_[i].empty();
        if (keys.empty()) return;
        const Head& head = panels_.front().work().head;
        if (head.k.column_stride == 1 && head.v.column_stride == 1) {
            compute_weights(keys, sums);
            if (add_values(keys)) return;
        }
        // Before the GEMM, non-finite values are replaced by 0, and elements with a stride over 1 are packed.
        for (std::size_t i = 0; i < panels(); ++i) {
            panels_[i].pack_queries();
            panels_[i].run_block(block, sums[i], true);
        }
    }

    /// Merges the results of another block into the totals. The first block of a panel becomes its total.
    void merge(std::size_t i, simd::PanelSums& total, const simd::PanelSums& next) const {
        if (next.started) panels_[i].merge(total, next, queries_of(i));
    }

    void finish(std::size_t i, simd::PanelSums& total) {
        if (total.started && finish_rows(panels_[i].work(), total)) return;
        if (total.started) {  // rows that hold no query have no numbers
            const std::int64_t queries = panels_[i].work().panel.queries;
            std::fill(total.o + queries * value_rows(g_), total.o + g_.lanes * value_rows(g_), 0.0F);
        }
        panels_[i].finish(total, queries_of(i));
    }

    /// Does panel i see keys of this block?
    bool sees(std::size_t i, std::int64_t block) const {
        return !keys_seen(run_, panels_[i].work(), block).keys.empty();
    }

 private:
    std::int64_t depth() const { return g_.depth_row(g_.depth_tiles); }
    std::int64_t rows() const { return static_cast<std::int64_t>(offsets_.size()); }
    Range queries_of(std::size_t i) const { return {0, panels_[i].work().panel.queries}; }
    std::vector<simd::PanelSums> views(const std::array<float*, kMaxPanels>& memory) const {
        std::vector<simd::PanelSums> sums;
        for (std::size_t i = 0; i < panels(); ++i) sums.emplace_back(memory[i], g_);
        return sums;
    }

    /// The addresses of these rows and of those that are prefetched with them; null for rows that are not in pages.
    const void* const* addresses(const HeadRows& x, const Range& keys, const void** to) const {
        if (!x.paged()) return nullptr;
        simd::row_addresses(x, keys.begin, keys.size() + simd::kRowsAhead, sequence().len_kv, to);
        return to;
    }

    /// Scores and weights of all rows, with m and l of this block. o_ becomes the rows of O.
    void compute_weights(const Range& keys, std::span<simd::PanelSums> sums) {
        const HeadRows& k = panels_.front().work().head.k;
        const void* const* rows_of_k = addresses(k, keys, scratch_.k_rows);
        for (std::int64_t row = 0; row < rows(); row += matrix::kMostRows) {
            run_.primitives.of_rows->row_scores({.q = scratch_.q + row * depth(),
                                                 .q_stride = depth(),
                                                 .queries = std::min(matrix::kMostRows, rows() - row),
                                                 .k = k,
                                                 .rows = rows_of_k,
                                                 .first = keys.begin,
                                                 .keys = keys.size(),
                                                 .dim = g_.head_dim,
                                                 .s = scratch_.s + row * g_.block_kv_rows(),
                                                 .s_stride = g_.block_kv_rows()});
        }
        o_.clear();
        for (std::size_t i = 0; i < panels(); ++i) {
            const matrix::TilePanel& work = panels_[i].work();
            simd::clear_state(sums[i].state, g_.lanes);
            for (std::int64_t query = 0; query < work.panel.queries; ++query) {
                const std::int64_t row = static_cast<std::int64_t>(o_.size()) * g_.block_kv_rows();
                const std::int64_t at = work.panel.first + query;
                const Range seen = common(work.head.band.kv_range(at, at + 1), keys);
                run_.primitives.of_rows->row_weights({.s = scratch_.s + row,
                                                      .keys = keys.size(),
                                                      .seen = {seen.begin - keys.begin, seen.end - keys.begin},
                                                      .scale = work.weight_scale(),
                                                      .offset = offsets_[o_.size()],
                                                      .m = sums[i].state.m + query,
                                                      .l = sums[i].state.l + query,
                                                      .p = scratch_.p + row});
                o_.push_back(sums[i].o + query * value_rows(g_));
            }
        }
    }

    bool add_values(const Range& keys) const {
        const HeadRows& v = panels_.front().work().head.v;
        const void* const* rows_of_v = addresses(v, keys, scratch_.v_rows);
        bool finite = true;
        for (std::int64_t row = 0; row < rows(); row += matrix::kMostRows) {
            finite = run_.primitives.of_rows->row_values({.p = scratch_.p + row * g_.block_kv_rows(),
                                                          .p_stride = g_.block_kv_rows(),
                                                          .queries = std::min(matrix::kMostRows, rows() - row),
                                                          .v = v,
                                                          .rows = rows_of_v,
                                                          .first = keys.begin,
                                                          .keys = keys.size(),
                                                          .dim = g_.head_dim_v,
                                                          .o = o_.data() + row,
                                                          .sum_at = sum_row(g_)}) &&
                     finite;
        }
        return finite;
    }

    /// epilogue() row by row, unless it has to recompute something. Returns whether O and LSE are written.
    bool finish_rows(const matrix::TilePanel& work, const simd::PanelSums& total) const {
        const std::int64_t queries = work.panel.queries;
        float m[matrix::kMostRows];  // with the sinks; `total` is left to panels_[i].finish()
        float l[matrix::kMostRows];
        float share[matrix::kMostRows];  // finish_softmax()
        std::copy_n(total.state.m, queries, m);
        std::copy_n(total.state.l, queries, l);
        const bool has_sinks = work.head.sinks.data != nullptr;
        if (has_sinks) simd::finish_softmax({m, l}, work.head.sinks, work.panel.first, queries, queries, share);
        const HeadRows to =
            head_rows(run_.call.args.o, work.head.sequence, work.head.sequence.first_q, work.head.query_head);
        for (std::int64_t i = 0; i < queries; ++i) {
            if (may_have_overflowed(work, total.state, i)) return false;
            const float* o = total.o + i * value_rows(g_);
            const float sum = std::isnan(total.state.l[i]) ? total.state.l[i] : o[sum_row(g_)];
            float factor = sum == 0 ? 0.0F : work.head.dropout.kept / sum;
            if (has_sinks) factor = factor * total.state.l[i] * share[i];  // as add_sinks() of task.cc does
            for (std::int64_t c = 0; c < g_.head_dim_v; ++c) scratch_.row[c] = o[c] * factor;
            if (!simd::all_finite(scratch_.row, g_.v_stride, 1, g_.head_dim_v)) return false;
            simd::store_rows(scratch_.row, g_.v_stride, 1, g_.head_dim_v, 1.0F, to, work.panel.first + i);
        }
        simd::store_lse({m, l}, queries, lse_rows(run_.call.args.lse, work.head.sequence, work.head.query_head),
                        work.panel.first);
        return true;
    }

    const ForwardRun& run_;
    const matrix::Layout& g_;
    FewQueriesScratch scratch_;
    std::vector<DecodeTask> panels_;   // they share a DecodeScratch
    std::vector<std::int64_t> index_;  // panel index within its kv head
    std::vector<Range> seen_;          // per panel: keys of the current block
    std::vector<float> offsets_;       // per row: rounding_offsets()
    std::vector<float*> o_;            // per row, of the current block
};

/// Runs a task that owns its panels from the first key to the last.
void run_task(const ForwardRun& run, std::int64_t kv_head, Range panels, int worker) {
    RowsTask task(run, kv_head, panels, worker);
    if (task.empty()) return;
    const matrix::Session session(run.primitives);
    task.load_queries();
    std::vector<simd::PanelSums> totals = task.totals();
    std::vector<simd::PanelSums> next = task.of_block();
    for (std::int64_t block = 0; block < run.work_split.chunks_of(task.sequence()); ++block) {
        task.run_block(block, next);
        for (std::size_t i = 0; i < task.panels(); ++i) task.merge(i, totals[i], next[i]);
    }
    for (std::size_t i = 0; i < task.panels(); ++i) task.finish(i, totals[i]);
}

/// Runs one block of keys of a task; partial(task, i) is the memory for the result of its panel i.
template <class Partial>
void run_block(const ForwardRun& run, std::int64_t kv_head, Range panels, std::int64_t block, const Partial& partial,
               int worker) {
    RowsTask task(run, kv_head, panels, worker);
    if (task.empty()) return;
    const matrix::Session session(run.primitives);
    task.load_queries();
    std::vector<simd::PanelSums> sums;
    for (std::size_t i = 0; i < task.panels(); ++i) sums.push_back(partial(task, i));
    task.run_block(block, sums);
}

/// Merges the blocks of the panels of a task; partial(i, block) is the result of panel i.
template <class Partial>
void merge_blocks(const ForwardRun& run, std::int64_t kv_head, Range panels, const Partial& partial, int worker) {
    RowsTask task(run, kv_head, panels, worker);
    if (task.empty()) return;
    const matrix::Session session(run.primitives);
    for (std::size_t i = 0; i < task.panels(); ++i) {
        simd::PanelSums total = task.totals()[i];
        for (std::int64_t block = 0; block < run.work_split.chunks_of(task.sequence()); ++block) {
            simd::PanelSums next = partial(i, block);
            next.started = task.sees(i, block);
            task.merge(i, total, next);
        }
        task.finish(i, total);
    }
}

void run_whole(const ForwardRun& run) {
    run_unsplit(run.call, run.work_split, run.workspace.ends,
                [&](std::int64_t kv_head, Range panels, int worker) { run_task(run, kv_head, panels, worker); });
}

void run_split(const ForwardRun& run) {
    const auto block_of = [&](std::int64_t kv_head, Range panels, std::int64_t block, int worker) {
        const auto partial = [&](const RowsTask& task, std::size_t i) {
            return run.partial(kv_head, task.index(i), block);
        };
        run_block(run, kv_head, panels, block, partial, worker);
    };
    const auto merge = [&](std::int64_t kv_head, std::int64_t panel, int worker) {
        const auto partial = [&](std::size_t, std::int64_t block) { return run.partial(kv_head, panel, block); };
        merge_blocks(run, kv_head, {panel, panel + 1}, partial, worker);
    };
    run_split_keys(
        run.call, run.work_split, run.workspace.ends, [&](const Sequence& m) { return run.work_split.panels_of(m); },
        block_of, merge);
}

void run_long(const ForwardRun& run) {
    run.workspace.long_sequences.choose(run.call, run.work_split);
    run_long_sequences(
        run.call, run.work_split, run.workspace.long_sequences, run.workspace.ends,
        [&](std::int64_t kv_head, Range panels, int worker) { run_task(run, kv_head, panels, worker); },
        [&](std::int64_t kv_head, Range panels, std::int64_t number, std::int64_t block, int worker) {
            const auto partial = [&](const RowsTask&, std::size_t i) {
                return run.partial_of_task(number, static_cast<std::int64_t>(i), block);
            };
            run_block(run, kv_head, panels, block, partial, worker);
        },
        [&](std::int64_t kv_head, Range panels, std::int64_t number, int worker) {
            const auto partial = [&](std::size_t i, std::int64_t block) {
                return run.partial_of_task(number, static_cast<std::int64_t>(i), block);
            };
            merge_blocks(run, kv_head, panels, partial, worker);
        });
}

}  // namespace

void forward_few_queries(const ForwardRun& run) {
    if (run.work_split.split) run_split(run);
    else if (run.workspace.long_sequences.most > 0) run_long(run);
    else run_whole(run);
}

}  // namespace tessera::cpu::fa2::matrix_path
