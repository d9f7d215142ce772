// SPDX-License-Identifier: Apache-2.0
//
// fa2 forward on the SIMD path for few queries per head: the loop order of forward.cc by the primitives of
// simd/few_queries.hpp, which read K and V at the speed of memory. The rows of a task are the queries of all its
// panels: query heads that share a kv head read its keys once.
#include "cpu/fa2/simd/decode.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/fa2/simd/decode_memory.hpp"

namespace tessera::cpu::fa2::simd_path {
namespace {

/// The rows of some panels of one kv head.
class DecodeTask {
 public:
    DecodeTask(const DecodeRun& run, std::int64_t kv_head, Range panels, int worker)
        : run_(run), g_(run.g), layout_(run.layout), scratch_(run.scratch(worker)) {
        works_.reserve(kMaxPanels);  // constants, so that memory does not depend on the task
        seen_.reserve(kMaxPanels * kFewQueries);
        for (std::int64_t index = panels.begin; index < panels.end; ++index) {
            const HeadPanel work = panel_of(run.call, g_, kv_head, index);
            if (work.panel.queries == 0) continue;
            keys_ = works_.empty() || keys_.empty() ? work.keys
                    : work.keys.empty()
                        ? keys_
                        : Range{std::min(keys_.begin, work.keys.begin), std::max(keys_.end, work.keys.end)};
            works_.push_back(work);
            rows_ += work.panel.queries;
        }
    }

    bool empty() const { return works_.empty(); }
    /// The keys that some row sees.
    const Range& keys() const { return keys_; }
    bool sees(std::int64_t chunk) const { return !common(chunk_range(chunk), keys_).empty(); }
    simd::PanelSums total() const { return sums_in(scratch_.total, layout_, g_); }
    simd::PanelSums of_chunk() const { return sums_in(scratch_.chunk, layout_, g_); }

    void count_skipped_tiles(TileTally& tally) const {
        for (const HeadPanel& work : works_) count_skipped(work, g_, tally);
    }

    void load_queries() const {
        std::int64_t row = 0;
        for (const HeadPanel& work : works_) {
            float* q = scratch_.q + row * g_.k_stride;
            simd::load_rows(work.head.q, work.panel.first, work.panel.queries, g_.head_dim, q, g_.k_stride);
            const HeadRows to{reinterpret_cast<char*>(q), DType::fp32, g_.k_stride, 1};
            simd::store_rows(q, g_.k_stride, work.panel.queries, g_.head_dim, work.head.query_scale, to, 0);
            row += work.panel.queries;
        }
    }

    /// Computes the sums of one chunk of keys alone.
    void run_chunk(std::int64_t chunk, simd::PanelSums& sums, TileTally& tally) {
        sums.started = false;
        const std::int64_t begin = chunk_range(chunk).begin;
        const Range all = common(chunk_range(chunk), keys_);
        const std::int64_t skipped = (all.begin - begin) / g_.block_kv * g_.block_kv;
        for (std::int64_t first = begin + skipped; first < all.end; first += g_.block_kv)
            run_tile({first, std::min(all.end, first + g_.block_kv)}, sums, tally);
    }

    /// Merges the sums of another chunk into `total`.
    void merge(simd::PanelSums& total, const simd::PanelSums& next) const {
        for (std::int64_t first = 0; first < rows_; first += simd::kLanes) {
            const std::int64_t o = first * layout_.o_stride;
            simd::merge_rows({total.state.m + first, total.state.l + first}, total.o + o,
                             {next.state.m + first, next.state.l + first}, next.o + o,
                             {0, std::min(simd::kLanes, rows_ - first)}, layout_.o_stride);
        }
    }

    /// Adds the sinks, divides O by l and writes O and LSE.
    void finish(simd::PanelSums& total) const {
        if (!total.started) {
            simd::clear_state(total.state, layout_.lanes);
            std::fill_n(total.o, rows_ * layout_.o_stride, 0.0F);
        }
        std::int64_t row = 0;
        for (const HeadPanel& work : works_) {
            const std::int64_t queries = work.panel.queries;
            simd::finish_softmax({total.state.m + row, total.state.l + row}, work.head.sinks, work.panel.first, queries,
                                 queries, scratch_.rescale + row);
            finish_panel(work, row, total);
            row += work.panel.queries;
        }
    }

 private:
    Range chunk_range(std::int64_t chunk) const { return keys_of_chunk(works_.front().head.sequence, chunk); }

    void run_tile(const Range& keys, simd::PanelSums& sums, TileTally& tally) {
        seen_.clear();
        Range needed{keys.end, keys.begin};  // by some row, from a whole vector on
        for (const HeadPanel& work : works_) {
            const KvTile kv{.first = keys.begin, .keys = common(keys, work.keys).end - keys.begin};
            if (!common(keys, work.keys).empty()) tally.ran(work.head.coverage(work.panel, kv), work.panel, kv);
            for (std::int64_t i = work.panel.first; i < work.panel.first + work.panel.queries; ++i) {
                Range seen = common(work.head.band.kv_range(i, i + 1), keys);
                if (seen.empty()) seen = {keys.begin, keys.begin};
                else needed = {std::min(needed.begin, seen.begin), std::max(needed.end, seen.end)};
                seen_.push_back({seen.begin - keys.begin, seen.end - keys.begin});
            }
        }
        if (needed.empty()) return;
        const Head& head = works_.front().head;
        simd::row_scores({.q = scratch_.q,
                          .q_stride = g_.k_stride,
                          .queries = rows_,
                          .k = simd::element_rows(head.k, keys.begin, keys.size(), g_.head_dim, false, scratch_.tiles.k,
                                                  g_.k_stride, scratch_.k_rows, head.sequence.len_kv),
                          .keys = keys.size(),
                          .dim = g_.head_dim,
                          .s = scratch_.s,
                          .s_stride = layout_.s_stride});
        if (!head.rule.trivial()) transform(keys);
        if (!sums.started) simd::clear_state(sums.state, layout_.lanes);
        simd::row_softmax(scratch_.s, rows_, layout_.s_stride, keys.size(), seen_.data(), sums.state, scratch_.rescale);
        if (head.dropout.active) drop(keys);
        simd::row_values({.p = scratch_.s,
                          .p_stride = layout_.s_stride,
                          .queries = rows_,
                          .seen = seen_.data(),
                          .v = simd::element_rows(head.v, keys.begin, keys.size(), g_.head_dim_v, true,
                                                  scratch_.tiles.v, g_.v_stride, scratch_.v_rows, head.sequence.len_kv),
                          .dim = g_.head_dim_v,
                          .o = sums.o,
                          .o_stride = layout_.o_stride,
                          .rescale = sums.started ? scratch_.rescale : nullptr});
        sums.started = true;
    }

    /// The rows of a panel as a matrix that load_transposed() and store_transposed() take.
    HeadRows matrix_of(float* rows, std::int64_t row) const {
        return {reinterpret_cast<char*>(rows + row * layout_.s_stride), DType::fp32, layout_.s_stride, 1};
    }
    /// Calls body(work, its first row, its position) for each panel.
    template <class Body>
    void for_each_panel(const Range& keys, const Body& body) const {
        std::int64_t row = 0;
        for (const HeadPanel& work : works_) {
            body(work, row, simd::TilePosition{work.head.band, work.panel.first, keys.begin});
            row += work.panel.queries;
        }
    }
    /// Copies a tile with queries in the lanes to the rows of a panel.
    void to_rows(const HeadPanel& work, const float* tile, std::int64_t keys, const HeadRows& rows) const {
        std::fill_n(scratch_.tiles.rescale, g_.lanes, 1.0F);
        simd::store_transposed(tile, work.panel.lanes, work.panel.queries, keys, scratch_.tiles.rescale, rows, 0);
    }

    /// Softcap, ALiBi and bias: their primitives take queries in the lanes.
    void transform(const Range& keys) const {
        for_each_panel(keys, [&](const HeadPanel& work, std::int64_t row, const simd::TilePosition& position) {
            const HeadRows rows = matrix_of(scratch_.s, row);
            float* tile = scratch_.tiles.s;
            simd::load_transposed(rows, 0, work.panel.queries, keys.size(), 1.0F, tile, work.panel.lanes);
            simd::transform_scores(work.head.rule, position, keys.size(), work.panel.queries, tile, work.panel.lanes,
                                   scratch_.tiles.bias_or_dropout, nullptr);
            to_rows(work, tile, keys.size(), rows);
        });
    }

    void drop(const Range& keys) const {
        for_each_panel(keys, [&](const HeadPanel& work, std::int64_t row, const simd::TilePosition& position) {
            simd::dropout_factors(work.head.dropout, position, keys.size(), scratch_.tiles.bias_or_dropout,
                                  work.panel.lanes);
            to_rows(work, scratch_.tiles.bias_or_dropout, keys.size(), matrix_of(scratch_.factors, row));
            for (std::int64_t i = row; i < row + work.panel.queries; ++i) {
                simd::multiply(scratch_.s + i * layout_.s_stride, scratch_.factors + i * layout_.s_stride, 1,
                               simd::padded(keys.size()));
            }
        });
    }

    void finish_panel(const HeadPanel& work, std::int64_t row, const simd::PanelSums& total) const {
        const std::int64_t queries = work.panel.queries;
        float* o = total.o + row * layout_.o_stride;
        for (std::int64_t i = 0; i < queries; ++i) {
            for (std::int64_t c = 0; c < g_.head_dim_v; ++c) o[i * layout_.o_stride + c] *= scratch_.rescale[row + i];
        }
        const simd::RowState state{total.state.m + row, total.state.l + row};
        if (total.started && !simd::all_finite(o, layout_.o_stride, queries, g_.head_dim_v))
            redo_overflowed(work, state, o);
        const HeadRows to =
            head_rows(run_.call.args.o, work.head.sequence, work.head.sequence.first_q, work.head.query_head);
        simd::store_rows(o, layout_.o_stride, queries, g_.head_dim_v, 1.0F, to, work.panel.first);
        simd::store_lse(state, queries, lse_rows(run_.call.args.lse, work.head.sequence, work.head.query_head),
                        work.panel.first);
    }

    /// recompute_overflow(), which takes queries in the lanes.
    void redo_overflowed(const HeadPanel& work, const simd::RowState& state, float* o) const {
        const std::int64_t queries = work.panel.queries;
        const std::int64_t lanes = work.panel.lanes;
        const simd::PanelSums& panel = scratch_.panel;
        simd::load_queries(work.head, g_, work.panel, scratch_.q_t);
        simd::clear_state(panel.state, lanes);
        std::copy_n(state.m, queries, panel.state.m);
        std::copy_n(state.l, queries, panel.state.l);
        const HeadRows rows{reinterpret_cast<char*>(o), DType::fp32, layout_.o_stride, 1};
        simd::load_transposed(rows, 0, queries, g_.head_dim_v, 1.0F, panel.o, lanes);
        simd::recompute_overflow(work.head, g_, work.panel, scratch_.q_t, scratch_.tiles, panel.state, panel.o,
                                 scratch_.spare_o);
        to_rows(work, panel.o, g_.head_dim_v, rows);
    }

    const DecodeRun& run_;
    const Geometry& g_;
    const RowsLayout& layout_;
    DecodeScratch scratch_;
    std::vector<HeadPanel> works_;
    std::int64_t rows_ = 0;
    Range keys_{};
    std::vector<Range> seen_;  // of each row, in the current tile
};

/// Runs a task that owns its panels from the first key to the last.
void run_task(const DecodeRun& run, std::int64_t kv_head, Range panels, int worker) {
    DecodeTask task(run, kv_head, panels, worker);
    if (task.empty()) return;
    TileTally tally(run.call);
    if (run.call.counters != nullptr) task.count_skipped_tiles(tally);
    task.load_queries();
    simd::PanelSums total = task.total();
    for (std::int64_t chunk = task.keys().begin / kChunk; chunk * kChunk < task.keys().end; ++chunk) {
        if (!total.started) {
            task.run_chunk(chunk, total, tally);
            continue;
        }
        simd::PanelSums next = task.of_chunk();
        task.run_chunk(chunk, next, tally);
        if (next.started) task.merge(total, next);
    }
    task.finish(total);
}

/// Runs one chunk of keys of a task. The result goes to `sums`.
void run_chunk(const DecodeRun& run, std::int64_t kv_head, Range panels, std::int64_t chunk, simd::PanelSums sums,
               int worker) {
    DecodeTask task(run, kv_head, panels, worker);
    if (task.empty()) return;
    TileTally tally(run.call);
    if (run.call.counters != nullptr && chunk == 0) task.count_skipped_tiles(tally);
    if (!task.sees(chunk)) return;
    task.load_queries();
    task.run_chunk(chunk, sums, tally);
}

/// Merges the chunks of a task; partial(chunk) is the result of one.
template <class Partial>
void merge_task(const DecodeRun& run, std::int64_t kv_head, Range panels, const Partial& partial, int worker) {
    DecodeTask task(run, kv_head, panels, worker);
    if (task.empty()) return;
    const Sequence sequence = sequence_of(run.call, kv_head / run.call.plan.problem.heads_kv);
    simd::PanelSums total = merge_chunks(
        run.work_split.chunks_of(sequence), task.total(), [&](std::int64_t chunk) { return task.sees(chunk); }, partial,
        [&](simd::PanelSums& into, const simd::PanelSums& next, std::int64_t) { task.merge(into, next); });
    task.finish(total);
}

void run_whole(const DecodeRun& run) {
    run_unsplit(run.call, run.work_split, run.ends,
                [&](std::int64_t kv_head, Range panels, int worker) { run_task(run, kv_head, panels, worker); });
}

void run_split(const DecodeRun& run) {
    const auto chunk_of = [&](std::int64_t kv_head, Range panels, std::int64_t chunk, int worker) {
        run_chunk(run, kv_head, panels, chunk, run.partial(kv_head, panels.begin, chunk), worker);
    };
    const auto merge = [&](std::int64_t kv_head, std::int64_t panel, int worker) {
        const auto partial = [&](std::int64_t chunk) { return run.partial(kv_head, panel, chunk); };
        merge_task(run, kv_head, {panel, panel + 1}, partial, worker);
    };
    run_split_keys(
        run.call, run.work_split, run.ends, [&](const Sequence& m) { return run.work_split.panels_of(m); }, chunk_of,
        merge);
}

void run_long(const DecodeRun& run) {
    run.long_sequences.choose(run.call, run.work_split);
    run_long_sequences(
        run.call, run.work_split, run.long_sequences, run.ends,
        [&](std::int64_t kv_head, Range panels, int worker) { run_task(run, kv_head, panels, worker); },
        [&](std::int64_t kv_head, Range panels, std::int64_t number, std::int64_t chunk, int worker) {
            run_chunk(run, kv_head, panels, chunk, run.partial(number, chunk), worker);
        },
        [&](std::int64_t kv_head, Range panels, std::int64_t number, int worker) {
            const auto partial = [&](std::int64_t chunk) { return run.partial(number, chunk); };
            merge_task(run, kv_head, panels, partial, worker);
        });
}

}  // namespace

bool decodes(const Plan& plan) { return plan.problem.len_q <= kFewQueries && plan.tile.block_kv <= simd::kMostRowKeys; }

std::size_t decode_workspace(const Plan& plan) {
    Arena arena;
    DecodeRun({.plan = plan}, arena);
    return arena.used();
}

void decode(const ForwardCall& call) {
    Arena arena(call.workspace);
    const DecodeRun run(call, arena);
    if (run.work_split.split) run_split(run);
    else if (run.long_sequences.most > 0) run_long(run);
    else run_whole(run);
}

}  // namespace tessera::cpu::fa2::simd_path
