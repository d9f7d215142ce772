// SPDX-License-Identifier: Apache-2.0
//
// The decomposition of a query head into panels of queries and tiles of keys. No arithmetic on tensors here.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/batch.hpp"
#include "core/dropout.hpp"
#include "cpu/simd/primitives.hpp"
#include "tessera/plan.hpp"

namespace tessera::cpu {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

constexpr Range common(const Range& a, const Range& b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

/// The sizes that determine the memory layout of a call.
struct Geometry {
    std::int64_t block_q;
    std::int64_t block_kv;
    std::int64_t lanes;  ///< floats of one row of a full panel's tile
    std::int64_t head_dim;
    std::int64_t head_dim_v;
    std::int64_t k_stride;  ///< floats of one row of a K tile, of Q and dK
    std::int64_t v_stride;  ///< floats of one row of a V tile, of dO and dV
    std::int64_t panels;    ///< panels of one head of the longest sequence that the Problem allows

    explicit Geometry(const Plan& plan) : Geometry(plan, plan.tile.block_q) {}

    /// The sizes with panels of another size than the plan's tile.
    Geometry(const Plan& plan, std::int64_t queries_per_panel)
        : block_q(std::max<std::int64_t>(1, std::min(queries_per_panel, plan.problem.len_q))),
          block_kv(std::max<std::int64_t>(1, std::min(plan.tile.block_kv, plan.problem.len_kv))),
          lanes(simd::padded(block_q)),
          head_dim(plan.problem.head_dim),
          head_dim_v(plan.problem.head_dim_v),
          k_stride(simd::padded(head_dim)),
          v_stride(simd::padded(head_dim_v)),
          panels(ceil_div(plan.problem.len_q, block_q)) {}

    /// Panels of one head of this sequence.
    std::int64_t panels_of(const Sequence& sequence) const { return ceil_div(sequence.len_q, block_q); }
};

/// The number of threads that the work of a plan is worth, at most the plan's. Waiting threads start within
/// microseconds, and each packs keys for itself. Measured on a virtual machine with AMX (2026-11): a head of 128
/// queries, head_dim 128, fp32, takes 40 to 60 us on two threads and 26 to 45 on four.
inline int worthwhile_threads(const Plan& plan) {
    const Problem& p = plan.problem;
    const double flop_per_thread = p.dtype == DType::bf16 ? 6e5 : 3e5;
    const double pairs = static_cast<double>(p.batch) * static_cast<double>(p.heads_q) * static_cast<double>(p.len_q) *
                         static_cast<double>(p.len_kv);
    const double passes = plan.pass == Pass::backward ? 2.5 : 1;
    const auto dims = static_cast<double>(p.head_dim + p.head_dim_v);
    constexpr double kBytesPerThread = 2e5;  // with few queries, reading the keys dominates
    const double bytes = static_cast<double>(p.batch) * static_cast<double>(p.heads_kv) *
                         static_cast<double>(p.len_kv) * dims * static_cast<double>(size_of(p.dtype));
    const double threads = std::max(2 * passes * pairs * dims / flop_per_thread, bytes / kBytesPerThread);
    return threads >= plan.threads ? plan.threads : std::max(1, static_cast<int>(threads));
}

/// A panel, the query block of the CPU kernels: consecutive queries of one head, one per lane.
struct Panel {
    std::int64_t first = 0;
    std::int64_t queries = 0;
    std::int64_t lanes = 0;  ///< queries, padded: the row stride of this panel's tiles

    Panel(std::int64_t index, std::int64_t block_q, std::int64_t len_q)
        : first(index * block_q),
          queries(std::clamp<std::int64_t>(len_q - first, 0, block_q)),
          lanes(simd::padded(queries)) {}
};

/// A tile of keys: consecutive keys of one head with their rows of K and V in fp32.
struct KvTile {
    std::int64_t first = 0;
    std::int64_t keys = 0;
    const float* k = nullptr;  // [keys, k_stride]
    std::int64_t k_stride = 0;
    const float* v = nullptr;  // [keys, v_stride]
    std::int64_t v_stride = 0;
};

/// One query head of one sequence: its rows and the rules for its scores.
struct Head {
    Sequence sequence;
    Band band;
    std::int64_t query_head = 0;
    std::int64_t kv_head = 0;
    HeadRows q;             // [len_q, head_dim]
    HeadRows k;             // [len_kv, head_dim]
    HeadRows v;             // [len_kv, head_dim_v]
    HeadRows sinks;         // [len_q], may be absent
    float query_scale = 1;  ///< folded into the query tile
    simd::ScoreRule rule;
    simd::DropoutRule dropout;

    template <class Args>
    Head(const Problem& p, const Args& args, const Sequence& m, std::int64_t head)
        : sequence(m),
          band(p.mask.bind(m.len_q, m.len_kv)),
          query_head(head),
          kv_head(head / p.group()),
          q(head_rows(args.q, m, m.first_q, head)),
          k(key_rows(p, args, args.k, m, kv_head)),
          v(key_rows(p, args, args.v, m, kv_head)),
          sinks(sink_rows(args.sinks, head)) {
        const auto scale = static_cast<float>(p.effective_scale());
        // A scale over 1 could overflow a query although the score itself is finite.
        query_scale = std::abs(scale) <= 1 ? scale : 1.0F;
        rule = {.scale = std::abs(scale) <= 1 ? 1.0F : scale,
                .softcap = static_cast<float>(p.softcap),
                .alibi = alibi_slope(args.alibi_slopes, m.batch, head),
                .bias = bias_rows(args.bias, m.batch, head),
                .diagonal = m.len_kv - m.len_q};
        const double probability = p.dropout.probability;
        dropout = {.seed = p.dropout.seed,
                   .threshold = keep_threshold(probability),
                   .kept = static_cast<float>(1.0 / (1.0 - probability)),
                   .batch = m.batch,
                   .head = head,
                   .active = probability > 0};
    }

    /// The keys that some query of the panel sees. The loops skip all others, which a causal mask or a window hides.
    Range keys_of(const Panel& panel) const { return band.kv_range(panel.first, panel.first + panel.queries); }

    Coverage coverage(const Panel& panel, const KvTile& kv) const {
        return band.coverage(panel.first, panel.first + panel.queries, kv.first, kv.first + kv.keys);
    }

    simd::TilePosition position(const Panel& panel, const KvTile& kv) const { return {band, panel.first, kv.first}; }
};

/// A panel with its head and the keys that it sees. Keys before and after them are skipped.
struct HeadPanel {
    Head head;
    Panel panel;
    Range keys;

    HeadPanel(const Head& h, std::int64_t index, std::int64_t block_q)
        : head(h), panel(index, block_q, h.sequence.len_q), keys(h.keys_of(panel)) {}
};

/// Is LSE too large for P = exp(S - LSE) in the backward? The last bits of LSE = m + log(l) must hold log(l). Beyond
/// 256 too few bits remain for the contract's 1e-5, and beyond about 2^24 none. Such rows are normalised by the sum of
/// their own P.
inline bool inexact_lse(float lse) {
    constexpr float kLargestExactLse = 256;
    return std::abs(lse) > kLargestExactLse && std::isfinite(lse);
}

/// The first panel of a sequence. Panels of all sequences lie one after another. A ragged sequence begins at its first
/// row / block_q + its index, which leaves space for its last, shorter panel.
inline std::int64_t first_panel(const Problem& p, const Geometry& g, const Sequence& m) {
    return p.ragged ? m.first_q / g.block_q + m.batch : m.batch * g.panels;
}
inline std::int64_t total_panels(const Problem& p, const Geometry& g) {
    return p.ragged ? p.total_q / g.block_q + p.batch : p.batch * g.panels;
}

/// The index of panel `index` of this head among the panels of all query heads; each head has total_panels().
inline std::int64_t panel_slot(const Problem& p, const Geometry& g, const Head& head, std::int64_t index) {
    return head.query_head * total_panels(p, g) + first_panel(p, g, head.sequence) + index;
}

/// The first row of a sequence's keys among the rows of all sequences.
inline std::int64_t first_kv_row(const Problem& p, const Sequence& m) {
    return p.ragged ? m.first_kv : m.batch * p.len_kv;
}

}  // namespace tessera::cpu
