// SPDX-License-Identifier: Apache-2.0
//
// What the backward passes share around their tile loops: the panels made ready before, the sums in fp32, and the
// results written after. All of it is O(len).
#pragma once

#include <vector>

#include "cpu/steps/simd/gradient_step.hpp"

namespace tessera::cpu::simd {

/// A sum of more tiles than this is made of sums of so many: one fp32 number that a million tiles are added to loses
/// the small ones.
inline constexpr std::int64_t kSumTiles = 256;

/// Slow memory of a backward call.
class GradientMemory {
 public:
    GradientMemory(Arena& arena, const Plan& plan, const Geometry& g);

    /// Panel `index` of a head.
    GradientPanel panel(const Head& head, std::int64_t index) const;

    /// Sums of a kv head from key `first` on: dK [len_kv, k_stride], dV [len_kv, v_stride], of all tiles or of the last
    /// ones, at most kSumTiles.
    float* dk(const Sequence& sequence, std::int64_t kv_head, std::int64_t first) const;
    float* dv(const Sequence& sequence, std::int64_t kv_head, std::int64_t first) const;

    /// Follow each tile that was added to dK and dV of keys [begin, end), a tile of the plan, or to dQ of a panel.
    /// After kSumTiles of them they move the sum to the total.
    void added_to_keys(const Head& head, const Range& keys) const;
    void added_to_queries(const Head& head, std::int64_t index) const;

    /// Fills the panels: Q, dO and their transposes in fp32, LSE, delta (short of what sum_delta() adds). Clears the
    /// sums.
    void prepare(const BackwardCall& call);

    /// Fills `norm` of a panel, when some row needs it.
    void fill_norm(const Head& head, std::int64_t index, const GradientScratch& scratch) const;

    /// Adds rowsum(P * dP) to `delta` of a panel, where O is rounded to 16 bits: rowsum(dO * O) would take that
    /// rounding, and where V has a mean all dS of a row with it (docs/decisions/delta-of-rounded-output.md).
    void sum_delta(const Head& head, std::int64_t index, const GradientScratch& scratch) const;

    /// For HeadTasks of the call.
    std::int64_t* task_ends() const { return ends_; }

    /// The panels of all query heads, as tasks. Valid until another HeadTasks takes task_ends().
    HeadTasks panels(const BackwardCall& call) const {
        return {call, problem_.heads_q, ends_, [&](const Sequence& m) { return g_.panels_of(m); }};
    }

    /// Writes dQ, dK and dV.
    void finish(const BackwardCall& call) const;

 private:
    void prepare_panel(const BackwardArgs& args, const Head& head, std::int64_t index, float* o) const;
    void clear_keys(std::int64_t first, std::int64_t count) const;
    std::int64_t key_row(const Sequence& sequence, std::int64_t kv_head, std::int64_t first) const;

    const Problem& problem_;
    Geometry g_;
    std::int64_t panel_floats_;
    std::int64_t* ends_;                   // of tasks
    float* panels_;                        // [heads_q, total_panels, panel_floats]
    float* dk_;                            // [heads_kv, rows_kv, k_stride]
    float* dv_;                            // [heads_kv, rows_kv, v_stride]
    bool queries_in_parts_;                ///< a panel may have more than kSumTiles tiles
    bool keys_in_parts_;                   ///< keys may have
    std::int32_t* panel_tiles_ = nullptr;  // [heads_q, total_panels]: added to dQ since it was last moved to the total
    std::int32_t* key_tiles_ = nullptr;    // [heads_kv, key_tiles()]: likewise to dK and dV
    double* dk_total_ = nullptr;           // as dk_, when keys_in_parts_
    double* dv_total_ = nullptr;
    std::vector<float*> o_;  // per worker: [block_q, v_stride]
};

/// dbias = sum of dS over everything that reads an element of the bias. Recomputes the tiles: no matrix is stored.
class BiasGradient {
 public:
    BiasGradient(Arena& arena, const Plan& plan, const Geometry& g);
    void run(const BackwardCall& call, const GradientMemory& memory, const std::vector<GradientScratch>& workers) const;

 private:
    /// Sums of one worker. After kSumTiles panels `sum` is added to `total`.
    struct Sums {
        float* sum = nullptr;     // [len_kv, lanes], dS^T
        double* total = nullptr;  // likewise, or null: there are no more panels than that
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

    /// Everything that comes before the tiles.
    void prepare(const BackwardCall& call);
};

}  // namespace tessera::cpu::simd
