// SPDX-License-Identifier: Apache-2.0
//
// What a warp of a split step (split_loop.cuh) makes of its own keys and queries: P and dS, and what they add to dV.
#pragma once

#include "cuda/gradient/split_output.cuh"

namespace tessera::cuda::gradient {

template <class T, Config kConfig>
struct SplitScores : SplitOutput<T, kConfig> {
    using Base = SplitOutput<T, kConfig>;
    using Base::add_own_dv;
    using Base::first_column;
    using Base::first_row;
    using Base::for_share;
    using Base::inputs;
    using Base::kHeadDim;
    using Base::kKeyTiles;
    using Base::kOwnItems;
    using Base::kProductItems;
    using Base::kStepQueries;
    using Base::kTiles;
    using Base::lane;
    using Base::multiply_keys;
    using Base::poisoned;
    using Base::rows;
    using Base::score_place;
    using Base::score_tile;
    using Base::store;
    using Base::two;
    using Base::work;
    using typename Base::Planned;
    using typename Base::Scores;
    using typename Base::Sums;

    /// Steps that are not as others: rows or keys that do not exist, or large scores.
    __device__ __forceinline__ bool is_careful(const Planned& planned, int stage) const {
        return planned.masked != planned.edge || has_large_scores(stage);
    }
    /// S and dP of a turn, and between the products of dP P = exp2(S - LSE). `of_p`() gives what is called with (m, j)
    /// once those of a tile are made; behind S, over which nothing is kept. kEdge: some pairs are hidden by the band.
    template <bool kEdge, class OfP>
    __device__ __forceinline__ void make_p(Scores& p, Scores& dp, const Planned& planned, int stage, int turn,
                                           const OfP& of_p) const {
        multiply_keys(p, inputs.k_tile(), inputs.q_tile(stage), turn, NothingBetween{});
        if constexpr (kEdge) this->hide_scores(p, planned.tile, turn);
        const float factor = inputs.launch.params.forward.scale * kLog2E;
        const auto of_tile = of_p();
        const float* const offsets = rows(stage).offset + first_column(turn) + lane() % 4 * 2;
        multiply_keys(dp, inputs.v_tile(), inputs.do_tile(stage), turn, [&](int item) {
            for_share<kProductItems>(item, [&](int m, int j) {
                Base::exponentiate(p[m][j], factor, two(offsets, j));
                of_tile(m, j);
            });
        });
    }
    /// dV += P^T dO of the turn's own queries, and between its products dS = P (dP - delta), stored in tile `ds`.
    template <bool kEdge>
    __device__ __forceinline__ void add_dv_make_ds(Sums& dv, Scores& dp, const Scores& p, const Planned& planned,
                                                   int stage, char* ds, int turn) const {
        const int at = score_place(turn);
        const auto put = [&](int item) {
            for_share<kOwnItems>(item, [&](int m, int j) { store(ds, at, dp[m][j], m, j); });
        };
        const float* const deltas = rows(stage).delta + first_column(turn) + lane() % 4 * 2;
        float2 delta[2];  // of an item's tile and of the next one's: behind a store it would be read late
        delta[0] = two(deltas, 0);
        const Unit unit(planned);
        add_own_dv(dv, p, inputs.do_tile(stage), turn, [&](int item) {
            for_share<kOwnItems>(item, [&](int m, int j) {
                if (m == 0 && j + 1 < kTiles) delta[(j + 1) % 2] = two(deltas, j + 1);
            });
            if constexpr (!kEdge) put(item - 1);
            for_share<kOwnItems>(item, [&](int m, int j) { make_ds(dp[m][j], p[m][j], delta[j % 2], unit); });
        });
        if constexpr (!kEdge) {
            put(kOwnItems - 1);
        } else {
            mend_ds(dp, planned.tile, turn);
#pragma unroll
            for (int i = 0; i < kOwnItems; ++i) put(i);
        }
    }
    /// P and dS of a turn where some pairs may be hidden, or rows have large scores; of_tile(m, j) once both are made.
    template <class OfTile>
    __device__ __forceinline__ void make_careful(Scores& p, Scores& ds, const Planned& planned, int stage, int turn,
                                                 const OfTile& of_tile) const {
        const RowTile& rows = this->rows(stage);
        const int first_key = work.first_key + first_row() + lane() / 4;
        const int column = first_column(turn) + lane() % 4 * 2;
        const int first_query = planned.tile * kStepQueries + score_tile() * kBlockQ + column;
        multiply_keys(p, inputs.k_tile(), inputs.q_tile(stage), turn, NothingBetween{});
        multiply_keys(ds, inputs.v_tile(), inputs.do_tile(stage), turn, NothingBetween{});
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            const float2 delta = two(rows.delta + column, j);
            const Unit unit(planned);
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m) {
                this->exponentiate_nonfinite(p[m][j], rows, column + 8 * j);
                make_ds(ds[m][j], p[m][j], delta, unit);
                hide(p[m][j], ds[m][j], first_query + 8 * j, first_key + 16 * m);
                of_tile(m, j);
            }
        }
    }

 private:
    /// What dS of a step is held times. At head_dim 256 no register is left for it.
    struct Unit {
        const Planned& planned;
        float kept = 1;

        __device__ __forceinline__ explicit Unit(const Planned& of_step) : planned(of_step) {
            if constexpr (Base::kHeld && !Base::kTight) kept = read();
        }
        __device__ __forceinline__ float read() const { return *static_cast<const volatile float*>(&planned.ds_unit); }
        __device__ __forceinline__ float operator()() const { return Base::kHeld && Base::kTight ? read() : kept; }
    };
    /// dP becomes dS, times the unit of its head: a power of two, by which nothing is rounded.
    __device__ static __forceinline__ void make_ds(float (&dp)[4], const float (&p)[4], const float2& delta,
                                                   const Unit& of_head) {
        const float unit = of_head();
        const float held[2] = {delta.x * unit, delta.y * unit};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if constexpr (Base::kHeld) dp[e] = p[e] * fmaf(dp[e], unit, -held[e % 2]);
            else dp[e] = p[e] * (dp[e] - (e % 2 == 0 ? delta.x : delta.y));
        }
    }
    /// 0 times what is no number is none: hidden pairs have P = 0, and dS = 0 here.
    __device__ __forceinline__ void mend_ds(Scores& ds, int tile, int turn) const {
        if (!poisoned(ds)) return;
        const int first_key = work.first_key + first_row() + lane() / 4;
        const int first_query = tile * kStepQueries + score_tile() * kBlockQ + first_column(turn) + lane() % 4 * 2;
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) hide(ds[m][j], ds[m][j], first_query + 8 * j, first_key + 16 * m);
        }
    }
    /// P and dS of pairs that are not visible are 0, whatever dP is.
    __device__ __forceinline__ void hide(float (&p)[4], float (&ds)[4], int query, int key) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (this->sees(query + e % 2, key + e / 2 * 8)) continue;
            p[e] = 0;
            ds[e] = 0;
        }
    }
    /// Does a row of the step have large scores?
    __device__ __forceinline__ bool has_large_scores(int stage) const {
        const auto* const norms = reinterpret_cast<const float2*>(inputs.rows(stage).norm);
        float2 x = norms[lane()];
        bool any = x.x + x.y != 0.0F;  // none is negative
        if constexpr (kConfig.query_tiles > 1) {
            x = norms[sizeof(RowTile) / sizeof(float2) + lane()];
            any |= x.x + x.y != 0.0F;
        }
        return __any_sync(0xFFFFFFFF, any);
    }
};

}  // namespace tessera::cuda::gradient
