// SPDX-License-Identifier: Apache-2.0
//
// What the tasks of a forward call on packed tiles share: its panels, and the keys that are packed once for all.
#pragma once

#include <algorithm>

#include "cpu/fa2/packed_layout.hpp"

namespace tessera::cpu::fa2 {

/// One call: where everything lies.
struct ForwardRun {
    const ForwardCall& call;
    PackedGeometry g;
    Partition part;
    Workspace workspace;
    const tile::PackedWords& words;

    explicit ForwardRun(const ForwardCall& c) : ForwardRun(c, Arena(c.workspace)) {}
    ForwardRun(const ForwardCall& c, Arena arena)
        : call(c),
          g(c.plan, c.plan.tile.block_q),
          part(c.plan, g),
          workspace(arena, c.plan, g, part),
          words(*tile::packed_words()) {}

    const Problem& problem() const { return call.plan.problem; }
    Member member(std::int64_t kv_head) const {
        return member_of(problem(), call.args.cu_seqlens_q, call.args.cu_seqlens_kv, kv_head / problem().heads_kv);
    }
    /// Panel `index` of kv head `kv_head` (of all batch members).
    PackedPanel panel(std::int64_t kv_head, std::int64_t index) const {
        const std::int64_t query_head = kv_head % problem().heads_kv * problem().group() + index / g.panels;
        return {problem(), call.args, g, member(kv_head), query_head, index % g.panels};
    }
    Range keys_of_block(const Member& m, std::int64_t block) const {
        return {block * g.block_kv, std::min(m.len_kv, (block + 1) * g.block_kv)};
    }
    /// Shared tiles of a kv head from key `key` on.
    tile::Tiles shared_k(std::int64_t kv_head, std::int64_t key) const {
        const std::int64_t rows = kv_head % problem().heads_kv * packed_keys(problem());
        return key_rows(workspace.k, g, g.depth_tiles, rows + first_packed_key(problem(), member(kv_head)) + key);
    }
    tile::Tiles shared_v(std::int64_t kv_head, std::int64_t key) const {
        const std::int64_t rows = kv_head % problem().heads_kv * packed_keys(problem());
        return key_columns(workspace.v, g, g.dim_tiles_v, rows + first_packed_key(problem(), member(kv_head)) + key);
    }
    bool pack_k(const HeadRows& k, const Range& keys, const tile::Tiles& to) const {
        return words.pack({k, keys.begin, keys.size(), g.head_dim, tile::Form::rows, to});
    }
    bool pack_v(const HeadRows& v, const Range& keys, const tile::Tiles& to) const {
        return words.pack({v, keys.begin, keys.size(), g.head_dim_v, tile::Form::columns, to, true});
    }

    /// Were all keys of a block packable, by the flags of their groups?
    bool all_finite(const char* flags, std::int64_t kv_head, const Range& keys) const {
        const char* of_head = flags + kv_head * Workspace::key_groups(call.plan);
        return std::all_of(of_head + keys.begin / tile::kTileDepth, of_head + ceil_div(keys.end, tile::kTileDepth),
                           [](char finite) { return finite != 0; });
    }

    /// Packs the keys that all tasks share.
    void pack_all() const;
};

inline void ForwardRun::pack_all() const {
    const std::int64_t parts = ceil_div(problem().len_kv, part.packed_together);
    call.parallel_for(part.kv_heads * parts, part.threads, [&](std::int64_t task, int) {
        const std::int64_t kv_head = task / parts;
        const Member m = member(kv_head);
        const std::int64_t begin = task % parts * part.packed_together;
        const Range keys{begin, std::min(m.len_kv, begin + part.packed_together)};
        if (keys.empty()) return;
        const Head head(problem(), call.args, m, kv_head % problem().heads_kv * problem().group());
        const bool k_finite = pack_k(head.k, keys, shared_k(kv_head, keys.begin));
        const bool v_finite = pack_v(head.v, keys, shared_v(kv_head, keys.begin));
        const std::int64_t group = kv_head * Workspace::key_groups(call.plan) + keys.begin / tile::kTileDepth;
        const std::int64_t groups = ceil_div(keys.size(), tile::kTileDepth);
        std::fill_n(workspace.k_finite + group, groups, k_finite ? 1 : 0);
        std::fill_n(workspace.v_finite + group, groups, v_finite ? 1 : 0);
    });
}

}  // namespace tessera::cpu::fa2
