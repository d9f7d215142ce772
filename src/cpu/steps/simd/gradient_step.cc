// SPDX-License-Identifier: Apache-2.0
#include "cpu/steps/simd/gradient_step.hpp"

#include "cpu/simd/masked_matmul.hpp"

namespace tessera::cpu::simd {

void weights_and_dp(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                    const GradientPanel& from, const GradientScratch& scratch) {
    const TilePosition position = head.position(panel, kv);
    const TilePosition* cut = coverage == Coverage::full ? nullptr : &position;
    scores(head, g, panel, kv, coverage, from.q_t, scratch.s, scratch.bias_or_dropout, scratch.cap_slope);
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
                  position, coverage);
    if (head.dropout.active) {
        dropout_factors(head.dropout, position, kv.keys, scratch.bias_or_dropout, panel.lanes);
        multiply(scratch.ds, scratch.bias_or_dropout, kv.keys, panel.lanes);
    }
}

void score_gradient(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                    const GradientPanel& from, const GradientScratch& scratch) {
    weights_and_dp(head, g, panel, kv, coverage, from, scratch);
    const TilePosition position = head.position(panel, kv);
    const TilePosition* cut = coverage == Coverage::full ? nullptr : &position;
    softmax_gradient(scratch.s, scratch.ds, from.delta, kv.keys, panel.lanes, panel.lanes, cut);
    if (head.dropout.active) multiply(scratch.s, scratch.bias_or_dropout, kv.keys, panel.lanes);
    if (coverage == Coverage::partial) {
        // Hidden pairs need an explicit 0: a hidden key or value may be NaN, and so may dP or the LSE.
        fill_masked(position, kv.keys, scratch.s, panel.lanes, 0.0F);
        fill_masked(position, kv.keys, scratch.ds, panel.lanes, 0.0F);
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
                        head.position(panel, kv), coverage);
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
                        head.position(panel, kv), coverage);
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
                     head.position(panel, kv), coverage);
}

void backward_tile(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                   const GradientPanel& from, const GradientScratch& scratch, float* dk, float* dv) {
    score_gradient(head, g, panel, kv, coverage, from, scratch);
    through_softcap(head, panel, kv, scratch);
    add_dv(head, g, panel, kv, coverage, from, scratch.s, dv);
    add_dk(head, g, panel, kv, coverage, from, scratch.ds, dk);
    add_dq(head, g, panel, kv, coverage, from, scratch.ds);
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

}  // namespace tessera::cpu::simd
