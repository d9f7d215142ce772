// SPDX-License-Identifier: Apache-2.0
//
// What the tasks of a forward call on packed tiles share.
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
          workspace(arena, g, part),
          words(*tile::packed_words()) {}

    const Problem& problem() const { return call.plan.problem; }
    Scratch scratch(int worker) const {
        Arena memory = workspace.workers.arena(worker);
        return {memory, g, part};
    }
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
    /// Reads keys that are in no cache, ahead of tile loads, which would wait for one line after the other.
    void fetch(const HeadRows& x, const Range& keys, std::int64_t dim) const {
        if (!part.from_memory) return;
        const std::int64_t bytes = dim * size_of(x.dtype);
        for (std::int64_t key = keys.begin; key < keys.end; ++key) {
            const char* row = static_cast<const char*>(x.at(key, 0));
            for (std::int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(row + line);
        }
    }

    /// Both return whether all of the keys could be packed.
    bool pack_k(const HeadRows& k, const Range& keys, const tile::Tiles& to) const {
        return words.pack({.from = k,
                           .first = keys.begin,
                           .rows = keys.size(),
                           .dim = g.head_dim,
                           .form = tile::Form::rows,
                           .to = to,
                           .from_memory = part.from_memory});
    }
    bool pack_v(const HeadRows& v, const Range& keys, const tile::Tiles& to) const {
        return words.pack({.from = v,
                           .first = keys.begin,
                           .rows = keys.size(),
                           .dim = g.head_dim_v,
                           .form = tile::Form::columns,
                           .to = to,
                           .finite_only = true,
                           .from_memory = part.from_memory});
    }
};

}  // namespace tessera::cpu::fa2
