// SPDX-License-Identifier: Apache-2.0
//
// The state that the tasks of a forward call on a matrix unit share.
#pragma once

#include <algorithm>

#include "cpu/fa2/matrix/memory.hpp"

namespace tessera::cpu::fa2::matrix_path {

/// One call with its sizes, work split and workspace.
struct ForwardRun {
    const ForwardCall& call;
    matrix::Layout g;
    ForwardWorkSplit work_split;
    ForwardWorkspace workspace;
    const matrix::Primitives& primitives;

    explicit ForwardRun(const ForwardCall& c) : ForwardRun(c, Arena(c.workspace)) {}
    ForwardRun(const ForwardCall& c, Arena arena)
        : call(c),
          g(c.plan, c.plan.tile.block_q),
          work_split(c.plan, g),
          workspace(arena, c.plan.problem, g, work_split),
          primitives(*matrix::primitives_of_unit()) {}

    const Problem& problem() const { return call.plan.problem; }
    PanelsScratch scratch(int worker) const {
        Arena memory = workspace.workers.arena(worker);
        return {memory, g, work_split};
    }
    DecodeScratch decode_scratch(int worker) const {
        Arena memory = workspace.workers.arena(worker);
        return {memory, g};
    }
    FewQueriesScratch few_queries_scratch(int worker) const {
        Arena memory = workspace.workers.arena(worker);
        return {memory, g, work_split};
    }
    /// Panel `index` of kv head `kv_head` (of all sequences).
    matrix::TilePanel panel(std::int64_t kv_head, std::int64_t index) const {
        const AssignedPanel panel(call, g, kv_head, index);
        return {problem(), call.args, g, panel.sequence, panel.query_head, panel.index};
    }
    /// Sums of a block of keys that wait to be merged.
    simd::PanelSums partial(std::int64_t kv_head, std::int64_t panel, std::int64_t block) const {
        return {workspace.partials + work_split.partial(kv_head, panel, block) * sums_floats(g), g};
    }
    /// The partial sums of panel `index` of task `number`, which is one of a long sequence.
    simd::PanelSums partial_of_task(std::int64_t number, std::int64_t index, std::int64_t block) const {
        const std::int64_t panel = number * work_split.panels_per_task + index;
        return {workspace.partials + (panel * work_split.chunks + block) * sums_floats(g), g};
    }
    Range keys_of_block(const Sequence& m, std::int64_t block) const {
        return {block * g.block_kv, std::min(m.len_kv, (block + 1) * g.block_kv)};
    }
    /// Both return whether all of the keys could be packed.
    bool pack_k(const HeadRows& k, const Range& keys, const matrix::Tiles& to) const {
        return pack(k, keys, g.head_dim, matrix::Form::rows, to, false);
    }
    bool pack_v(const HeadRows& v, const Range& keys, const matrix::Tiles& to) const {
        return pack(v, keys, g.head_dim_v, matrix::Form::columns, to, true);
    }

 private:
    bool pack(const HeadRows& x, const Range& keys, std::int64_t dim, matrix::Form form, const matrix::Tiles& to,
              bool finite_only) const {
        return primitives.pack({.from = x,
                                .first = keys.begin,
                                .rows = keys.size(),
                                .dim = dim,
                                .form = form,
                                .to = to,
                                .finite_only = finite_only,
                                .from_memory = work_split.from_memory});
    }
};

}  // namespace tessera::cpu::fa2::matrix_path
