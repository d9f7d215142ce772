// SPDX-License-Identifier: Apache-2.0
//
// The work of one warp in a step where every warp computes P and dS of its own keys and queries in registers. All other
// instructions are interleaved with the mma of a GEMM.
#pragma once

#include "cuda/gradient/main/step_plan.cuh"
#include "cuda/tile/ahead.cuh"

namespace tessera::cuda::gradient {

/// A warp has kKeyTiles * 16 keys and kQueries queries of S^T and dP^T at once, in kPasses passes over its queries of a
/// step; and kSumTiles * 16 keys and kColumns * 8 dims of dV and dK.
template <class T, Config kConfig>
struct WarpTile {
    using Planner = StepPlanner<T, kConfig>;
    static constexpr int kHeadDim = kConfig.head_dim;
    static constexpr int kStepQueries = Planner::kStepQueries;
    static constexpr bool kFp16 = Planner::kFp16;
    static constexpr int kQueries = kConfig.score_queries;
    static constexpr int kPasses = kStepQueries / kConfig.query_parts() / kQueries;
    static constexpr int kTiles = kQueries / 8;
    static constexpr int kKeyTiles = kConfig.key_tiles_of_scores();
    static constexpr int kSumTiles = kConfig.key_tiles_of_sums();
    static constexpr int kColumns = kHeadDim / kConfig.column_parts() / 8;
    using Scores = float[kKeyTiles][kTiles][4];  // [16 keys][8 queries][4]
    using Sums = float[kSumTiles][kColumns][4];  // [16 keys][8 dims][4]
    using Address = MatrixAddress<kHeadDim>;
    static constexpr int kScoreItems = kHeadDim / 16 * (kTiles / 2);  // items (tile/ahead.cuh) of S^T = K Q^T
    static constexpr int kSumItems = kQueries / 16 * (kColumns / 2);  // items of dV += P^T dO

    const CtaTiles<T, kConfig> tiles;

    /// The warp's first key of S^T and dP^T, and its number among the warps that have the same keys.
    __device__ static __forceinline__ int first_row() {
        return warp_number() % kConfig.warps_of_keys(kKeyTiles) * (16 * kKeyTiles);
    }
    __device__ static __forceinline__ int query_part() { return warp_number() / kConfig.warps_of_keys(kKeyTiles); }
    /// The warp's first key and first chunk of dV and dK.
    __device__ static __forceinline__ int first_sum_row() {
        return warp_number() % kConfig.warps_of_keys(kSumTiles) * (16 * kSumTiles);
    }
    __device__ static __forceinline__ int first_sum_chunk() {
        return kConfig.split_queries ? 0 : warp_number() / kConfig.warps_of_keys(kSumTiles) * kColumns;
    }
    /// The tile of kBlockQ queries that holds the warp's queries, and the column in it of the first query of a pass.
    __device__ static __forceinline__ int query_tile() { return query_part() * (kQueries * kPasses) / kBlockQ; }
    __device__ static __forceinline__ int first_column(int pass) {
        return query_part() * (kQueries * kPasses) % kBlockQ + pass * kQueries;
    }
    /// Byte offset of the thread's first scores of a pass in a [keys][kBlockQ] tile.
    __device__ static __forceinline__ int score_offset(int pass) {
        return chunk_offset<kBlockQ>(first_row() + lane_number() / 4, first_column(pass) / kChunk) +
               lane_number() % 4 * 4;
    }
    /// Rounds scores (m, j) into a [keys][kBlockQ] tile; `offset`: score_offset().
    __device__ static __forceinline__ void store(char* tile, int offset, const float (&x)[4], int m, int j) {
        const std::uint32_t rounded[2] = {ptx::pack<T>(x[0], x[1]), ptx::pack<T>(x[2], x[3])};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            *reinterpret_cast<std::uint32_t*>(tile + (offset ^ 16 * j) + (16 * m + 8 * r) * kBlockQ * 2) = rounded[r];
        }
    }

    /// True if a step takes the slow path: rows or keys do not exist, or rows have a large |LSE|.
    __device__ __forceinline__ bool needs_predicates(const PlannedStep& planned, int stage) const {
        return planned.masked != planned.edge || has_large_rows(stage);
    }
    /// Computes S^T and dP^T of a pass, and between the mma of dP^T: P^T = exp2(S^T - LSE). `on_p`() is called after
    /// S^T; the function that it returns is called with (m, j) when those elements of P^T are ready. kEdge: the band
    /// hides some pairs.
    template <bool kEdge, class OnP>
    __device__ __forceinline__ void compute_p(Scores& p, Scores& dp, const PlannedStep& planned, int stage, int pass,
                                              const OnP& on_p) const {
        multiply_keys(p, tiles.k_tile(), tiles.q_tile(stage), pass, NothingBetween{});
        if constexpr (kEdge) mask_scores(p, planned.tile, pass);
        const float factor = tiles.launch.params.forward.scale * kLog2E;
        const auto on_tile = on_p();
        const float* const offsets = rows(stage).offset + first_column(pass) + lane_number() % 4 * 2;
        multiply_keys(dp, tiles.v_tile(), tiles.do_tile(stage), pass, [&](int item) {
            for_item<kScoreItems>(item, [&](int m, int j) {
                exponentiate<T>(p[m][j], factor, two(offsets, j));
                on_tile(m, j);
            });
        });
    }
    /// dV += P^T dO of the pass's own queries, and between its mma: dS^T = P^T (dP^T - delta), stored in tile `ds`.
    template <bool kEdge>
    __device__ __forceinline__ void add_dv_compute_ds(Sums& dv, Scores& dp, const Scores& p, const PlannedStep& planned,
                                                      int stage, char* ds, int pass) const {
        const int offset = score_offset(pass);
        const auto put = [&](int item) {
            for_item<kSumItems>(item, [&](int m, int j) { store(ds, offset, dp[m][j], m, j); });
        };
        const float* const deltas = rows(stage).delta + first_column(pass) + lane_number() % 4 * 2;
        float2 delta[2];  // for this item's tile and the next one's: a load issued after a store would come late
        delta[0] = two(deltas, 0);
        const StepScale scale(planned);
        add_own_dv(dv, p, tiles.do_tile(stage), pass, [&](int item) {
            for_item<kSumItems>(item, [&](int m, int j) {
                if (m == 0 && j + 1 < kTiles) delta[(j + 1) % 2] = two(deltas, j + 1);
            });
            if constexpr (!kEdge) put(item - 1);
            for_item<kSumItems>(item, [&](int m, int j) { compute_ds(dp[m][j], p[m][j], delta[j % 2], scale); });
        });
        if constexpr (!kEdge) {
            put(kSumItems - 1);
        } else {
            zero_hidden_ds(dp, planned.tile, pass);
#pragma unroll
            for (int i = 0; i < kSumItems; ++i) put(i);
        }
    }
    /// The slow path: computes P^T and dS^T of a pass after both GEMMs, with a predicate for each pair. on_tile(m, j)
    /// is called when both are ready.
    template <class OnTile>
    __device__ __forceinline__ void compute_with_predicates(Scores& p, Scores& ds, const PlannedStep& planned,
                                                            int stage, int pass, const OnTile& on_tile) const {
        const RowTile& rows = this->rows(stage);
        const int first_key = tiles.work.first_key + first_row() + lane_number() / 4;
        const int column = first_column(pass) + lane_number() % 4 * 2;
        const int first_query = planned.tile * kStepQueries + query_tile() * kBlockQ + column;
        multiply_keys(p, tiles.k_tile(), tiles.q_tile(stage), pass, NothingBetween{});
        multiply_keys(ds, tiles.v_tile(), tiles.do_tile(stage), pass, NothingBetween{});
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            const float2 delta = two(rows.delta + column, j);
            const StepScale scale(planned);
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m) {
                exponentiate_large<T>(p[m][j], tiles.launch.params.forward.scale, rows, column + 8 * j);
                compute_ds(ds[m][j], p[m][j], delta, scale);
                zero_hidden(p[m][j], ds[m][j], first_query + 8 * j, first_key + 16 * m);
                on_tile(m, j);
            }
        }
    }

    /// dV += P^T dO of the warp's own queries of a pass. P^T comes from registers, rounded.
    template <class Between>
    __device__ __forceinline__ void add_own_dv(Sums& dv, const Scores& p, const char* d_o, int pass,
                                               const Between& between) const {
        const Address b = own_columns(d_o, pass);
        multiply<T, kQueries / 16, kSumTiles, kColumns>(
            [&](int m) -> float(&)[kColumns][4] { return dv[m]; },
            [&](int step, int m, std::uint32_t(&to)[4]) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float(&x)[4] = p[m][2 * step + i / 2];
                    to[i] = ptx::pack<T>(x[i % 2 * 2], x[i % 2 * 2 + 1]);
                }
            },
            [&](int step, int n, std::uint32_t(&to)[4]) { ptx::ldmatrix_x4_trans(to, b.at(16 * step, 2 * n)); },
            between);
    }
    /// dK += dS^T Q of the warp's own queries of a pass. `ds`: the tile that has them.
    template <class Between>
    __device__ __forceinline__ void add_own_dk(Sums& dk, const char* ds, const char* q, int pass,
                                               const Between& between) const {
        const MatrixAddress<kBlockQ> a(ds, first_sum_row() + lane_number() % 16,
                                       first_column(pass) / kChunk + lane_number() / 16);
        const Address b = own_columns(q, pass);
        multiply<T, kQueries / 16, kSumTiles, kColumns>(
            [&](int m) -> float(&)[kColumns][4] { return dk[m]; },
            [&](int step, int m, std::uint32_t(&to)[4]) { ptx::ldmatrix_x4(to, a.at(16 * m, 2 * step)); },
            [&](int step, int n, std::uint32_t(&to)[4]) { ptx::ldmatrix_x4_trans(to, b.at(16 * step, 2 * n)); },
            between);
    }

 private:
    /// The factor of dS in a step. At head_dim 256 no register is left for it, so it is read from the plan.
    struct StepScale {
        const PlannedStep& planned;
        float value = 1;

        __device__ __forceinline__ explicit StepScale(const PlannedStep& of_step) : planned(of_step) {
            if constexpr (kFp16 && !Planner::kFewRegisters) value = read();
        }
        __device__ __forceinline__ float read() const { return *static_cast<const volatile float*>(&planned.ds_scale); }
        __device__ __forceinline__ float operator()() const { return kFp16 && Planner::kFewRegisters ? read() : value; }
    };

    __device__ __forceinline__ const RowTile& rows(int stage) const { return tiles.rows(stage, query_tile()); }

    /// Calls on_tile(m, j) for the tiles of scores that belong to item `item` of kItems.
    template <int kItems, class OnTile>
    __device__ static __forceinline__ void for_item(int item, const OnTile& on_tile) {
        constexpr int kAll = kKeyTiles * kTiles;
        if (item < 0) return;
#pragma unroll
        for (int t = item * kAll / kItems; t < (item + 1) * kAll / kItems; ++t) on_tile(t % kKeyTiles, t / kKeyTiles);
    }

    /// Row data of the thread's two queries in tile j.
    __device__ static __forceinline__ float2 two(const float* from, int j) {
        return *reinterpret_cast<const float2*>(from + 8 * j);
    }

    /// s = the warp's rows of `keys` times the rows of `queries` in this pass: K Q^T, V dO^T.
    template <class Between>
    __device__ __forceinline__ void multiply_keys(Scores& s, const char* keys, const char* queries, int pass,
                                                  const Between& between) const {
        const int first_query = query_part() * (kQueries * kPasses) + pass * kQueries;
        const Address a = Address::rows_first(keys, first_row(), lane_number());
        const Address b = Address::chunks_first(queries + first_query * kHeadDim * 2, lane_number());
        clear(s);
        multiply<T, kHeadDim / 16, kKeyTiles, kTiles>(
            [&](int m) -> float(&)[kTiles][4] { return s[m]; },
            [&](int step, int m, std::uint32_t(&to)[4]) { ptx::ldmatrix_x4(to, a.at(16 * m, 2 * step)); },
            [&](int step, int n, std::uint32_t(&to)[4]) { ptx::ldmatrix_x4(to, b.at(16 * n, 2 * step)); }, between);
    }
    /// The warp's columns of its own queries of a pass: B of the GEMMs of dV and dK.
    __device__ static __forceinline__ Address own_columns(const char* queries, int pass) {
        const int first_query = query_part() * (kQueries * kPasses) + pass * kQueries;
        return {queries + first_query * (kHeadDim * 2), lane_number() % 16, first_sum_chunk() + lane_number() / 16};
    }

    /// Scores of pairs that are not visible become -inf, in a step whose queries and keys all exist.
    __device__ __forceinline__ void mask_scores(Scores& s, int tile, int pass) const {
        const Band32& band = tiles.work.band32;
        const int key = tiles.work.first_key + first_row() + lane_number() / 4;
        const int query = tile * kStepQueries + query_tile() * kBlockQ + first_column(pass) + lane_number() % 4 * 2;
        const int first = key - query - band.low;  // distance of the thread's first pair from the band's lower edge
        const int width = band.high - band.low;
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int inside = first + 16 * m + e / 2 * 8 - 8 * j - e % 2;
                    if (static_cast<unsigned>(inside) > static_cast<unsigned>(width)) s[m][j][e] = -INFINITY;
                }
            }
        }
    }
    /// dP becomes dS times the scale. The scale is a power of two, so multiplying by it is exact.
    __device__ static __forceinline__ void compute_ds(float (&dp)[4], const float (&p)[4], const float2& delta,
                                                      const StepScale& of_step) {
        const float scale = of_step();
        const float scaled[2] = {delta.x * scale, delta.y * scale};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if constexpr (kFp16) dp[e] = p[e] * fmaf(dp[e], scale, -scaled[e % 2]);
            else dp[e] = p[e] * (dp[e] - (e % 2 == 0 ? delta.x : delta.y));
        }
    }
    /// Hidden pairs have P = 0, and 0 * Inf is NaN: their dS becomes 0 if the thread has met any NaN.
    __device__ __forceinline__ void zero_hidden_ds(Scores& ds, int tile, int pass) const {
        if (!any_nonfinite(ds)) return;
        const int first_key = tiles.work.first_key + first_row() + lane_number() / 4;
        const int first_query =
            tile * kStepQueries + query_tile() * kBlockQ + first_column(pass) + lane_number() % 4 * 2;
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) zero_hidden(ds[m][j], ds[m][j], first_query + 8 * j, first_key + 16 * m);
        }
    }
    /// P and dS of pairs that are not visible become 0, whatever dP is.
    __device__ __forceinline__ void zero_hidden(float (&p)[4], float (&ds)[4], int query, int key) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (tiles.sees(query + e % 2, key + e / 2 * 8)) continue;
            p[e] = 0;
            ds[e] = 0;
        }
    }
    /// True if some row of the step has a large |LSE| (RowTile::norm).
    __device__ __forceinline__ bool has_large_rows(int stage) const {
        const auto* const norms = reinterpret_cast<const float2*>(tiles.rows(stage).norm);
        float2 x = norms[lane_number()];
        bool any = x.x + x.y != 0.0F;  // none is negative
        if constexpr (kConfig.query_tiles > 1) {
            x = norms[sizeof(RowTile) / sizeof(float2) + lane_number()];
            any |= x.x + x.y != 0.0F;
        }
        return any_lane(any);
    }
};

}  // namespace tessera::cuda::gradient
