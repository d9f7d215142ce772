// SPDX-License-Identifier: Apache-2.0
#include "core/numeric.hpp"
#include "cpu/steps/simd/gradient.hpp"

namespace tessera::cpu::simd {
namespace {

/// The range of indices along a dimension: all if the bias broadcasts over it, else `index` alone.
Range broadcast_range(std::int64_t size, std::int64_t full, std::int64_t index) {
    return size == 1 ? Range{0, full} : Range{index, index + 1};
}

}  // namespace

BiasGradient::BiasGradient(Arena& arena, const Plan& plan, const Geometry& g) : g_(g), len_kv_(plan.problem.len_kv) {
    const Problem& p = plan.problem;
    if (!p.bias_gradient) return;
    // An upper bound of the number of panels that are summed in an element of dbias, whose shape is not known before
    // the call.
    const bool in_parts = saturating_product(p.batch, saturating_product(p.heads_q, g.panels)) > kSumTiles;
    for (int worker = 0; worker < plan.threads; ++worker) {
        Sums sums{.sum = arena.take<float>(len_kv_, g.lanes)};
        if (in_parts) sums.total = arena.take<double>(len_kv_, g.lanes);
        sums_.push_back(sums);
    }
}

void BiasGradient::move_to_total(Sums& sums) const {
    simd::move_to_total(sums.sum, sums.total, len_kv_, g_.lanes);
    sums.panels = 0;
}

/// Adds dS of some panels of a head; all panels add to the same lanes.
void BiasGradient::add_head(const GradientMemory& memory, const Head& head, Range panels,
                            const GradientScratch& scratch, Sums& sums) const {
    for (std::int64_t index = panels.begin; index < std::min(panels.end, g_.panels_of(head.sequence)); ++index) {
        const Panel panel(index, g_.block_q, head.sequence.len_q);
        for_each_kv_tile(head, g_, panel, scratch, [&](const KvTile& kv, Coverage coverage) {
            score_gradient(head, g_, panel, kv, coverage, memory.panel(head, index), scratch);
            // Padding lanes are skipped. They hold dS of a zero query, which may be NaN, and may belong to another
            // sequence's row of this bias or to the row that sums all lanes.
            for (std::int64_t j = 0; j < kv.keys; ++j) {
                float* const to = sums.sum + (kv.first + j) * g_.lanes;
                const float* const ds = scratch.ds + j * panel.lanes;
                for (std::int64_t lane = 0; lane < panel.queries; ++lane) to[lane] += ds[lane];
            }
        });
        if (++sums.panels == kSumTiles && sums.total != nullptr) move_to_total(sums);
    }
}

/// Writes the sums of `queries` (one row if the bias has one), summing over keys if the bias has one column.
void BiasGradient::store(const TensorView& dbias, std::int64_t batch, std::int64_t head, Range queries,
                         const Sums& sums) const {
    const HeadRows to = bias_rows(dbias, batch, head);
    const bool one_row = dbias.shape[2] == 1;
    const bool one_column = dbias.shape[3] == 1;
    for (std::int64_t row = queries.begin; row < queries.end; ++row) {
        double row_total = 0;
        for (std::int64_t j = 0; j < len_kv_; ++j) {
            const float* lanes = sums.sum + j * g_.lanes;
            double value = 0;
            if (one_row) {
                for (std::int64_t i = 0; i < g_.lanes; ++i) value += lanes[i];
            } else {
                value = lanes[row - queries.begin];
            }
            row_total += value;
            if (!one_column) store_from_double(to.at(row, j), to.dtype, value);
        }
        if (one_column) store_from_double(to.at(row, 0), to.dtype, row_total);
    }
}

void BiasGradient::run(const BackwardCall& call, const GradientMemory& memory,
                       const std::vector<GradientScratch>& workers) const {
    const Problem& p = call.plan.problem;
    if (!p.bias_gradient) return;
    const TensorView& dbias = call.args.dbias;
    const bool one_row = dbias.shape[2] == 1;
    const std::int64_t blocks = one_row ? 1 : g_.panels;
    call.parallel_for(dbias.shape[0] * dbias.shape[1] * blocks, call.plan.threads, [&](std::int64_t task, int worker) {
        Sums sums = sums_[static_cast<std::size_t>(worker)];
        std::fill_n(sums.sum, p.len_kv * g_.lanes, 0.0F);
        if (sums.total != nullptr) std::fill_n(sums.total, p.len_kv * g_.lanes, 0.0);
        const std::int64_t batch = task / blocks / dbias.shape[1];
        const std::int64_t head = task / blocks % dbias.shape[1];
        const Range panels = one_row ? Range{0, g_.panels} : Range{task % blocks, task % blocks + 1};
        const Range batches = broadcast_range(dbias.shape[0], p.batch, batch);
        const Range heads = broadcast_range(dbias.shape[1], p.heads_q, head);
        for (std::int64_t b = batches.begin; b < batches.end; ++b) {
            for (std::int64_t h = heads.begin; h < heads.end; ++h) {
                add_head(memory, Head(p, call.args, sequence_of(call, b), h), panels,
                         workers[static_cast<std::size_t>(worker)], sums);
            }
        }
        const Range rows =
            one_row ? Range{0, 1} : Range{panels.begin * g_.block_q, std::min(p.len_q, panels.end * g_.block_q)};
        if (sums.total != nullptr) add_total(sums.sum, sums.total, p.len_kv, g_.lanes);
        store(dbias, batch, head, rows, sums);
    });
}

}  // namespace tessera::cpu::simd
