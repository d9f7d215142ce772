// SPDX-License-Identifier: Apache-2.0
//
// One step of the backward on the SIMD path: a panel of queries against a tile of keys. It recomputes the scores and P,
// computes dP and dS, and runs the three GEMMs that read them. The schedules call these functions in different orders.
#pragma once

#include "cpu/steps/simd/step.hpp"

namespace tessera::cpu::simd {

/// A panel of the backward in global memory.
struct GradientPanel {
    float* q_t;        // [head_dim, lanes], with the scale
    float* q;          // [queries, k_stride]
    float* do_t;       // [head_dim_v, lanes]
    float* d_o;        // [queries, v_stride]
    float* lse;        // [lanes], +inf for empty rows
    float* delta;      // [lanes], rowsum(P * dP) - dLSE, which is rowsum(dO * O) - dLSE
    float* norm;       // [lanes + 1], factors of P for rows with a too large LSE; the last: 0 if all are 1
    float* dq_t;       // [head_dim, lanes], the sum K^T dS so far, or since the last move to dq_total
    double* dq_total;  // [head_dim, lanes]; null: the panel has at most kSumTiles tiles of keys
};

/// Tile memory of one backward worker, beyond TileScratch.
struct GradientScratch : TileScratch {
    float* ds;         // [block_kv, lanes]: dP, then dS
    float* cap_slope;  // [block_kv, lanes]
    double* sums;      // [2, lanes]: row sums of P and of P * dP

    GradientScratch(Arena& arena, const Geometry& g, std::int64_t kv_tiles)
        : TileScratch(arena, g, kv_tiles),
          ds(arena.take<float>(g.block_kv * g.lanes)),
          cap_slope(arena.take<float>(g.block_kv * g.lanes)),
          sums(arena.take<double>(2 * g.lanes)) {}
};

/// Computes scratch.s = P without dropout, scratch.ds = dP with dropout, and scratch.bias_or_dropout = the dropout
/// factors, if any. Masked pairs are undefined. With a softcap, scratch.cap_slope holds its derivative.
void weights_and_dp(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                    const GradientPanel& from, const GradientScratch& scratch);

/// Computes scratch.s = P (dropout applied) and scratch.ds = dS, the gradient of the scores; 0 for hidden pairs.
void score_gradient(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                    const GradientPanel& from, const GradientScratch& scratch);

/// Turns ds of score_gradient() into the gradient of the scaled dot products: times the softcap's derivative.
void through_softcap(const Head& head, const Panel& panel, const KvTile& kv, const GradientScratch& scratch);

/// dV += P^T dO, dK += dS^T Q, dQ^T += K^T dS^T of one tile. p, ds: [keys, lanes]; dv: [keys, v_stride]; dk: [keys,
/// k_stride]
void add_dv(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
            const GradientPanel& from, const float* p, float* dv);
void add_dk(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
            const GradientPanel& from, const float* ds, float* dk);
void add_dq(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
            const GradientPanel& from, const float* ds);

/// The report to an observer about a tile of the backward.
TileReport report_of(TileStep step, const Head& head, const Panel& panel, const KvTile& kv, Coverage coverage,
                     const GradientPanel& from, const float* p, const float* ds);
/// The report after a tile's gradients were added to dq of `from`, dk [keys, k_stride] and dv [keys, v_stride].
TileReport report_of(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                     const GradientPanel& from, const GradientScratch& scratch, const float* dk, const float* dv);

/// One tile of the backward from scores to sums: five GEMMs (S, dP, dV, dK, dQ).
void backward_tile(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                   const GradientPanel& from, const GradientScratch& scratch, float* dk, float* dv);

}  // namespace tessera::cpu::simd
