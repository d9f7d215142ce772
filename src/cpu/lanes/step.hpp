// SPDX-License-Identifier: Apache-2.0
//
// What one panel of queries does with one tile of keys: the tile words put together. The schedules call these in
// different orders and differ in nothing else.
#pragma once

#include "core/arena.hpp"
#include "cpu/call.hpp"

namespace tessera::cpu::lanes {

/// Room for the tiles of one worker.
struct TileScratch {
    float* k;        // [kv_tiles * block_kv, k_stride]
    float* v;        // [kv_tiles * block_kv, v_stride]
    float* s;        // [block_kv, lanes]: scores, then weights
    float* other;    // [block_kv, lanes]: bias, or dropout factors
    float* rescale;  // [lanes]

    explicit TileScratch(Arena& arena, const Geometry& g, std::int64_t kv_tiles = 1)
        : k(arena.take<float>(kv_tiles * g.block_kv * g.k_stride)),
          v(arena.take<float>(kv_tiles * g.block_kv * g.v_stride)),
          s(arena.take<float>(g.block_kv * g.lanes)),
          other(arena.take<float>(g.block_kv * g.lanes)),
          rescale(arena.take<float>(g.lanes)) {}
};

/// Running result of a panel: state and unnormalised O^T, [head_dim_v, lanes], unless its owner has it otherwise.
struct PanelSums {
    RowState state;
    float* o = nullptr;
    bool started = false;  ///< false: nothing added yet, o holds no numbers

    PanelSums(Arena& arena, const Geometry& g) : PanelSums(arena.take<float>(floats(g)), g) {}
    /// In memory that is laid out already: m, l, then O^T.
    PanelSums(float* memory, const Geometry& g) {
        if (memory == nullptr) return;  // the workspace is only being measured
        state = {memory, memory + g.lanes};
        o = memory + 2 * g.lanes;
    }
    static std::int64_t floats(const Geometry& g) { return (2 + g.head_dim_v) * g.lanes; }
};

/// What an observer is told of a panel and some keys, with the running sums of a forward.
TileReport report_of(TileStep step, const Head& head, const Panel& panel, Range keys, Coverage coverage,
                     const PanelSums& sums);

/// K and V rows [first, first + keys) in fp32. With `borrow`, rows that can be used where they lie are not copied: a
/// copy pays when several panels read the tile.
KvTile load_kv(const Head& head, const Geometry& g, std::int64_t first, std::int64_t keys, const TileScratch& scratch,
               bool borrow);

/// Q^T of a panel, with the scale. q_t: [head_dim, panel.lanes]
void load_queries(const Head& head, const Geometry& g, const Panel& panel, float* q_t);

/// s = scores of the tile, -inf where hidden. s: [kv.keys, panel.lanes]
void scores(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
            const float* q_t, float* s, float* scratch, float* cap_slope = nullptr);

/// o = o * rescale + V^T s (Into::scaled_add) or as `into` says, after dropout. s: weights; o: [head_dim_v,
/// panel.lanes]
void add_values(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage, float* s,
                float* scratch, float* o, Into into, const float* rescale);

/// The fa2 step: scores, online softmax, O rescaled and added to.
void online_softmax_step(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                         const float* q_t, const TileScratch& scratch, PanelSums& sums);

/// Divides O by l. Where the undivided sum passed the largest float though the quotient need not, the element is summed
/// again from weights that are divided first. spare_o: another [head_dim_v, lanes]
void normalise(const Head& head, const Geometry& g, const Panel& panel, const float* q_t, const TileScratch& scratch,
               PanelSums& sums, float* spare_o);

/// Sums elements of O that are not finite again, from weights that are divided first: what the result is when it can be
/// held. state: of all keys of the panel
void mend_overflow(const Head& head, const Geometry& g, const Panel& panel, const float* q_t,
                   const TileScratch& scratch, const RowState& state, float* o, float* spare_o);

/// Writes O, normalised, and the LSE of a panel; zeros and -inf where no key was seen.
void store_o_and_lse(const Head& head, const Geometry& g, const Panel& panel, const PanelSums& sums, float* ones,
                     const ForwardArgs& args);

/// A panel as the backward keeps it in slow memory.
struct GradientPanel {
    float* q_t;    // [head_dim, lanes], with the scale
    float* q;      // [queries, k_stride]
    float* do_t;   // [head_dim_v, lanes]
    float* d_o;    // [queries, v_stride]
    float* lse;    // [lanes], +inf for empty rows
    float* delta;  // [lanes], rowsum(P * dP) - dLSE, which is rowsum(dO * O) - dLSE
    float* norm;   // [lanes + 1], factors of P where LSE is too large to hold the row's sum; the last: 0 if all are 1
    float* dq_t;   // [head_dim, lanes], the sum K^T dS so far
};

/// Room for the tiles of one backward worker, beyond TileScratch.
struct GradientScratch : TileScratch {
    float* ds;         // [block_kv, lanes]: dP, then dS
    float* cap_slope;  // [block_kv, lanes]
    double* sums;      // [2, lanes]: of a panel's P and P * dP

    GradientScratch(Arena& arena, const Geometry& g, std::int64_t kv_tiles)
        : TileScratch(arena, g, kv_tiles),
          ds(arena.take<float>(g.block_kv * g.lanes)),
          cap_slope(arena.take<float>(g.block_kv * g.lanes)),
          sums(arena.take<double>(2 * g.lanes)) {}
};

/// scratch.s = P without dropout, scratch.ds = dP with it, scratch.other its factors where there is dropout; masked
/// pairs hold anything. scratch.cap_slope holds the softcap's derivative when there is a softcap.
void weights_and_dp(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                    const GradientPanel& from, const GradientScratch& scratch);

/// scratch.s = P (dropout applied), scratch.ds = dS, the gradient of the scores; 0 where hidden.
void score_gradient(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                    const GradientPanel& from, const GradientScratch& scratch);

/// ds of score_gradient() becomes the gradient of the scaled dot products: times the softcap's derivative.
void through_softcap(const Head& head, const Panel& panel, const KvTile& kv, const GradientScratch& scratch);

/// dV += P^T dO, dK += dS^T Q, dQ^T += K^T dS^T of one tile. p, ds: [keys, lanes]; dv: [keys, v_stride]; dk: [keys,
/// k_stride]
void add_dv(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
            const GradientPanel& from, const float* p, float* dv);
void add_dk(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
            const GradientPanel& from, const float* ds, float* dk);
void add_dq(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
            const GradientPanel& from, const float* ds);

/// What an observer is told of a tile of the backward.
TileReport report_of(TileStep step, const Head& head, const Panel& panel, const KvTile& kv, Coverage coverage,
                     const GradientPanel& from, const float* p, const float* ds);
/// The same after its gradients were added to dq of `from`, dk [keys, k_stride] and dv [keys, v_stride].
TileReport report_of(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                     const GradientPanel& from, const GradientScratch& scratch, const float* dk, const float* dv);

/// One tile of the backward from scores to sums: five products (S, dP, dV, dK, dQ).
void backward_tile(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                   const GradientPanel& from, const GradientScratch& scratch, float* dk, float* dv);

}  // namespace tessera::cpu::lanes
