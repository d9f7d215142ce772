// SPDX-License-Identifier: Apache-2.0
//
// One step of the forward on the SIMD path: a panel of queries against a tile of keys. The schedules differ only in the
// order in which they call these functions. The backward's counterpart is gradient_step.hpp.
#pragma once

#include "core/arena.hpp"
#include "cpu/steps/call.hpp"

namespace tessera::cpu::simd {

/// Tile memory of one worker.
struct TileScratch {
    float* k;                // [kv_tiles * block_kv, k_stride]
    float* v;                // [kv_tiles * block_kv, v_stride]
    float* s;                // [block_kv, lanes]: scores, then weights
    float* bias_or_dropout;  // [block_kv, lanes]: bias, or dropout factors
    float* rescale;          // [lanes]

    explicit TileScratch(Arena& arena, const Geometry& g, std::int64_t kv_tiles = 1)
        : k(arena.take<float>(kv_tiles * g.block_kv * g.k_stride)),
          v(arena.take<float>(kv_tiles * g.block_kv * g.v_stride)),
          s(arena.take<float>(g.block_kv * g.lanes)),
          bias_or_dropout(arena.take<float>(g.block_kv * g.lanes)),
          rescale(arena.take<float>(g.lanes)) {}
};

/// The running result of a panel: state and unnormalised O^T, [head_dim_v, lanes] unless its owner lays it out
/// otherwise.
struct PanelSums {
    RowState state;
    float* o = nullptr;
    bool started = false;  ///< false: nothing was added yet, and o is uninitialised

    PanelSums(Arena& arena, const Geometry& g) : PanelSums(arena.take<float>(floats(g)), g) {}
    /// Views existing memory: m, l, then O^T.
    PanelSums(float* memory, const Geometry& g) {
        if (memory == nullptr) return;  // the workspace is only being measured
        state = {memory, memory + g.lanes};
        o = memory + 2 * g.lanes;
    }
    static std::int64_t floats(const Geometry& g) { return (2 + g.head_dim_v) * g.lanes; }
};

/// The report to an observer about a panel and some keys, with the running sums of a forward.
TileReport report_of(TileStep step, const Head& head, const Panel& panel, Range keys, Coverage coverage,
                     const PanelSums& sums);

/// Loads K and V rows [first, first + keys) in fp32. With `borrow`, usable rows are read where they lie; copying pays
/// if several panels read the tile.
KvTile load_kv(const Head& head, const Geometry& g, std::int64_t first, std::int64_t keys, const TileScratch& scratch,
               bool borrow);

/// Calls body(kv tile, coverage) in ascending order for the key tiles that the mask leaves to a panel. The last tile
/// ends with the last key that some query sees.
template <class Body>
void for_each_kv_tile(const Head& head, const Geometry& g, const Panel& panel, const TileScratch& scratch,
                      const Body& body) {
    const Range keys = head.keys_of(panel);
    for (std::int64_t first = keys.begin / g.block_kv * g.block_kv; first < keys.end; first += g.block_kv) {
        const KvTile kv = load_kv(head, g, first, std::min(g.block_kv, keys.end - first), scratch, true);
        body(kv, head.coverage(panel, kv));
    }
}

/// Loads Q^T of a panel, with the scale. q_t: [head_dim, panel.lanes]
void load_queries(const Head& head, const Geometry& g, const Panel& panel, float* q_t);

/// s = the scores of the tile: S^T = K Q^T, the score rule (softcap, ALiBi, bias), and -inf for masked pairs. s:
/// [kv.keys, panel.lanes]
void scores(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
            const float* q_t, float* s, float* scratch, float* cap_slope = nullptr);

/// O += P V, after dropout: o = o * rescale + V^T s (Into::scaled_add), or as `into` says. s: weights; o: [head_dim_v,
/// panel.lanes]
void add_values(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage, float* s,
                float* scratch, float* o, Into into, const float* rescale);

/// The fa2 step, one pass of its inner loop: scores, mask, online softmax (m, l and the rescale factor), and
/// O = rescale * O + P V.
void online_softmax_step(const Head& head, const Geometry& g, const Panel& panel, const KvTile& kv, Coverage coverage,
                         const float* q_t, const TileScratch& scratch, PanelSums& sums);

/// Epilogue, first half: adds the sinks to the state and divides O by l. If the undivided sum overflowed but the
/// quotient may not, the element is summed again from weights that are divided first. spare_o: another [head_dim_v,
/// lanes]
void normalise(const Head& head, const Geometry& g, const Panel& panel, const float* q_t, const TileScratch& scratch,
               PanelSums& sums, float* spare_o);

/// Multiplies O by factors [lanes] that divide it by l, with the same care for overflow. state: with the sinks
void normalise_by(const float* factors, const Head& head, const Geometry& g, const Panel& panel, const float* q_t,
                  const TileScratch& scratch, PanelSums& sums, float* spare_o);

/// Recomputes elements of O that are not finite, from weights that are divided by l first. state: of all keys of the
/// panel
void recompute_overflow(const Head& head, const Geometry& g, const Panel& panel, const float* q_t,
                        const TileScratch& scratch, const RowState& state, float* o, float* spare_o);

/// Epilogue, second half: writes normalised O and the LSE of a panel; for rows that saw no key zeros, and the sink or
/// -inf.
void store_o_and_lse(const Head& head, const Geometry& g, const Panel& panel, const PanelSums& sums, float* ones,
                     const ForwardArgs& args);

}  // namespace tessera::cpu::simd
