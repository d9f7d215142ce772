// SPDX-License-Identifier: Apache-2.0
#include "cpu/steps/simd/step.hpp"

#include <cmath>
#include <limits>

#include "cpu/simd/masked_matmul.hpp"

namespace tessera::cpu::simd {
namespace {

/// Can these rows be used where they lie? They must be evenly spaced, so lie in one page of a cache. Rows a multiple of
/// 1 KiB (256 floats) apart share a few sets of the L1 cache. A tile read down its columns would evict itself, so a
/// copy is faster.
bool usable_in_place(const HeadRows& rows, std::int64_t first, std::int64_t count, std::int64_t dim) {
    const bool crowds_cache = rows.row_stride > dim && rows.row_stride % 256 == 0;
    return rows.dtype == DType::fp32 && rows.column_stride == 1 && !crowds_cache && rows.run(first) >= count;
}

/// The factor on weights when an overflowed sum is recomputed: no sum of them times V can then overflow on its way.
constexpr float kOverflowMargin = 0x1p-6F;

/// x / kOverflowMargin. If rounding alone takes the quotient beyond the largest float, returns the largest float. This
/// happens if all values are the largest float and the weights sum to slightly over 1.
float remove_overflow_margin(float x) {
    constexpr float kLargest = std::numeric_limits<float>::max();
    constexpr float kRounding = 0x1p-16F;
    if (std::abs(x) > kLargest * kOverflowMargin && std::abs(x) <= kLargest * kOverflowMargin * (1 + kRounding))
        return std::copysign(kLargest, x);
    return x / kOverflowMargin;
}

}  // namespace

TileReport report_of(TileStep step, const Head& head, const Panel& panel, Range keys, Coverage coverage,
                     const PanelSums& sums) {
    TileReport report = report_of(step, head, panel, keys, coverage);
    report.m = sums.state.m;
    report.l = sums.state.l;
    report.o = sums.o;
    return report;
}

KvTile load_kv(const Head& head, const Geometry& g, std::int64_t first, std::int64_t keys, const TileScratch& scratch,
               bool borrow) {
    KvTile kv{.first = first, .keys = keys};
    if (borrow && usable_in_place(head.k, first, keys, g.head_dim)) {
        kv.k = static_cast<const float*>(head.k.at(first, 0));
        kv.k_stride = head.k.row_stride;
    } else {
        load_rows(head.k, first, keys, g.head_dim, scratch.k, g.k_stride);
        kv.k = scratch.k;
        kv.k_stride = g.k_stride;
    }
    if (borrow && usable_in_place(head.v, first, keys, g.head_dim_v)) {
        kv.v = static_cast<const float*>(head.v.at(first, 0));
        kv.v_stride = head.v.row_stride;
    } else {
        load_rows(head.v, first, keys, g.head_dim_v, scratch.v, g.v_stride);
        kv.v = scratch.v;
        kv.v_stride = g.v_stride;
    }
    return kv;
}

void load_queries(const Head& head, const Geometry& g, const Panel& panel, float* q_t) {
    load_transposed(head.q, panel.first, panel.queries, g.head_dim, head.query_scale, q_t, panel.lanes);
}

void scores(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
            const float* q_t, float* s, float* scratch, float* cap_slope) {
    const TilePosition position = head.position(panel, kv);
    matmul_scores({.m = kv.keys,
                   .n = panel.lanes,
                   .k = g.head_dim,
                   .a = kv.k,
                   .a_row = kv.k_stride,
                   .a_k = 1,
                   .b = q_t,
                   .b_stride = panel.lanes,
                   .c = s,
                   .c_stride = panel.lanes},
                  position, coverage);
    if (!head.rule.trivial()) {
        transform_scores(head.rule, position, kv.keys, panel.queries, s, panel.lanes, scratch, cap_slope);
    }
    if (coverage == Coverage::partial) {
        fill_masked(position, kv.keys, s, panel.lanes, -std::numeric_limits<float>::infinity());
        // A hidden NaN has a NaN slope, which would come back as 0 * NaN.
        if (head.rule.softcap > 0 && cap_slope != nullptr) {
            fill_masked(position, kv.keys, cap_slope, panel.lanes, 0.0F);
        }
    }
}

void add_values(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage, float* s,
                float* scratch, float* o, Into into, const float* rescale) {
    const TilePosition position = head.position(panel, kv);
    if (head.dropout.active) {
        dropout_factors(head.dropout, position, kv.keys, scratch, panel.lanes);
        multiply(s, scratch, kv.keys, panel.lanes);
    }
    const Product product{.m = g.head_dim_v,
                          .n = panel.lanes,
                          .k = kv.keys,
                          .a = kv.v,
                          .a_row = 1,
                          .a_k = kv.v_stride,
                          .b = s,
                          .b_stride = panel.lanes,
                          .c = o,
                          .c_stride = panel.lanes,
                          .into = into,
                          .lane_scale = rescale};
    matmul_over_keys(product, position, coverage);
}

void online_softmax_step(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                         const float* q_t, const TileScratch& scratch, PanelSums& sums) {
    scores(head, g, panel, kv, coverage, q_t, scratch.s, scratch.bias_or_dropout);
    if (!sums.started) clear_state(sums.state, panel.lanes);
    const TilePosition position = head.position(panel, kv);
    online_softmax(scratch.s, kv.keys, panel.lanes, panel.lanes, sums.state, scratch.rescale,
                   coverage == Coverage::full ? nullptr : &position);
    const Into into = sums.started ? Into::scaled_add : Into::overwrite;
    add_values(head, g, panel, kv, coverage, scratch.s, scratch.bias_or_dropout, sums.o, into, scratch.rescale);
    sums.started = true;
}

void normalise(const Head& head, const Geometry& g, const Panel& panel, const float* q_t, const TileScratch& scratch,
               PanelSums& sums, float* spare_o) {
    if (!sums.started) return;
    finish_softmax(sums.state, head.sinks, panel.first, panel.queries, panel.lanes, scratch.rescale);
    normalise_by(scratch.rescale, head, g, panel, q_t, scratch, sums, spare_o);
}

void normalise_by(const float* factors, const Head& head, const Geometry& g, const Panel& panel, const float* q_t,
                  const TileScratch& scratch, PanelSums& sums, float* spare_o) {
    scale_lanes(sums.o, factors, g.head_dim_v, panel.lanes);
    if (!all_finite(sums.o, panel.lanes, g.head_dim_v, panel.lanes))
        recompute_overflow(head, g, panel, q_t, scratch, sums.state, sums.o, spare_o);
}

void recompute_overflow(const Head& head, const Geometry& g, const Panel& panel, const float* q_t,
                        const TileScratch& scratch, const RowState& state, float* o, float* spare_o) {
    float* inverse = scratch.rescale;
    invert_sums(state, panel.lanes, inverse);
    // m is final, so exp(s - m) / l are the weights. A row that saw no key has m = -inf and weights exp(-inf) = 0.
    for (std::int64_t i = 0; i < panel.lanes; ++i) {
        inverse[i] *= kOverflowMargin;
        if (state.l[i] == 0) state.m[i] = std::numeric_limits<float>::infinity();
    }
    std::fill_n(spare_o, g.head_dim_v * panel.lanes, 0.0F);
    for_each_kv_tile(head, g, panel, scratch, [&](const KvTile& kv, Coverage coverage) {
        scores(head, g, panel, kv, coverage, q_t, scratch.s, scratch.bias_or_dropout);
        weights_from_lse(scratch.s, state.m, kv.keys, panel.lanes, panel.lanes);
        scale_lanes(scratch.s, inverse, kv.keys, panel.lanes);
        add_values(head, g, panel, kv, coverage, scratch.s, scratch.bias_or_dropout, spare_o, Into::add, nullptr);
    });
    for (std::int64_t at = 0; at < g.head_dim_v * panel.lanes; ++at) {
        if (!std::isfinite(o[at]) && std::isfinite(remove_overflow_margin(spare_o[at])))
            o[at] = remove_overflow_margin(spare_o[at]);
    }
    for (std::int64_t i = 0; i < panel.lanes; ++i) {
        if (state.l[i] == 0) state.m[i] = -std::numeric_limits<float>::infinity();
    }
}

void store_o_and_lse(const Head& head, const Geometry& g, const Panel& panel, const PanelSums& sums, float* ones,
                     const ForwardArgs& args) {
    const HeadRows o = head_rows(args.o, head.sequence, head.sequence.first_q, head.query_head);
    if (!sums.started) {
        clear_state(sums.state, panel.lanes);
        finish_softmax(sums.state, head.sinks, panel.first, panel.queries, panel.lanes, ones);
        std::fill_n(sums.o, g.head_dim_v * panel.lanes, 0.0F);
    }
    std::fill_n(ones, panel.lanes, 1.0F);
    store_transposed(sums.o, panel.lanes, panel.queries, g.head_dim_v, ones, o, panel.first);
    store_lse(sums.state, panel.queries, lse_rows(args.lse, head.sequence, head.query_head), panel.first);
}

}  // namespace tessera::cpu::simd
