// SPDX-License-Identifier: Apache-2.0
#include "cpu/fa2/matrix/task.hpp"

#include <cmath>
#include <cstring>
#include <limits>

namespace tessera::cpu::fa2::matrix_path {

matrix::SeenKeys keys_seen(const ForwardRun& run, const matrix::TilePanel& work, std::int64_t block, TileTally* tally) {
    const Range all = run.keys_of_block(work.head.sequence, block);
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
                             bool finite, float* s, float* bias_or_dropout, float* maximum) {
    if (!finite) {
        const Range queries{work.panel.first, work.panel.first + work.panel.queries};
        matrix::redo_special_products(work.head.k, some.keys, work.head.q, queries, run.g.head_dim, work.query_scale(),
                                      s, work.panel.lanes);
    }
    matrix::transform_and_mask(work, some, s, bias_or_dropout);
    run.primitives.maximum(s, some.keys.size(), work.panel.lanes, maximum);
}

void rounding_offsets(const matrix::TilePanel& work, const Bf16* query_pairs, std::int64_t depth_tiles,
                      float* offsets) {
    constexpr std::uint32_t kOdd = 0x9E3779B1U;
    constexpr std::uint32_t kNoExponents =
        0x807F807FU;  // exponents are ignored, so moving a power of two from Q to the scale changes no bits
    constexpr float kLn2 = 0.6931472F;
    const matrix::Tiles tiles = work.pairs(const_cast<Bf16*>(query_pairs));
    for (std::int64_t lane_tile = 0; lane_tile < work.lane_tiles(); ++lane_tile) {
        std::uint32_t hash[matrix::kTileRows] = {};
        for (std::int64_t depth = 0; depth < depth_tiles; ++depth) {
            const Bf16* tile = tiles.data + depth * tiles.row_step + lane_tile * tiles.column_step;
            for (std::int64_t pair = 0; pair < matrix::kTileRows; ++pair) {
                std::uint32_t words[matrix::kTileRows];  // one of each lane
                std::memcpy(words, tile + pair * matrix::kTileDepth, sizeof words);
                for (std::int64_t i = 0; i < matrix::kTileRows; ++i) {
                    hash[i] = (hash[i] << 5 | hash[i] >> 27) +
                              (words[i] & kNoExponents);  // sums and shifts need no vector multiply
                }
            }
        }
        for (std::int64_t i = 0; i < matrix::kTileRows; ++i) {
            const std::uint32_t mixed = (hash[i] ^ hash[i] >> 15) * kOdd;
            offsets[lane_tile * matrix::kTileRows + i] = static_cast<float>(mixed >> 8) * (0x1p-24F * kLn2);
        }
    }
}

matrix::WeightsJob weights_job(const matrix::TilePanel& work, const matrix::SeenKeys& keys, const float* s,
                               float* bias_or_dropout, const float* offsets, const Stage& at) {
    if (work.head.dropout.active) {
        // Kept weights get factor 1. The factor 1 / (1 - p) is applied after the sum, so that it doesn't change the
        // rounding of P.
        simd::DropoutRule rule = work.head.dropout;
        rule.kept = 1;
        simd::dropout_factors(rule, {work.head.band, work.panel.first, keys.keys.begin}, keys.keys.size(),
                              bias_or_dropout, work.panel.lanes);
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
            .offset = work.parts == 1 ? offsets : nullptr,
            .factors = work.head.dropout.active ? bias_or_dropout : nullptr,
            .rounded_l = work.head.dropout.active && work.parts == 1 ? at.rounded_l : nullptr};
}

bool may_have_overflowed(const matrix::TilePanel& work, const simd::RowState& state, std::int64_t row) {
    if (std::isfinite(state.m[row]) && std::isfinite(state.l[row])) return false;
    const bool all_hidden = state.m[row] == -std::numeric_limits<float>::infinity();
    if (!all_hidden) return true;
    const std::int64_t query = work.panel.first + row;
    return work.rule.bias.data == nullptr && !work.head.band.kv_range(query, query + 1).empty();
}

namespace {

/// Recomputes in fp32 the rows whose dot products overflowed before scaling; the exact path scales the query first.
/// Only the scores of a row decide whether it is recomputed.
void redo_overflowed_rows(const matrix::TilePanel& work, const matrix::Layout& g, const EpilogueScratch& scratch,
                          simd::PanelSums& sums) {
    const std::int64_t lanes = work.panel.lanes;
    bool any = false;
    for (std::int64_t r = 0; r < work.panel.queries; ++r) any = any || may_have_overflowed(work, sums.state, r);
    if (!any) return;
    simd::PanelSums again = scratch.again;
    simd::load_queries(work.head, scratch.exact, work.panel, scratch.q_t);
    for (std::int64_t key = work.keys.begin / kExactBlock * kExactBlock; key < work.keys.end; key += kExactBlock) {
        const KvTile kv = simd::load_kv(work.head, scratch.exact, key, std::min(kExactBlock, work.keys.end - key),
                                        scratch.exact_tiles, true);
        simd::online_softmax_step(work.head, scratch.exact, work.panel, kv, work.head.coverage(work.panel, kv),
                                  scratch.q_t, scratch.exact_tiles, again);
    }
    for (std::int64_t r = 0; again.started && r < work.panel.queries; ++r) {
        if (!may_have_overflowed(work, sums.state, r)) continue;
        sums.state.m[r] = again.state.m[r];
        sums.state.l[r] = again.state.l[r];
        for (std::int64_t c = 0; c < g.head_dim_v; ++c) sums.o[c * lanes + r] = again.o[c * lanes + r];
        sums.o[sum_row(g) * lanes + r] = again.state.l[r] * work.head.dropout.kept;  // these sums include it
    }
}

/// Adds the sinks to the state of a panel, and to the factors that divide O by the sum of the keys' rounded weights: O
/// is multiplied by the keys' share of the sum of all weights. factor, share: [lanes]
void add_sinks(const matrix::TilePanel& work, const simd::RowState& state, float* factor, float* share) {
    for (std::int64_t r = 0; r < work.panel.queries; ++r) factor[r] *= state.l[r];
    simd::finish_softmax(state, work.head.sinks, work.panel.first, work.panel.queries, work.panel.queries, share);
    for (std::int64_t r = 0; r < work.panel.queries; ++r) factor[r] *= share[r];
}

}  // namespace

void epilogue(const ForwardRun& run, const matrix::TilePanel& work, const EpilogueScratch& scratch,
              simd::PanelSums& sums) {
    const matrix::Layout& g = run.g;
    const std::int64_t lanes = work.panel.lanes;
    float* factor = scratch.exact_tiles.rescale;
    if (sums.started) {
        if (g.parts == 1) redo_overflowed_rows(work, g, scratch, sums);
        // Divides by the sum of the rounded weights: dividing by l would not cancel errors that a row's weights have in
        // common. Weights in three parts aren't rounded.
        const float* l = g.parts > 1 ? sums.state.l : sums.o + sum_row(g) * lanes;
        // Rounding the weights may lose a NaN (matrix::to_bf16_pairs), but l keeps it.
        for (std::int64_t r = 0; r < lanes; ++r) {
            const float sum = std::isnan(sums.state.l[r]) ? sums.state.l[r] : l[r];
            factor[r] = sum == 0 ? 0.0F : work.head.dropout.kept / sum;
        }
        if (work.head.sinks.data != nullptr) add_sinks(work, sums.state, factor, scratch.spare_o);
        const HeadRows o =
            head_rows(run.call.args.o, work.head.sequence, work.head.sequence.first_q, work.head.query_head);
        if (run.primitives.store_columns(sums.o, lanes, work.panel.queries, g.head_dim_v, factor, o,
                                         work.panel.first)) {
            simd::store_lse(sums.state, work.panel.queries,
                            lse_rows(run.call.args.lse, work.head.sequence, work.head.query_head), work.panel.first);
            return;
        }
        // A result that is NaN or infinite may have overflowed only before the division. Finite elements keep their
        // bits.
        std::copy_n(sums.o, g.head_dim_v * lanes, scratch.other_o);
        simd::scale_lanes(scratch.other_o, factor, g.head_dim_v, lanes);
        for (std::int64_t r = 0; r < lanes; ++r) factor[r] *= sums.state.l[r];
        simd::scale_lanes(sums.o, factor, g.head_dim_v, lanes);
        simd::load_queries(work.head, g, work.panel, scratch.q_t);
        simd::invert_sums(sums.state, lanes, factor);
        simd::normalise_by(factor, work.head, scratch.exact, work.panel, scratch.q_t, scratch.exact_tiles, sums,
                           scratch.spare_o);
    }
    for (std::int64_t at = 0; sums.started && at < g.head_dim_v * lanes; ++at) {
        if (std::isfinite(scratch.other_o[at])) sums.o[at] = scratch.other_o[at];
    }
    simd::store_o_and_lse(work.head, g, work.panel, sums, factor, run.call.args);
}

}  // namespace tessera::cpu::fa2::matrix_path
