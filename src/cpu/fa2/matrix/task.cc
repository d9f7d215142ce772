// SPDX-License-Identifier: Apache-2.0
#include "cpu/fa2/matrix/task.hpp"

#include <cmath>

namespace tessera::cpu::fa2::on_matrix {

matrix::SeenKeys keys_seen(const ForwardRun& run, const matrix::TilePanel& work, std::int64_t block, TileTally* tally) {
    const Range all = run.keys_of_block(work.head.member, block);
    if (all.empty()) return {};
    Range seen{std::max(all.begin, work.keys.begin), std::min(all.end, work.keys.end)};
    if (tally != nullptr) {
        tally->skipped(1, seen.empty() ? 0 : 1);
        if (!seen.empty()) {
            tally->ran(matrix::all_visible(work, all) ? Coverage::full : Coverage::partial,
                       work.panel.queries * seen.size());
        }
    }
    if (!seen.empty()) seen.begin = seen.begin / matrix::kTileDepth * matrix::kTileDepth;
    return {seen};
}

void transform_and_mask_some(const ForwardRun& run, const matrix::TilePanel& work, const matrix::SeenKeys& some,
                             bool finite, float* s, float* other, float* maximum) {
    if (!finite) {
        const Range queries{work.panel.first, work.panel.first + work.panel.queries};
        matrix::redo_special_products(work.head.k, some.keys, work.head.q, queries, run.g.head_dim, work.query_scale(),
                                      s, work.panel.lanes);
    }
    matrix::transform_and_mask(work, some, s, other);
    run.words.maximum(s, some.keys.size(), work.panel.lanes, maximum);
}

matrix::WeightsJob weights_job(const matrix::TilePanel& work, const matrix::SeenKeys& keys, const float* s,
                               float* other, const Stage& at) {
    if (work.head.dropout.active) {
        // 1 where kept: the factor 1 / (1 - p) comes after the sum, so that it doesn't meet the rounding of P.
        lanes::DropoutRule rule = work.head.dropout;
        rule.kept = 1;
        lanes::dropout_factors(rule, {work.head.band, work.panel.first, keys.keys.begin}, keys.keys.size(), other,
                               work.panel.lanes);
    }
    return {.s = s,
            .keys = keys.keys.size(),
            .lanes = work.panel.lanes,
            .scale = work.weight_scale(),
            .maximum = at.maximum,
            .m = at.state.m,
            .l = at.state.l,
            .parts = work.parts,
            .p = at.p,
            .factors = work.head.dropout.active ? other : nullptr};
}

void epilogue(const ForwardRun& run, const matrix::TilePanel& work, const EpilogueScratch& scratch,
              lanes::PanelSums& sums) {
    const matrix::Layout& g = run.g;
    const std::int64_t lanes = work.panel.lanes;
    float* factor = scratch.exact_tiles.rescale;
    if (sums.started) {
        // Divided by the sum of the weights as they were multiplied: by l, errors of their rounding that rows have
        // in common would not average out. Dropout takes from the multiplied ones, so l it is, and its own factor.
        // Weights in three parts aren't rounded.
        const bool use_l = work.head.dropout.active || g.parts > 1;
        const float* l = use_l ? sums.state.l : sums.o + sum_row(g) * lanes;
        // A NaN may be lost where weights are rounded (matrix::to_bf16_pairs), but not in l.
        for (std::int64_t r = 0; r < lanes; ++r) {
            const float sum = std::isnan(sums.state.l[r]) ? sums.state.l[r] : l[r];
            factor[r] = sum == 0 ? 0.0F : work.head.dropout.kept / sum;
        }
        const HeadRows o = head_rows(run.call.args.o, work.head.member, work.head.member.first_q, work.head.query_head);
        if (run.words.store_columns(sums.o, lanes, work.panel.queries, g.head_dim_v, factor, o, work.panel.first)) {
            lanes::store_lse(sums.state, work.panel.queries,
                             lse_rows(run.call.args.lse, work.head.member, work.head.query_head), work.panel.first);
            return;
        }
        // NaN or infinite: perhaps only before the division. What is finite keeps its bits.
        std::copy_n(sums.o, g.head_dim_v * lanes, scratch.other_o);
        lanes::scale_lanes(scratch.other_o, factor, g.head_dim_v, lanes);
        for (std::int64_t r = 0; r < lanes; ++r) factor[r] *= sums.state.l[r];
        lanes::scale_lanes(sums.o, factor, g.head_dim_v, lanes);
        lanes::load_queries(work.head, g, work.panel, scratch.q_t);
    }
    lanes::normalise(work.head, scratch.exact, work.panel, scratch.q_t, scratch.exact_tiles, sums, scratch.spare_o);
    for (std::int64_t at = 0; sums.started && at < g.head_dim_v * lanes; ++at) {
        if (std::isfinite(scratch.other_o[at])) sums.o[at] = scratch.other_o[at];
    }
    lanes::store_o_and_lse(work.head, g, work.panel, sums, factor, run.call.args);
}

}  // namespace tessera::cpu::fa2::on_matrix
