// SPDX-License-Identifier: Apache-2.0
#include "cpu/lanes/step.hpp"

#include <cmath>
#include <limits>

namespace tessera::cpu::lanes {
namespace {

/// Can the rows be used where they lie? Rows a multiple of 1 KiB (256 floats) apart share a few sets of the first-level
/// cache, and a tile read down its columns would evict itself: a copy is faster.
bool usable_in_place(const HeadRows& rows, std::int64_t dim) {
    const bool crowds_cache = rows.row_stride > dim && rows.row_stride % 256 == 0;
    return rows.dtype == DType::fp32 && rows.column_stride == 1 && !crowds_cache;
}

// The product of a tile of weights, or of their gradient, with rows of keys or queries. In tiles that the mask cuts a
// hidden pair must not touch the result: its weight is 0, but 0 times a NaN or an infinity is not, and tiles with such
// rows take the slow twin.

/// K^T or V^T times [keys, lanes].
void matmul_over_keys(const Product& product, const Place& place, Coverage coverage) {
    if (coverage == Coverage::full) matmul(product);
    else if (all_finite(product.a, product.a_k, product.k, product.m)) matmul_visible_keys(product, place);
    else matmul_hidden_keys(product, place);
}

/// [keys, lanes] times Q or dO.
void matmul_over_queries(const Product& product, const Place& place, Coverage coverage) {
    if (coverage == Coverage::full) matmul(product);
    else if (all_finite(product.b, product.b_stride, product.k, product.n)) matmul_visible_queries(product, place);
    else matmul_hidden_queries(product, place);
}

/// K Q^T or V dO^T: a tile of scores, or of their gradient.
void matmul_scores(const Product& product, const Place& place, Coverage coverage) {
    if (coverage == Coverage::full) matmul(product);
    else matmul_visible_scores(product, place);
}

/// Weights that are summed again are made this much smaller, so that no sum of them times V passes the largest float on
/// its way.
constexpr float kRoom = 0x1p-6F;

/// x / kRoom; the largest float where it is rounding alone that takes x / kRoom beyond it, as of values that are all
/// the largest float and weights whose sum is a bit over 1.
float without_room(float x) {
    constexpr float kLargest = std::numeric_limits<float>::max();
    constexpr float kRounding = 0x1p-16F;
    if (std::abs(x) > kLargest * kRoom && std::abs(x) <= kLargest * kRoom * (1 + kRounding))
        return std::copysign(kLargest, x);
    return x / kRoom;
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

TileReport report_of(TileStep step, const Head& head, const Panel& panel, const KvTile& kv, Coverage coverage,
                     const GradientPanel& from, const float* p, const float* ds) {
    TileReport report = report_of(step, head, panel, {kv.first, kv.first + kv.keys}, coverage);
    report.pass = Pass::backward;
    report.p = p;
    report.ds = ds;
    report.lse = from.lse;
    report.delta = from.delta;
    return report;
}

TileReport report_of(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                     const GradientPanel& from, const GradientScratch& scratch, const float* dk, const float* dv) {
    TileReport report = report_of(TileStep::gradients, head, panel, kv, coverage, from, scratch.s, scratch.ds);
    report.dq = from.dq_t;
    report.dk = dk;
    report.dk_stride = g.k_stride;
    report.dv = dv;
    report.dv_stride = g.v_stride;
    return report;
}

KvTile load_kv(const Head& head, const Geometry& g, std::int64_t first, std::int64_t keys, const TileScratch& scratch,
               bool borrow) {
    KvTile kv{.first = first, .keys = keys};
    if (borrow && usable_in_place(head.k, g.head_dim)) {
        kv.k = static_cast<const float*>(head.k.at(first, 0));
        kv.k_stride = head.k.row_stride;
    } else {
        load_rows(head.k, first, keys, g.head_dim, scratch.k, g.k_stride);
        kv.k = scratch.k;
        kv.k_stride = g.k_stride;
    }
    if (borrow && usable_in_place(head.v, g.head_dim_v)) {
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
    const Place place = head.place(panel, kv);
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
                  place, coverage);
    if (!head.rule.trivial()) {
        transform_scores(head.rule, place, kv.keys, panel.queries, s, panel.lanes, scratch, cap_slope);
    }
    if (coverage == Coverage::partial) {
        fill_masked(place, kv.keys, s, panel.lanes, -std::numeric_limits<float>::infinity());
        // The slope of a hidden NaN is NaN, and would come back by 0 * NaN.
        if (head.rule.softcap > 0 && cap_slope != nullptr) {
            fill_masked(place, kv.keys, cap_slope, panel.lanes, 0.0F);
        }
    }
}

void add_values(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage, float* s,
                float* scratch, float* o, Into into, const float* rescale) {
    const Place place = head.place(panel, kv);
    if (head.dropout.active) {
        dropout_factors(head.dropout, place, kv.keys, scratch, panel.lanes);
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
    matmul_over_keys(product, place, coverage);
}

void online_softmax_step(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                         const float* q_t, const TileScratch& scratch, PanelSums& sums) {
    scores(head, g, panel, kv, coverage, q_t, scratch.s, scratch.other);
    if (!sums.started) clear_state(sums.state, panel.lanes);
    const Place place = head.place(panel, kv);
    online_softmax(scratch.s, kv.keys, panel.lanes, panel.lanes, sums.state, scratch.rescale,
                   coverage == Coverage::full ? nullptr : &place);
    const Into into = sums.started ? Into::scaled_add : Into::overwrite;
    add_values(head, g, panel, kv, coverage, scratch.s, scratch.other, sums.o, into, scratch.rescale);
    sums.started = true;
}

void normalise(const Head& head, const Geometry& g, const Panel& panel, const float* q_t, const TileScratch& scratch,
               PanelSums& sums, float* spare_o) {
    if (!sums.started) return;
    invert_sums(sums.state, panel.lanes, scratch.rescale);
    scale_lanes(sums.o, scratch.rescale, g.head_dim_v, panel.lanes);
    if (!all_finite(sums.o, panel.lanes, g.head_dim_v, panel.lanes))
        mend_overflow(head, g, panel, q_t, scratch, sums.state, sums.o, spare_o);
}

void mend_overflow(const Head& head, const Geometry& g, const Panel& panel, const float* q_t,
                   const TileScratch& scratch, const RowState& state, float* o, float* spare_o) {
    float* inverse = scratch.rescale;
    invert_sums(state, panel.lanes, inverse);
    // m is final: exp(s - m) / l are the weights. A row that saw no key has m = -inf; its weights are exp(-inf) = 0.
    for (std::int64_t i = 0; i < panel.lanes; ++i) {
        inverse[i] *= kRoom;
        if (state.l[i] == 0) state.m[i] = std::numeric_limits<float>::infinity();
    }
    std::fill_n(spare_o, g.head_dim_v * panel.lanes, 0.0F);
    const Range keys = head.keys_of(panel);
    for (std::int64_t first = keys.begin / g.block_kv * g.block_kv; first < keys.end; first += g.block_kv) {
        const KvTile kv = load_kv(head, g, first, std::min(g.block_kv, keys.end - first), scratch, true);
        const Coverage coverage = head.coverage(panel, kv);
        scores(head, g, panel, kv, coverage, q_t, scratch.s, scratch.other);
        weights_from_lse(scratch.s, state.m, kv.keys, panel.lanes, panel.lanes);
        scale_lanes(scratch.s, inverse, kv.keys, panel.lanes);
        add_values(head, g, panel, kv, coverage, scratch.s, scratch.other, spare_o, Into::add, nullptr);
    }
    for (std::int64_t at = 0; at < g.head_dim_v * panel.lanes; ++at) {
        if (!std::isfinite(o[at]) && std::isfinite(without_room(spare_o[at]))) o[at] = without_room(spare_o[at]);
    }
    for (std::int64_t i = 0; i < panel.lanes; ++i) {
        if (state.l[i] == 0) state.m[i] = -std::numeric_limits<float>::infinity();
    }
}

void store_o_and_lse(const Head& head, const Geometry& g, const Panel& panel, const PanelSums& sums, float* ones,
                     const ForwardArgs& args) {
    const HeadRows o = head_rows(args.o, head.member, head.member.first_q, head.query_head);
    if (!sums.started) {
        clear_state(sums.state, panel.lanes);
        std::fill_n(sums.o, g.head_dim_v * panel.lanes, 0.0F);
    }
    std::fill_n(ones, panel.lanes, 1.0F);
    store_transposed(sums.o, panel.lanes, panel.queries, g.head_dim_v, ones, o, panel.first);
    store_lse(sums.state, panel.queries, lse_rows(args.lse, head.member, head.query_head), panel.first);
}

void weights_and_dp(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                    const GradientPanel& from, const GradientScratch& scratch) {
    const Place place = head.place(panel, kv);
    const Place* cut = coverage == Coverage::full ? nullptr : &place;
    scores(head, g, panel, kv, coverage, from.q_t, scratch.s, scratch.other, scratch.cap_slope);
    weights_from_lse(scratch.s, from.lse, kv.keys, panel.lanes, panel.lanes, cut);
    if (from.norm[panel.lanes] != 0) scale_lanes(scratch.s, from.norm, kv.keys, panel.lanes);
    matmul_scores({.m = kv.keys,
                   .n = panel.lanes,
                   .k = g.head_dim_v,
                   .a = kv.v,
                   .a_row = kv.v_stride,
                   .a_k = 1,
                   .b = from.do_t,
                   .b_stride = panel.lanes,
                   .c = scratch.ds,
                   .c_stride = panel.lanes},
                  place, coverage);
    if (head.dropout.active) {
        dropout_factors(head.dropout, place, kv.keys, scratch.other, panel.lanes);
        multiply(scratch.ds, scratch.other, kv.keys, panel.lanes);
    }
}

void score_gradient(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                    const GradientPanel& from, const GradientScratch& scratch) {
    weights_and_dp(head, g, panel, kv, coverage, from, scratch);
    const Place place = head.place(panel, kv);
    const Place* cut = coverage == Coverage::full ? nullptr : &place;
    softmax_gradient(scratch.s, scratch.ds, from.delta, kv.keys, panel.lanes, panel.lanes, cut);
    if (head.dropout.active) multiply(scratch.s, scratch.other, kv.keys, panel.lanes);
    if (coverage == Coverage::partial) {
        // Not 0 by itself: a hidden key or value may be NaN, and so may dP or the LSE be.
        fill_masked(place, kv.keys, scratch.s, panel.lanes, 0.0F);
        fill_masked(place, kv.keys, scratch.ds, panel.lanes, 0.0F);
    }
}

void through_softcap(const Head& head, const Panel& panel, const KvTile& kv, const GradientScratch& scratch) {
    if (head.rule.softcap > 0) multiply(scratch.ds, scratch.cap_slope, kv.keys, panel.lanes);
}

void add_dv(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
            const GradientPanel& from, const float* p, float* dv) {
    matmul_over_queries({.m = kv.keys,
                         .n = g.v_stride,
                         .k = panel.queries,
                         .a = p,
                         .a_row = panel.lanes,
                         .a_k = 1,
                         .b = from.d_o,
                         .b_stride = g.v_stride,
                         .c = dv,
                         .c_stride = g.v_stride,
                         .into = Into::add},
                        head.place(panel, kv), coverage);
}

void add_dk(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
            const GradientPanel& from, const float* ds, float* dk) {
    matmul_over_queries({.m = kv.keys,
                         .n = g.k_stride,
                         .k = panel.queries,
                         .a = ds,
                         .a_row = panel.lanes,
                         .a_k = 1,
                         .b = from.q,
                         .b_stride = g.k_stride,
                         .c = dk,
                         .c_stride = g.k_stride,
                         .into = Into::add},
                        head.place(panel, kv), coverage);
}

void add_dq(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
            const GradientPanel& from, const float* ds) {
    matmul_over_keys({.m = g.head_dim,
                      .n = panel.lanes,
                      .k = kv.keys,
                      .a = kv.k,
                      .a_row = 1,
                      .a_k = kv.k_stride,
                      .b = ds,
                      .b_stride = panel.lanes,
                      .c = from.dq_t,
                      .c_stride = panel.lanes,
                      .into = Into::add},
                     head.place(panel, kv), coverage);
}

void backward_tile(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                   const GradientPanel& from, const GradientScratch& scratch, float* dk, float* dv) {
    score_gradient(head, g, panel, kv, coverage, from, scratch);
    through_softcap(head, panel, kv, scratch);
    add_dv(head, g, panel, kv, coverage, from, scratch.s, dv);
    add_dk(head, g, panel, kv, coverage, from, scratch.ds, dk);
    add_dq(head, g, panel, kv, coverage, from, scratch.ds);
}

}  // namespace tessera::cpu::lanes
