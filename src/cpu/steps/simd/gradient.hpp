// SPDX-License-Identifier: Apache-2.0
//
// What the backward passes share around their tile loops: the panels made ready before, the sums in fp32, and the
// results written after. All of it is O(len).
#pragma once

#include <vector>

#include "cpu/steps/simd/gradient_step.hpp"

namespace tessera::cpu::simd {

/// Slow memory of a backward call.
class GradientMemory {
 public:
    GradientMemory(Arena& arena, const Plan& plan, const Geometry& g);

    /// Panel `index` of a head.
    GradientPanel panel(const Head& head, std::int64_t index) const;

    /// Sums of a kv head from key `first` on: dK [len_kv, k_stride], dV [len_kv, v_stride].
    float* dk(const Sequence& sequence, std::int64_t kv_head, std::int64_t first) const;
    float* dv(const Sequence& sequence, std::int64_t kv_head, std::int64_t first) const;

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

    const Problem& problem_;
    Geometry g_;
    std::int64_t panel_floats_;
    std::int64_t* ends_;     // of tasks
    float* panels_;          // [heads_q, total_panels, panel_floats]
    float* dk_;              // [heads_kv, rows_kv, k_stride]
    float* dv_;              // [heads_kv, rows_kv, v_stride]
    std::vector<float*> o_;  // per worker: [block_q, v_stride]
};

/// dbias = sum of dS over everything that reads an element of the bias. Recomputes the tiles: no matrix is stored.
class BiasGradient {
 public:
    BiasGradient(Arena& arena, const Plan& plan, const Geometry& g);
    void run(const BackwardCall& call, const GradientMemory& memory, const std::vector<GradientScratch>& workers) const;

 private:
    void add_head(const GradientMemory& memory, const Head& head, Range panels, const GradientScratch& scratch,
                  float* sums) const;
    void store(const TensorView& dbias, std::int64_t batch, std::int64_t head, Range queries, const float* sums,
               std::int64_t len_kv) const;

    Geometry g_;
    std::vector<float*> sums_;  // per worker: [len_kv, lanes], dS^T
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
