// SPDX-License-Identifier: Apache-2.0
//
// Functions shared by the two kinds of forward tasks of the SIMD path: queries in the lanes (forward.cc) and few
// queries (decode.cc), and the limit of few queries.
#pragma once

#include "core/split.hpp"
#include "cpu/fa2/work_split.hpp"

namespace tessera::cpu::fa2::simd_path {

inline constexpr std::int64_t kChunk = kSplitKeys;
using simd_split::kMaxPanels, simd_split::kTasksPerThread;

inline WorkSplit work_split_of(const Plan& plan, const Geometry& g) {
    WorkSplit work_split(plan, g, kChunk);
    work_split.panels_per_task = kMaxPanels;
    while (work_split.panels_per_task > 1 &&
           work_split.panels() < work_split.panels_per_task * work_split.threads * kTasksPerThread) {
        work_split.panels_per_task /= 2;
    }
    // If this splits, panels_per_task is 1.
    work_split.split = work_split.threads > 1 && work_split.chunks > 1 && work_split.panels() < 2 * work_split.threads;
    return work_split;
}

inline HeadPanel panel_of(const ForwardCall& call, const Geometry& g, std::int64_t kv_head, std::int64_t index) {
    const AssignedPanel panel(call, g, kv_head, index);
    return {Head(call.plan.problem, call.args, panel.sequence, panel.query_head), panel.index, g.block_q};
}

/// The keys of a chunk, and those of them that a panel sees.
inline Range keys_of_chunk(const Sequence& m, std::int64_t chunk) {
    return {chunk * kChunk, std::min(m.len_kv, (chunk + 1) * kChunk)};
}
inline Range chunk_keys(const HeadPanel& work, std::int64_t chunk) {
    return common(keys_of_chunk(work.head.sequence, chunk), work.keys);
}

inline void count_skipped(const HeadPanel& work, const Geometry& g, TileTally& tally) {
    for (std::int64_t chunk = 0; chunk * kChunk < work.head.sequence.len_kv; ++chunk) {
        const Range all = keys_of_chunk(work.head.sequence, chunk);
        for (std::int64_t first = all.begin; first < all.end; first += g.block_kv) {
            const bool seen = !common({first, std::min(all.end, first + g.block_kv)}, work.keys).empty();
            tally.skipped(1, seen ? 1 : 0);
        }
    }
}

}  // namespace tessera::cpu::fa2::simd_path
