// SPDX-License-Identifier: Apache-2.0
#include "cpu/steps/matrix/gradient.hpp"

#include <atomic>
#include <cmath>
#include <limits>

#include "cpu/steps/call.hpp"
#include "cpu/steps/simd/gradient.hpp"
#include "cpu/steps/sinks.hpp"

namespace tessera::cpu::matrix {
namespace {

constexpr std::int64_t kMostRows = 128;  // rows of a packing task
constexpr std::int64_t kGroup = kTileDepth;

}  // namespace

GradientMemory::GradientMemory(Arena& arena, const Plan& plan, const Layout& g) : problem_(plan.problem), g_(g) {
    const std::int64_t all = problem_.batch * (problem_.heads_q * problem_.len_q + problem_.heads_kv * problem_.len_kv);
    rows_per_task_ = all >= kMostRows * plan.threads ? kMostRows : kGroup;
    for (std::int64_t*& ends : ends_) ends = take_task_ends(arena, problem_);
    const std::int64_t heads = problem_.heads_q;
    const std::int64_t queries = padded_queries(problem_);
    q_pairs_ = arena.take<Bf16>(heads, queries, g.depth_row(g.depth_tiles));
    q_rows_ = arena.take<Bf16>(heads, queries, g.dim_row(g.dim_tiles));
    do_pairs_ = arena.take<Bf16>(heads, queries, g.depth_row(g.depth_tiles_v));
    do_rows_ = arena.take<Bf16>(heads, queries, g.dim_row(g.dim_tiles_v));
    lse_ = arena.take<float>(heads, queries);
    delta_ = arena.take<float>(heads, queries);
    norm_ = arena.take<float>(heads, queries);
    dq_t_ = arena.take<float>(heads, queries, g.dim_tiles * kTileRows);
    if (problem_.len_kv > sum_rows(g.parts)) dq_total_ = arena.take<double>(heads, queries, g.dim_tiles * kTileRows);
    flags_q_ = arena.take<char>(3, heads, queries / kGroup);
    const std::int64_t keys = padded_keys(problem_);
    k_rows_ = arena.take<Bf16>(problem_.heads_kv, keys, g.depth_row(g.depth_tiles));
    k_columns_ = arena.take<Bf16>(problem_.heads_kv, keys, g.dim_row(g.dim_tiles));
    v_rows_ = arena.take<Bf16>(problem_.heads_kv, keys, g.depth_row(g.depth_tiles_v));
    flags_kv_ = arena.take<char>(2, problem_.heads_kv, keys / kGroup);
}

GradientMemory::Queries GradientMemory::queries(const Head& head, std::int64_t first) const {
    const std::int64_t all = padded_queries(problem_);
    const std::int64_t row = head.query_head * all + first_padded_query(problem_, head.sequence) + first;
    const auto lanes = [&](Bf16* data, std::int64_t depth_tiles) {  // [queries / 16][depth]
        return Tiles{data + row * g_.depth_row(depth_tiles), g_.tile_elements(), depth_tiles * g_.tile_elements()};
    };
    const auto rows = [&](Bf16* data, std::int64_t dim_tiles) {
        return Tiles{data + row * g_.dim_row(dim_tiles), dim_tiles * g_.tile_elements(), g_.tile_elements()};
    };
    char* flags = flags_q_ + row / kGroup;
    const std::int64_t plane = problem_.heads_q * all / kGroup;
    return {.q_pairs = lanes(q_pairs_, g_.depth_tiles),
            .q_rows = rows(q_rows_, g_.dim_tiles),
            .do_pairs = lanes(do_pairs_, g_.depth_tiles_v),
            .do_rows = rows(do_rows_, g_.dim_tiles_v),
            .lse = lse_ + row,
            .delta = delta_ + row,
            .norm = norm_ + row,
            .dq_t = dq_t_ + row * g_.dim_tiles * kTileRows,
            .dq_total = dq_total_ == nullptr ? nullptr : dq_total_ + row * g_.dim_tiles * kTileRows,
            .has_norm = flags,
            .q_finite = flags + plane,
            .do_finite = flags + 2 * plane};
}

GradientMemory::Keys GradientMemory::keys(const Sequence& sequence, std::int64_t kv_head, std::int64_t first) const {
    const std::int64_t row = kv_head * padded_keys(problem_) + first_padded_key(problem_, sequence) + first;
    char* flags = flags_kv_ + row / kGroup;
    const std::int64_t plane = problem_.heads_kv * padded_keys(problem_) / kGroup;
    return {.k_rows = key_rows(k_rows_, g_, g_.depth_tiles, row),
            .k_columns = key_columns(k_columns_, g_, g_.dim_tiles, row),
            .v_rows = key_rows(v_rows_, g_, g_.depth_tiles_v, row),
            .k_finite = flags,
            .v_finite = flags + plane};
}

bool GradientMemory::prepare_queries(const BackwardArgs& args, const Head& head, std::int64_t first) const {
    const Primitives& primitives = *primitives_of_unit();
    const std::int64_t rows = std::min(rows_per_task_, head.sequence.len_q - first);
    const Queries to = queries(head, first);
    const HeadRows d_o = head_rows(args.d_o, head.sequence, head.sequence.first_q, head.query_head);
    const HeadRows o = head_rows(args.o, head.sequence, head.sequence.first_q, head.query_head);
    // fp32 queries are packed with the scale if it is at most 1, as in the forward.
    const float scale = g_.parts == 1 ? 1.0F : head.query_scale;
    primitives.pack({head.q, first, rows, g_.head_dim, Form::column_pairs, to.q_pairs, false, scale});
    primitives.pack({d_o, first, rows, g_.head_dim_v, Form::column_pairs, to.do_pairs});
    if (g_.parts == 1) std::fill_n(to.delta, rows, 0.0F);
    else primitives.row_dots(d_o, o, first, rows, g_.head_dim_v, to.delta);
    const std::int64_t sums = round_up(rows, kGroup) * g_.dim_tiles * kTileRows;
    std::fill_n(to.dq_t, sums, 0.0F);
    if (to.dq_total != nullptr) std::fill_n(to.dq_total, sums, 0.0);
    for (std::int64_t r = 0; r < rows; r += kGroup) {
        const std::int64_t count = std::min(kGroup, rows - r);
        const Queries at = queries(head, first + r);
        *at.q_finite = primitives.pack({head.q, first + r, count, g_.head_dim, Form::row_pairs, at.q_rows, true});
        *at.do_finite = primitives.pack({d_o, first + r, count, g_.head_dim_v, Form::row_pairs, at.do_rows, true});
        *at.has_norm = 0;
        if (count > kTileRows) continue;  // otherwise the second 16 lanes are all padding
        std::fill_n(at.q_pairs.data + at.q_pairs.column_step, at.q_pairs.column_step, Bf16{});
        std::fill_n(at.do_pairs.data + at.do_pairs.column_step, at.do_pairs.column_step, Bf16{});
    }
    const HeadRows lse = lse_rows(args.lse, head.sequence, head.query_head);
    const HeadRows dlse = lse_rows(args.dlse, head.sequence, head.query_head);
    bool inexact = false;
    for (std::int64_t r = 0; r < round_up(rows, kGroup); ++r) {
        // An LSE of +inf gives exp(s - inf) = 0: no weights for padding and for empty rows, whose LSE is -inf.
        to.lse[r] = std::numeric_limits<float>::infinity();
        to.norm[r] = 1;
        if (r >= rows) {
            to.delta[r] = 0;
            continue;
        }
        const auto value = static_cast<float>(load_as_double(lse.at(first + r, 0), lse.dtype));
        inexact = inexact || inexact_lse(value);
        if (value == -std::numeric_limits<float>::infinity())
            continue;  // an empty row skips dLSE too: 0 times a NaN is NaN
        to.lse[r] = value;
        if (dlse.data != nullptr) to.delta[r] -= static_cast<float>(load_as_double(dlse.at(first + r, 0), dlse.dtype));
    }
    return inexact;
}

void GradientMemory::prepare_keys(const Head& head, std::int64_t first) const {
    const Primitives& primitives = *primitives_of_unit();
    const std::int64_t rows = std::min(rows_per_task_, head.sequence.len_kv - first);
    const Keys to = keys(head.sequence, head.kv_head, first);
    primitives.pack({head.k, first, rows, g_.head_dim, Form::rows, to.k_rows});
    for (std::int64_t r = 0; r < rows; r += kGroup) {
        const std::int64_t count = std::min(kGroup, rows - r);
        const Keys at = keys(head.sequence, head.kv_head, first + r);
        *at.v_finite = primitives.pack({head.v, first + r, count, g_.head_dim_v, Form::rows, at.v_rows});
        *at.k_finite = primitives.pack({head.k, first + r, count, g_.head_dim, Form::columns, at.k_columns, true});
    }
}

bool GradientMemory::prepare(const BackwardCall& call) const {
    const Problem& p = problem_;
    if (p.heads_q == 0) return false;
    const HeadTasks queries(call, p.heads_q, ends_[0],
                            [&](const Sequence& m) { return ceil_div(m.len_q, rows_per_task_); });
    const HeadTasks keys(call, p.heads_kv, ends_[1],
                         [&](const Sequence& m) { return ceil_div(m.len_kv, rows_per_task_); });
    std::atomic<bool> inexact{false};
    call.parallel_for(queries.total() + keys.total(), worthwhile_threads(call.plan), [&](std::int64_t index, int) {
        const bool is_q = index < queries.total();
        const HeadTask task = is_q ? queries.by_head(index) : keys.by_head(index - queries.total());
        const std::int64_t heads = is_q ? p.heads_q : p.heads_kv;
        const std::int64_t first = task.index * rows_per_task_;
        const Head head(p, call.args, sequence_of(call, task.head / heads), task.head % heads * (is_q ? 1 : p.group()));
        if (!is_q) prepare_keys(head, first);
        else if (prepare_queries(call.args, head, first)) inexact.store(true);
    });
    return inexact.load();
}

void GradientMemory::store_sinks(const BackwardCall& call) const {
    store_sink_gradients(call, [&](const Head& head, std::int64_t i) {
        const Queries row = queries(head, i);
        return SinkRow{*row.lse, *row.norm, *row.delta};
    });
}

void GradientMemory::store_queries(const BackwardArgs& args, const Head& head, std::int64_t first) const {
    if (!args.dq.given()) return;
    alignas(64) float scale[kGroup];
    std::fill_n(scale, kGroup, static_cast<float>(problem_.effective_scale()));
    const std::int64_t rows = std::min(kGroup, head.sequence.len_q - first);
    const Queries from = queries(head, first);
    if (from.dq_total != nullptr) simd::add_total(from.dq_t, from.dq_total, g_.dim_tiles * kTileRows, kGroup);
    for (std::int64_t r = 0; r < rows; ++r) {  // rounding may lose a NaN of dS (to_bf16_pairs)
        if (!std::isnan(from.lse[r]) && !std::isnan(from.delta[r])) continue;
        const bool sees_keys = !head.band.kv_range(first + r, first + r + 1).empty();
        if (sees_keys) scale[r] = std::numeric_limits<float>::quiet_NaN();
    }
    primitives_of_unit()->store_columns(from.dq_t, kGroup, rows, g_.head_dim, scale,
                                        head_rows(args.dq, head.sequence, head.sequence.first_q, head.query_head),
                                        first);
}

}  // namespace tessera::cpu::matrix
