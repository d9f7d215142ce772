// SPDX-License-Identifier: Apache-2.0
//
// Memory and sums of the backward passes around their tile loops: the panels prepared first, the fp32 sums, and the
// stores of the results. All of it is O(len).
#pragma once

#include <vector>

#include "cpu/steps/simd/gradient_step.hpp"

namespace tessera::cpu::simd {

/// Longer sums over tiles are cut into sums of this many tiles: a single fp32 sum of a million tiles loses the small
/// ones.
inline constexpr std::int64_t kSumTiles = 256;

/// Fills LSE, +inf for empty rows, and delta of a panel's queries. In 16 bits delta is -dLSE, which rowsum(P * dP)
/// completes (sum_delta()). d_o: [queries, v_stride]; o: scratch, likewise
void load_lse_and_delta(const BackwardArgs& args, const Head& head, const Geometry& g, const Panel& panel,
                        const float* d_o, float* o, float* lse, float* delta);

/// Global memory of a backward call.
class GradientMemory {
 public:
    GradientMemory(Arena& arena, const Plan& plan, const Geometry& g);

    /// Panel `index` of a head.
    GradientPanel panel(const Head& head, std::int64_t index) const;

    /// The sums of a kv head from key `first` on: dK [len_kv, k_stride], dV [len_kv, v_stride]. They cover all tiles,
    /// or the last ones, at most kSumTiles.
    float* dk(const Sequence& sequence, std::int64_t kv_head, std::int64_t first) const;
    float* dv(const Sequence& sequence, std::int64_t kv_head, std::int64_t first) const;

    /// Must be called after each tile added to dK and dV of keys [begin, end), a tile of the plan, or to dQ of a panel.
    /// After kSumTiles calls they move the sum to the total.
    void added_to_keys(const Head& head, const Range& keys) const;
    void added_to_queries(const Head& head, std::int64_t index) const;

    /// Fills the panels: Q, dO and their transposes in fp32, LSE, and delta, which sum_delta() may complete. Clears the
    /// sums.
    void prepare(const BackwardCall& call);

    /// Fills `norm` of a panel, when some row needs it.
    void fill_norm(const Head& head, std::int64_t index, const GradientScratch& scratch) const;

    /// Adds rowsum(P * dP) to `delta` of a panel if O is rounded to 16 bits. rowsum(dO * O) would include that
    /// rounding, which affects all dS of a row if V has a mean (docs/decisions/delta-of-rounded-output.md).
    void sum_delta(const Head& head, std::int64_t index, const GradientScratch& scratch) const;

    /// Memory for a HeadTasks of the call.
    std::int64_t* task_ends() const { return ends_; }

    /// The panels of all query heads, as tasks. Valid until another HeadTasks takes task_ends().
    HeadTasks panels(const BackwardCall& call) const {
        return {call, problem_.heads_q, ends_, [&](const Sequence& m) { return g_.panels_of(m); }};
    }

    /// Writes dQ, dK, dV and dsinks.
    void finish(const BackwardCall& call) const;

 private:
    void prepare_panel(const BackwardArgs& args, const Head& head, std::int64_t index, float* o) const;
    void clear_keys(std::int64_t first, std::int64_t count) const;
    void store_sinks(const BackwardCall& call) const;
    std::int64_t key_row(const Sequence& sequence, std::int64_t kv_head, std::int64_t first) const;

    const Problem& problem_;
    Geometry g_;
    std::int64_t panel_floats_;
    std::int64_t* ends_;     // take_task_ends()
    float* panels_;          // [heads_q, total_panels, panel_floats]
    float* dk_;              // [heads_kv, rows_kv, k_stride]
    float* dv_;              // [heads_kv, rows_kv, v_stride]
    bool queries_in_parts_;  ///< a panel may have more than kSumTiles tiles
    bool keys_in_parts_;     ///< a key tile may have more than kSumTiles panels
    std::int32_t* panel_tiles_ =
        nullptr;                         // [heads_q, total_panels]: tiles added to dQ since its last move to the total
    std::int32_t* key_tiles_ = nullptr;  // [heads_kv, key_tiles()]: likewise to dK and dV
    double* dk_total_ = nullptr;         // like dk_, if keys_in_parts_
    double* dv_total_ = nullptr;
    std::vector<float*> o_;  // per worker: [block_q, v_stride]
};

/// dbias = sum of dS over all pairs that read an element of the bias. It recomputes the tiles and stores no matrix.
class BiasGradient {
 public:
    BiasGradient(Arena& arena, const Plan& plan, const Geometry& g);
    void run(const BackwardCall& call, const GradientMemory& memory, const std::vector<GradientScratch>& workers) const;

 private:
    /// Sums of one worker. After kSumTiles panels `sum` is added to `total`.
    struct Sums {
        float* sum = nullptr;     // [len_kv, lanes], dS^T
        double* total = nullptr;  // like sum; null: there are at most kSumTiles panels
        std::int64_t panels = 0;
    };
    void add_head(const GradientMemory& memory, const Head& head, Range panels, const GradientScratch& scratch,
                  Sums& sums) const;
    void move_to_total(Sums& sums) const;
    void store(const TensorView& dbias, std::int64_t batch, std::int64_t head, Range queries, const Sums& sums) const;

    Geometry g_;
    std::int64_t len_kv_;
    std::vector<Sums> sums_;  // per worker
};

/// The memory of a backward call whose tiles are run by backward_tile().
struct BackwardWorkspace {
    GradientMemory memory;
    std::vector<GradientScratch> workers;
    BiasGradient bias;

    /// `kv_tiles`: how many K/V tiles a worker keeps loaded at once.
    BackwardWorkspace(Arena& arena, const Plan& plan, const Geometry& g, std::int64_t kv_tiles = 1)
        : memory(arena, plan, g), bias(arena, plan, g) {
        for (int worker = 0; worker < plan.threads; ++worker) workers.emplace_back(arena, g, kv_tiles);
    }

    /// Runs all work that precedes the tiles.
    void prepare(const BackwardCall& call);
};

}  // namespace tessera::cpu::simd
