// SPDX-License-Identifier: Apache-2.0
//
// fa2 forward on a matrix unit: the loop order of ../simd/forward.cc.
//
// A task packs a block of K and V^T for its panels of queries. A step computes one panel against one block of keys: S^T
// = K Q^T, P and its sums, O^T = V^T P. Its result is then merged into the panel's, blocks ascending. The steps
// of a task are pipelined: the vector unit takes the exponentials of step t while the matrix unit runs V^T P of step t
// - 1. The grouping of steps into tasks changes no bits.
#include "cpu/fa2/paths.hpp"

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "cpu/fa2/matrix/decode.hpp"
#include "cpu/fa2/matrix/few_queries.hpp"
#include "cpu/fa2/matrix/task.hpp"

namespace tessera::cpu::fa2::matrix_path {
namespace {

/// One panel against keys of one block.
struct Step : matrix::SeenKeys {
    std::size_t panel;
    std::int64_t block;
    std::size_t values = 0;  ///< index of its V among the two blocks in use
};

/// The panels of one task against some blocks of keys.
class PanelsTask {
 public:
    PanelsTask(const ForwardRun& run, std::int64_t kv_head, Range panels, int worker)
        : run_(run), g_(run.g), scratch_(run.scratch(worker)), stages_(scratch_.stages) {
        works_.reserve(kMaxPanels);  // a constant, so that memory does not depend on the task
        totals_.reserve(kMaxPanels);
        index_.reserve(kMaxPanels);
        steps_.reserve(kMaxPanels);
        q_finite_.reserve(kMaxPanels);
        for (std::int64_t index = panels.begin; index < panels.end; ++index) {
            const matrix::TilePanel work = run.panel(kv_head, index);
            if (work.panel.queries == 0) continue;
            totals_.emplace_back(scratch_.totals[works_.size()], g_);
            works_.push_back(work);
            index_.push_back(index);
        }
    }

    /// Makes the sums of panel `index` go to memory(index) instead of the worker's.
    template <class Memory>
    void into(const Memory& memory) {
        for (std::size_t i = 0; i < works_.size(); ++i) totals_[i] = memory(index_[i]);
    }

    /// Computes the results of the panels over blocks [begin, end) of keys, in totals().
    void run_blocks(Range blocks) {
        TileTally tally(run_.call.counters);
        matrix::Session session(run_.primitives);
        for (std::size_t i = 0; i < works_.size(); ++i) {
            const matrix::TilePanel& work = works_[i];
            const bool finite = run_.primitives.pack({work.head.q, work.panel.first, work.panel.queries, g_.head_dim,
                                                      matrix::Form::column_pairs, work.pairs(scratch_.queries[i]),
                                                      false, work.query_scale()});
            q_finite_.push_back(finite ? 1 : 0);
            if (g_.parts == 1) rounding_offsets(work, scratch_.queries[i], g_.depth_tiles, scratch_.offsets[i]);
        }
        std::fill_n(scratch_.ones, matrix::kTileElements, Bf16{});
        std::fill_n(scratch_.ones, matrix::kTileDepth, Bf16{0x3F80});
        for (std::int64_t block = blocks.begin; block < blocks.end; ++block) {
            add_steps(block, tally);
            for (const Step& step : steps_) run_step(step);
        }
        if (previous_) {
            const std::array products = value_products(*previous_, last_stage());
            for (std::size_t i = 0; i < product_count(); ++i) run_.primitives.multiply(products[i]);
            add_result(*previous_, last_stage());
        }
    }

    const matrix::TilePanel& work(std::size_t i) const { return works_[i]; }
    std::size_t panels() const { return works_.size(); }
    simd::PanelSums& total(std::size_t i) { return totals_[i]; }

    /// Writes O and LSE of panel i from its sums.
    void finish(std::size_t i, simd::PanelSums& sums) const { epilogue(run_, works_[i], scratch_.finish, sums); }

 private:
    /// The stages of the current and the previous step.
    Stage& this_stage() { return stages_[steps_run_ % 2]; }
    Stage& last_stage() { return stages_[(steps_run_ + 1) % 2]; }
    bool begins_block(const Step& step) const { return !previous_ || previous_->block != step.block; }

    void add_steps(std::int64_t block, TileTally& tally) {
        steps_.clear();
        for (std::size_t i = 0; i < works_.size(); ++i) {
            const matrix::SeenKeys seen = keys_seen(run_, works_[i], block, &tally);
            if (!seen.keys.empty()) steps_.push_back({seen, i, block});
        }
    }

    /// Computes the scores of a step, then its weights interleaved with the V GEMM of the previous step: the two use
    /// different data and different units. Interleaving scores with weights gains nothing, since the loads of one wait
    /// for the tile stores of the other.
    void run_step(const Step& step) {
        const matrix::TilePanel& work = works_[step.panel];
        const Stage& at = this_stage();
        if (begins_block(step)) pack_block(work.head, step.block);
        compute_scores(step);
        std::array<matrix::TileProduct, 2> products;
        if (previous_) products = value_products(*previous_, last_stage());
        run_.primitives.multiply_beside_weights(
            std::span(products.data(), previous_ ? product_count() : 0),
            weights_job(work, step, scratch_.s, scratch_.bias_or_dropout, scratch_.offsets[step.panel], at));
        if (previous_) add_result(*previous_, last_stage());
        previous_ = step;
        previous_->values = values_;
        ++steps_run_;
    }

    /// Packs a block for all panels of the task. The panels' keys determine the blocks: a window may skip some.
    void pack_block(const Head& head, std::int64_t block) {
        const Range all = run_.keys_of_block(head.sequence, block);
        k_packed_ = all;
        if (matrix::tiles_in_place(head.k, g_.head_dim)) {  // all but a last, partial tile are used in place
            k_packed_.begin += all.size() / matrix::kTileDepth * matrix::kTileDepth;
        }
        k_finite_ = run_.pack_k(head.k, k_packed_, matrix::key_rows(scratch_.k, g_, g_.depth_tiles, 0));
        values_ ^= 1;
        v_finite_[values_] = run_.pack_v(head.v, all, matrix::key_columns(scratch_.v[values_], g_, g_.dim_tiles_v, 0));
    }

    void compute_scores(const Step& step) {
        const matrix::TilePanel& work = works_[step.panel];
        float* maximum = this_stage().maximum;
        std::fill_n(maximum, work.panel.lanes, -std::numeric_limits<float>::infinity());
        const bool finite = k_finite_ && q_finite_[step.panel] != 0;
        const bool plain =
            finite && work.plain && step.rows() == step.keys.size() && matrix::all_visible(work, step.keys);
        // Otherwise some keys at a time, so that their scores are still in the L1 cache for the mask and the score
        // rule.
        const std::int64_t at_once = plain && !run_.work_split.from_memory ? step.rows() : kScoreRows;
        matrix::SeenKeys some;
        for (std::int64_t key = step.keys.begin; key < step.keys.end; key = some.keys.end) {
            some.keys = {key, std::min(step.keys.end, key + at_once)};
            if (key < k_packed_.begin) some.keys.end = std::min(some.keys.end, k_packed_.begin);
            float* s = scratch_.s + (key - step.keys.begin) * work.panel.lanes;
            matrix::TileProduct product = product_of_scores(step, some, s);
            if (plain) product.maximum = maximum;
            run_.primitives.multiply(product);
            if (!plain) transform_and_mask_some(run_, work, some, finite, s, scratch_.bias_or_dropout, maximum);
        }
    }

    /// The GEMM S = K Q^T of some keys, either all of them packed or none.
    matrix::TileProduct product_of_scores(const Step& step, const matrix::SeenKeys& some, float* s) const {
        const matrix::TilePanel& work = works_[step.panel];
        const HeadRows& k = work.head.k;
        const bool packed = some.keys.begin >= k_packed_.begin;
        const matrix::Tiles tiles =
            packed ? matrix::key_rows(scratch_.k, g_, g_.depth_tiles, some.keys.begin - k_packed_.begin)
                   : matrix::rows_in_place(k, some.keys.begin);
        matrix::TileProduct product =
            matrix::scores_product(work, some, tiles, scratch_.queries[step.panel], g_.depth_tiles, s);
        if (!packed) {
            product.a_stride = k.row_stride;
            if (run_.work_split.from_memory) matrix::fetch_rows(k, some.keys.begin, some.keys.end, g_.head_dim);
        }
        return product;
    }

    /// The destination of a step's O: the panel's total if it is the first, otherwise a buffer that is merged.
    float* result_of(const Step& step) {
        return totals_[step.panel].started ? scratch_.block_o : totals_[step.panel].o;
    }

    /// The GEMMs O^T = V^T P, and in bf16 the sum of the rounded P; dropout reduces that sum (add_result()).
    std::size_t product_count() const { return g_.parts == 1 ? 2 : 1; }
    std::array<matrix::TileProduct, 2> value_products(const Step& step, const Stage& at) {
        const matrix::TilePanel& work = works_[step.panel];
        const std::int64_t in_block = step.keys.begin - step.block * g_.block_kv;
        const matrix::TileProduct values{
            .parts = g_.parts,
            .m = g_.dim_tiles_v,
            .n = work.lane_tiles(),
            .k = step.rows() / matrix::kTileDepth,
            .a = matrix::key_columns(scratch_.v[step.values], g_, g_.dim_tiles_v, in_block),
            .b = work.pairs(at.p),
            .c = result_of(step),
            .c_stride = work.panel.lanes};
        matrix::TileProduct sums = values;
        sums.m = 1;
        sums.a = {scratch_.ones, 0, 0};
        sums.c += sum_row(g_) * work.panel.lanes;
        return {values, sums};
    }

    /// After the V GEMM: the step's result becomes the panel's total or is merged into it.
    void add_result(const Step& step, const Stage& at) {
        const matrix::TilePanel& work = works_[step.panel];
        const std::int64_t lanes = work.panel.lanes;
        simd::PanelSums& total = totals_[step.panel];
        float* o = result_of(step);
        if (g_.parts == 1 && work.head.dropout.active) std::copy_n(at.rounded_l, lanes, o + sum_row(g_) * lanes);
        if (!v_finite_[step.values])
            matrix::add_special_keys(work, step, work.head.v, g_.head_dim_v, at.p, {o, lanes, 1});
        if (total.started) {
            simd::merge(total.state, total.o, at.state, o, merged_rows(g_), lanes, lanes);
        } else {
            std::copy_n(at.state.m, lanes, total.state.m);
            std::copy_n(at.state.l, lanes, total.state.l);
            total.started = true;
        }
    }

    const ForwardRun& run_;
    const matrix::Layout& g_;
    PanelsScratch scratch_;
    std::array<Stage, 2> stages_;
    std::vector<matrix::TilePanel> works_;
    std::vector<std::int64_t> index_;  // panel index within its kv head
    std::vector<simd::PanelSums> totals_;
    std::vector<Step> steps_;  // the steps of the current block
    std::optional<Step> previous_;
    std::size_t steps_run_ = 0;
    std::vector<char> q_finite_;  // per panel
    Range k_packed_{};            // packed keys of the current block; earlier ones are used in place
    bool k_finite_ = true;        // are the packed keys finite?
    std::size_t values_ = 0;      // buffer of the current block's V; the previous step may still read the other
    bool v_finite_[2] = {true, true};
};

void run_whole(const ForwardRun& run) {
    run_unsplit(run.call, run.work_split, run.workspace.ends, [&](std::int64_t kv_head, Range panels, int worker) {
        PanelsTask task(run, kv_head, panels, worker);
        task.run_blocks({0, run.work_split.chunks_of(task.work(0).head.sequence)});
        for (std::size_t i = 0; i < task.panels(); ++i) task.finish(i, task.total(i));
    });
}

void run_split(const ForwardRun& run) {
    const auto run_block = [&](std::int64_t kv_head, Range panels, std::int64_t block, int worker) {
        PanelsTask task(run, kv_head, panels, worker);
        task.into([&](std::int64_t panel) { return run.partial(kv_head, panel, block); });
        task.run_blocks({block, block + 1});
    };
    const auto merge = [&](std::int64_t kv_head, std::int64_t panel, int worker) {
        PanelsTask task(run, kv_head, {panel, panel + 1}, worker);
        const matrix::TilePanel& work = task.work(0);
        simd::PanelSums total = merge_chunks(
            run.work_split.chunks_of(work.head.sequence), task.total(0),
            [&](std::int64_t block) { return !keys_seen(run, work, block).keys.empty(); },
            [&](std::int64_t block) { return run.partial(kv_head, panel, block); },
            [&](simd::PanelSums& into, const simd::PanelSums& next, std::int64_t) {
                simd::merge(into.state, into.o, next.state, next.o, merged_rows(run.g), work.panel.lanes,
                            work.panel.lanes);
            });
        task.finish(0, total);
    };
    run_split_keys(
        run.call, run.work_split, run.workspace.ends, [&](const Sequence& m) { return run.work_split.panels_of(m); },
        run_block, merge);
}

}  // namespace

bool takes_forward(const Plan& plan) { return matrix::takes(plan); }

std::size_t forward_workspace(const Plan& plan) {
    Arena arena;
    const matrix::Layout g(plan, plan.tile.block_q);
    ForwardWorkspace(arena, plan.problem, g, ForwardWorkSplit(plan, g));
    return arena.used();
}

void forward(const ForwardCall& call) {
    const ForwardRun run(call);
    if (few_queries(call.plan.problem, run.g)) return forward_few_queries(run);
    if (queries_as_rows(run.work_split, run.g)) return decode(run);
    if (run.work_split.split) run_split(run);
    else run_whole(run);
}

}  // namespace tessera::cpu::fa2::matrix_path
