// SPDX-License-Identifier: Apache-2.0
#include "cpu/fa2/packed_step.hpp"

#include <cmath>

namespace tessera::cpu::fa2 {

PackedKeys keys_seen(const ForwardRun& run, const PackedPanel& work, std::int64_t block, TileTally* tally) {
    const Range all = run.keys_of_block(work.head.member, block);
    if (all.empty()) return {};
    Range seen{std::max(all.begin, work.keys.begin), std::min(all.end, work.keys.end)};
    if (tally != nullptr) {
        tally->skipped(1, seen.empty() ? 0 : 1);
        if (!seen.empty()) {
            tally->ran(all_visible(work, all) ? Coverage::full : Coverage::partial, work.panel.queries * seen.size());
        }
    }
    if (!seen.empty()) seen.begin = seen.begin / tile::kTileDepth * tile::kTileDepth;
    return {seen};
}

void finish_some(const ForwardRun& run, const PackedPanel& work, const PackedKeys& some, bool finite, float* s,
                 float* other, float* maximum) {
    if (!finite) {
        const Range queries{work.panel.first, work.panel.first + work.panel.queries};
        redo_special_products(work.head.k, some.keys, work.head.q, queries, run.g.head_dim, work.query_scale(), s,
                              work.panel.lanes);
    }
    finish_scores(work, some, s, other);
    run.words.maximum(s, some.keys.size(), work.panel.lanes, maximum);
}

tile::WeightsJob weights_job(const PackedPanel& work, const PackedKeys& keys, const float* s, float* other,
                             const Stage& at) {
    if (work.head.dropout.active) {
        // 1 where kept: the factor 1 / (1 - p) comes after the sum, so that it doesn't meet the rounding of P.
        tile::DropoutRule rule = work.head.dropout;
        rule.kept = 1;
        tile::dropout_factors(rule, {work.head.band, work.panel.first, keys.keys.begin}, keys.keys.size(), other,
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

void finish_packed(const ForwardRun& run, const PackedPanel& work, const FinishScratch& scratch, PanelSums& sums) {
    const PackedGeometry& g = run.g;
    const std::int64_t lanes = work.panel.lanes;
    float* factor = scratch.exact_tiles.rescale;
    if (sums.started) {
        // Divided by the sum of the weights as they were multiplied: by l, errors of their rounding that rows have
        // in common would not average out. Dropout takes from the multiplied ones, so l it is, and its own factor.
        // Weights in three parts aren't rounded.
        const bool use_l = work.head.dropout.active || g.parts > 1;
        const float* l = use_l ? sums.state.l : sums.o + sum_row(g) * lanes;
        // A NaN may be lost where weights are rounded (tile::to_bf16_pairs), but not in l.
        for (std::int64_t r = 0; r < lanes; ++r) {
            const float sum = std::isnan(sums.state.l[r]) ? sums.state.l[r] : l[r];
            factor[r] = sum == 0 ? 0.0F : work.head.dropout.kept / sum;
        }
        const HeadRows o = head_rows(run.call.args.o, work.head.member, work.head.member.first_q, work.head.query_head);
        if (run.words.store_columns(sums.o, lanes, work.panel.queries, g.head_dim_v, factor, o, work.panel.first)) {
            tile::store_lse(sums.state, work.panel.queries,
                            lse_rows(run.call.args.lse, work.head.member, work.head.query_head), work.panel.first);
            return;
        }
        // NaN or infinite: perhaps only before the division. What is finite keeps its bits.
        std::copy_n(sums.o, g.head_dim_v * lanes, scratch.other_o);
        tile::scale_lanes(scratch.other_o, factor, g.head_dim_v, lanes);
        for (std::int64_t r = 0; r < lanes; ++r) factor[r] *= sums.state.l[r];
        tile::scale_lanes(sums.o, factor, g.head_dim_v, lanes);
        load_queries(work.head, g, work.panel, scratch.q_t);
    }
    normalise(work.head, scratch.exact, work.panel, scratch.q_t, scratch.exact_tiles, sums, scratch.spare_o);
    for (std::int64_t at = 0; sums.started && at < g.head_dim_v * lanes; ++at) {
        if (std::isfinite(scratch.other_o[at])) sums.o[at] = scratch.other_o[at];
    }
    cpu::finish(work.head, g, work.panel, sums, factor, run.call.args);
}

}  // namespace tessera::cpu::fa2
