// SPDX-License-Identifier: Apache-2.0
#include "cpu/steps/simd/gradient.hpp"

#include <cmath>
#include <limits>
#include <utility>

#include "core/numeric.hpp"
#include "cpu/steps/sinks.hpp"

namespace tessera::cpu::simd {
namespace {

constexpr std::int64_t kRowsPerTask = 256;  // rows of dK and dV per clearing or storing task

/// Room for the key tiles of all sequences; for ragged ones an upper bound. The tiles of a ragged sequence begin at
/// index first row / block_kv + its number, as in first_panel().
std::int64_t total_key_tiles(const Problem& p, const Geometry& g) {
    return p.ragged ? p.total_kv / g.block_kv + p.batch : p.batch * ceil_div(p.len_kv, g.block_kv);
}
std::int64_t first_key_tile(const Problem& p, const Geometry& g, const Sequence& m) {
    return p.ragged ? m.first_kv / g.block_kv + m.batch : m.batch * ceil_div(p.len_kv, g.block_kv);
}

/// The dot product in double; four sums hide the latency. n: a multiple of 16
double dot(const float* a, const float* b, std::int64_t n) {
    double sums[4] = {};
    for (std::int64_t c = 0; c < n; c += 4) {
        for (int i = 0; i < 4; ++i) sums[i] += static_cast<double>(a[c + i]) * b[c + i];
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/// The factor of P of row r.
float norm_of(const GradientPanel& from, const Panel& panel, std::int64_t r) {
    return from.norm[panel.lanes] == 0 ? 1.0F : from.norm[r];
}

}  // namespace

void load_lse_and_delta(const BackwardArgs& args, const Head& head, const Geometry& g, const Panel& panel,
                        const float* d_o, float* o, float* to_lse, float* delta) {
    const Sequence& sequence = head.sequence;
    const bool exact_o = head.q.dtype == DType::fp32;
    if (exact_o) {
        load_rows(head_rows(args.o, sequence, sequence.first_q, head.query_head), panel.first, panel.queries,
                  g.head_dim_v, o, g.v_stride);
    }
    const HeadRows lse = lse_rows(args.lse, sequence, head.query_head);
    const HeadRows dlse = lse_rows(args.dlse, sequence, head.query_head);
    for (std::int64_t r = 0; r < panel.queries; ++r) {
        const auto value = static_cast<float>(load_as_double(lse.at(panel.first + r, 0), lse.dtype));
        // exp(s - +inf) = 0: an empty row, whose LSE is -inf, gets no weights.
        const bool empty = value == -std::numeric_limits<float>::infinity();
        to_lse[r] = empty ? std::numeric_limits<float>::infinity() : value;
        const bool takes_dlse = dlse.data != nullptr && !empty;  // 0 weights times a NaN would not be 0
        const double dlse_r = takes_dlse ? load_as_double(dlse.at(panel.first + r, 0), dlse.dtype) : 0;
        const double d_o_o = exact_o ? dot(d_o + r * g.v_stride, o + r * g.v_stride, g.v_stride) : 0;
        delta[r] = static_cast<float>(d_o_o - dlse_r);
    }
}

GradientMemory::GradientMemory(Arena& arena, const Plan& plan, const Geometry& g)
    : problem_(plan.problem),
      g_(g),
      queries_in_parts_(ceil_div(problem_.len_kv, g.block_kv) > kSumTiles),
      keys_in_parts_(problem_.group() * g.panels > kSumTiles) {
    panel_floats_ = (2 * g.head_dim + g.head_dim_v + 4) * g.lanes + g.block_q * (g.k_stride + g.v_stride);
    if (queries_in_parts_) panel_floats_ += 2 * g.head_dim * g.lanes;  // dq_total, in fp64
    panel_floats_ = padded(panel_floats_);
    ends_ = take_task_ends(arena, problem_);
    panels_ = arena.take<float>(problem_.heads_q, total_panels(problem_, g), panel_floats_);
    dk_ = arena.take<float>(problem_.heads_kv, problem_.rows_kv(), g.k_stride);
    dv_ = arena.take<float>(problem_.heads_kv, problem_.rows_kv(), g.v_stride);
    if (queries_in_parts_) panel_tiles_ = arena.take<std::int32_t>(problem_.heads_q, total_panels(problem_, g));
    if (keys_in_parts_) {
        key_tiles_ = arena.take<std::int32_t>(problem_.heads_kv, total_key_tiles(problem_, g));
        dk_total_ = arena.take<double>(problem_.heads_kv, problem_.rows_kv(), g.k_stride);
        dv_total_ = arena.take<double>(problem_.heads_kv, problem_.rows_kv(), g.v_stride);
    }
    for (int worker = 0; worker < plan.threads; ++worker) o_.push_back(arena.take<float>(g.block_q * g.v_stride));
}

GradientPanel GradientMemory::panel(const Head& head, std::int64_t index) const {
    float* at = panels_ + panel_slot(problem_, g_, head, index) * panel_floats_;
    const auto take = [&](std::int64_t floats) { return std::exchange(at, at + floats); };
    // Braced initializers evaluate from left to right, which fixes the layout.
    return {.q_t = take(g_.head_dim * g_.lanes),
            .q = take(g_.block_q * g_.k_stride),
            .do_t = take(g_.head_dim_v * g_.lanes),
            .d_o = take(g_.block_q * g_.v_stride),
            .lse = take(g_.lanes),
            .delta = take(g_.lanes),
            .norm = take(2 * g_.lanes),
            .dq_t = take(g_.head_dim * g_.lanes),
            .dq_total = queries_in_parts_ ? reinterpret_cast<double*>(at) : nullptr};
}

std::int64_t GradientMemory::key_row(const Sequence& sequence, std::int64_t kv_head, std::int64_t first) const {
    return kv_head * problem_.rows_kv() + first_kv_row(problem_, sequence) + first;
}

float* GradientMemory::dk(const Sequence& sequence, std::int64_t kv_head, std::int64_t first) const {
    return dk_ + key_row(sequence, kv_head, first) * g_.k_stride;
}

float* GradientMemory::dv(const Sequence& sequence, std::int64_t kv_head, std::int64_t first) const {
    return dv_ + key_row(sequence, kv_head, first) * g_.v_stride;
}

void GradientMemory::added_to_keys(const Head& head, const Range& keys) const {
    if (!keys_in_parts_) return;
    const std::int64_t tile = head.kv_head * total_key_tiles(problem_, g_) +
                              first_key_tile(problem_, g_, head.sequence) + keys.begin / g_.block_kv;
    if (++key_tiles_[tile] < kSumTiles) return;
    key_tiles_[tile] = 0;
    const std::int64_t row = key_row(head.sequence, head.kv_head, keys.begin);
    move_to_total(dk_ + row * g_.k_stride, dk_total_ + row * g_.k_stride, keys.size(), g_.k_stride);
    move_to_total(dv_ + row * g_.v_stride, dv_total_ + row * g_.v_stride, keys.size(), g_.v_stride);
}

void GradientMemory::added_to_queries(const Head& head, std::int64_t index) const {
    if (!queries_in_parts_) return;
    std::int32_t& tiles = panel_tiles_[panel_slot(problem_, g_, head, index)];
    if (++tiles < kSumTiles) return;
    tiles = 0;
    const GradientPanel at = panel(head, index);
    const std::int64_t lanes = Panel(index, g_.block_q, head.sequence.len_q).lanes;
    move_to_total(at.dq_t, at.dq_total, g_.head_dim, lanes);
}

void GradientMemory::prepare_panel(const BackwardArgs& args, const Head& head, std::int64_t index, float* o) const {
    const Sequence& sequence = head.sequence;
    const Panel panel(index, g_.block_q, sequence.len_q);
    const GradientPanel to = this->panel(head, index);
    const HeadRows d_o = head_rows(args.d_o, sequence, sequence.first_q, head.query_head);
    load_queries(head, g_, panel, to.q_t);
    load_rows(head.q, panel.first, panel.queries, g_.head_dim, to.q, g_.k_stride);
    load_transposed(d_o, panel.first, panel.queries, g_.head_dim_v, 1.0F, to.do_t, panel.lanes);
    load_rows(d_o, panel.first, panel.queries, g_.head_dim_v, to.d_o, g_.v_stride);
    std::fill_n(to.dq_t, g_.head_dim * panel.lanes, 0.0F);
    if (queries_in_parts_) {
        std::fill_n(to.dq_total, g_.head_dim * panel.lanes, 0.0);
        panel_tiles_[panel_slot(problem_, g_, head, index)] = 0;
    }

    std::fill_n(to.lse, panel.lanes, std::numeric_limits<float>::infinity());
    std::fill_n(to.delta, panel.lanes, 0.0F);
    to.norm[panel.lanes] = 0.0F;
    load_lse_and_delta(args, head, g_, panel, to.d_o, o, to.lse, to.delta);
}

/// Clears dK and dV rows, which count over all kv heads.
void GradientMemory::clear_keys(std::int64_t first, std::int64_t count) const {
    std::fill_n(dk_ + first * g_.k_stride, count * g_.k_stride, 0.0F);
    std::fill_n(dv_ + first * g_.v_stride, count * g_.v_stride, 0.0F);
    if (!keys_in_parts_) return;
    std::fill_n(dk_total_ + first * g_.k_stride, count * g_.k_stride, 0.0);
    std::fill_n(dv_total_ + first * g_.v_stride, count * g_.v_stride, 0.0);
}

void GradientMemory::prepare(const BackwardCall& call) {
    const Problem& p = problem_;
    const HeadTasks tasks = panels(call);
    call.parallel_for(tasks.total(), worthwhile_threads(call.plan), [&](std::int64_t index, int worker) {
        const HeadTask task = tasks.by_head(index);
        const Head head = head_of(call, task.head);
        prepare_panel(call.args, head, task.index, o_[static_cast<std::size_t>(worker)]);
    });
    const std::int64_t rows = p.heads_kv * p.rows_kv();
    call.parallel_for(ceil_div(rows, kRowsPerTask), worthwhile_threads(call.plan), [&](std::int64_t task, int) {
        const std::int64_t first = task * kRowsPerTask;
        clear_keys(first, std::min(kRowsPerTask, rows - first));
    });
    if (keys_in_parts_) std::fill_n(key_tiles_, p.heads_kv * total_key_tiles(p, g_), 0);
}

void BackwardWorkspace::prepare(const BackwardCall& call) {
    const Problem& p = call.plan.problem;
    memory.prepare(call);
    const HeadTasks panels = memory.panels(call);
    call.parallel_for(panels.total(), worthwhile_threads(call.plan), [&](std::int64_t index, int worker) {
        const HeadTask task = panels.by_head(index);
        const Head head = head_of(call, task.head);
        memory.fill_norm(head, task.index, workers[static_cast<std::size_t>(worker)]);
        if (p.dtype != DType::fp32) memory.sum_delta(head, task.index, workers[static_cast<std::size_t>(worker)]);
    });
}

void GradientMemory::fill_norm(const Head& head, std::int64_t index, const GradientScratch& scratch) const {
    const Panel panel(index, g_.block_q, head.sequence.len_q);
    const GradientPanel to = this->panel(head, index);
    const auto inexact = [&](std::int64_t r) { return inexact_lse(to.lse[r]); };
    bool any = false;
    for (std::int64_t r = 0; r < panel.queries; ++r) any = any || inexact(r);
    if (!any) return;
    double* weights = scratch.sums;
    double* squares = scratch.sums + panel.lanes;  // add_weighted_sums() makes a sum of products too
    std::fill_n(scratch.sums, 2 * panel.lanes, 0.0);
    for (std::int64_t r = 0; r < panel.queries; ++r) weights[r] = sink_weight(head, panel.first + r, to.lse[r]);
    for_each_kv_tile(head, g_, panel, scratch, [&](const KvTile& kv, Coverage coverage) {
        scores(head, g_, panel, kv, coverage, to.q_t, scratch.s, scratch.bias_or_dropout);
        weights_from_lse(scratch.s, to.lse, kv.keys, panel.lanes, panel.lanes);
        add_weighted_sums(scratch.s, scratch.s, kv.keys, panel.lanes, panel.lanes, weights, squares);
    });
    for (std::int64_t r = 0; r < panel.lanes; ++r)
        to.norm[r] = r < panel.queries && inexact(r) ? static_cast<float>(1 / weights[r]) : 1.0F;
    to.norm[panel.lanes] = 1.0F;
}

void GradientMemory::sum_delta(const Head& head, std::int64_t index, const GradientScratch& scratch) const {
    const Panel panel(index, g_.block_q, head.sequence.len_q);
    const GradientPanel to = this->panel(head, index);
    double* weights = scratch.sums;
    double* products = scratch.sums + panel.lanes;
    std::fill_n(scratch.sums, 2 * panel.lanes, 0.0);
    for (std::int64_t r = 0; r < panel.queries; ++r)
        weights[r] = sink_weight(head, panel.first + r, to.lse[r]) * static_cast<double>(norm_of(to, panel, r));
    for_each_kv_tile(head, g_, panel, scratch, [&](const KvTile& kv, Coverage coverage) {
        weights_and_dp(head, g_, panel, kv, coverage, to, scratch);
        if (coverage == Coverage::partial) {
            fill_masked(head.position(panel, kv), kv.keys, scratch.s, panel.lanes, 0.0F);
            fill_masked(head.position(panel, kv), kv.keys, scratch.ds, panel.lanes, 0.0F);
        }
        add_weighted_sums(scratch.s, scratch.ds, kv.keys, panel.lanes, panel.lanes, weights, products);
    });
    // Divides by the sum of P, which is 1 up to the rounding of the LSE. That rounding must not enter, multiplied by
    // delta.
    for (std::int64_t r = 0; r < panel.queries; ++r) {
        to.delta[r] = static_cast<float>(to.delta[r] + products[r] / (weights[r] == 0 ? 1 : weights[r]));
    }
}

void GradientMemory::store_sinks(const BackwardCall& call) const {
    store_sink_gradients(call, [&](const Head& head, std::int64_t i) {
        const GradientPanel from = panel(head, i / g_.block_q);
        const std::int64_t r = i % g_.block_q;
        return SinkRow{from.lse[r], norm_of(from, Panel(i / g_.block_q, g_.block_q, head.sequence.len_q), r),
                       from.delta[r]};
    });
}

void GradientMemory::finish(const BackwardCall& call) const {
    const Problem& p = problem_;
    store_sinks(call);  // first: delta is no longer read after it
    const auto scale = static_cast<float>(p.effective_scale());
    const HeadTasks tasks = panels(call);
    const std::int64_t stored = call.args.dq.given() ? tasks.total() : 0;
    call.parallel_for(stored, worthwhile_threads(call.plan), [&](std::int64_t index, int) {
        const HeadTask task = tasks.by_head(index);
        const Head head = head_of(call, task.head);
        const Panel panel(task.index, g_.block_q, head.sequence.len_q);
        const GradientPanel from = this->panel(head, task.index);
        if (queries_in_parts_) add_total(from.dq_t, from.dq_total, g_.head_dim, panel.lanes);
        std::fill_n(from.delta, panel.lanes, scale);  // delta is no longer read and becomes the scale
        store_transposed(from.dq_t, panel.lanes, panel.queries, g_.head_dim, from.delta,
                         head_rows(call.args.dq, head.sequence, head.sequence.first_q, head.query_head), panel.first);
    });
    const HeadTasks parts(call, p.heads_kv, ends_, [](const Sequence& m) { return ceil_div(m.len_kv, kRowsPerTask); });
    call.parallel_for(parts.total(), worthwhile_threads(call.plan), [&](std::int64_t index, int) {
        const HeadTask task = parts.by_head(index);
        const Sequence sequence = sequence_of(call, task.head / p.heads_kv);
        const std::int64_t kv_head = task.head % p.heads_kv;
        const std::int64_t first = task.index * kRowsPerTask;
        const std::int64_t rows = std::min(kRowsPerTask, sequence.len_kv - first);
        const std::int64_t row = key_row(sequence, kv_head, first);
        if (keys_in_parts_) {
            add_total(dk_ + row * g_.k_stride, dk_total_ + row * g_.k_stride, rows, g_.k_stride);
            add_total(dv_ + row * g_.v_stride, dv_total_ + row * g_.v_stride, rows, g_.v_stride);
        }
        if (call.args.dk.given()) {
            store_rows(dk(sequence, kv_head, first), g_.k_stride, rows, g_.head_dim, scale,
                       head_rows(call.args.dk, sequence, sequence.first_kv, kv_head), first);
        }
        if (call.args.dv.given()) {
            store_rows(dv(sequence, kv_head, first), g_.v_stride, rows, g_.head_dim_v, 1.0F,
                       head_rows(call.args.dv, sequence, sequence.first_kv, kv_head), first);
        }
    });
}

}  // namespace tessera::cpu::simd
