// SPDX-License-Identifier: Apache-2.0
//
// What one panel of queries does with one block of keys, in the packed words (tile/packed.hpp): the counterpart of
// panel.hpp.
#pragma once

#include "cpu/packed_head.hpp"
#include "cpu/panel.hpp"

namespace tessera::cpu {

/// A panel with its head and the keys that it sees.
struct PackedPanel {
    Head head;
    Panel panel;
    Range keys;
    tile::ScoreRule rule;  ///< with all of the scale: packed queries carry none of it
    bool plain;            ///< the rule is a positive scale only, which the weights take along

    template <class Args>
    PackedPanel(const Problem& p, const Args& args, const Geometry& g, const Member& member, std::int64_t query_head,
                std::int64_t index)
        : head(p, args, member, query_head),
          panel(index, g.block_q, member.len_q),
          keys(head.keys_of(panel)),
          rule(head.rule) {
        rule.scale = static_cast<float>(p.effective_scale());
        plain = rule.scale > 0 && rule.softcap == 0 && rule.alibi == 0 && rule.bias.data == nullptr;
    }

    float weight_scale() const { return plain ? rule.scale : 1.0F; }
    std::int64_t lane_tiles() const { return panel.lanes / tile::kTileRows; }
    /// Pair tiles [depth / 32][lanes / 16].
    tile::Tiles pairs(Bf16* data) const { return {data, lane_tiles() * tile::kTileElements, tile::kTileElements}; }
};

/// Keys of one block that a panel sees, from a multiple of 32 on.
struct PackedKeys {
    Range keys;
    std::int64_t rows() const { return round_up(keys.size(), tile::kTileDepth); }
};

/// s = A B: `rows` tiles of keys by the panel's pair tiles over `depth_tiles`. s: [rows, lanes]
tile::TileProduct scores_product(const PackedPanel& work, const PackedKeys& keys, const tile::Tiles& key_tiles,
                                 Bf16* query_pairs, std::int64_t depth_tiles, float* s);

/// Makes scores of the products S^T: softcap, ALiBi, bias, and -inf where hidden. Returns whether s changed. other:
/// [rows, lanes]
bool finish_scores(const PackedPanel& work, const PackedKeys& keys, float* s, float* other, float* cap_slope = nullptr);

/// Does every query of the panel see all of these keys?
bool all_visible(const PackedPanel& work, const Range& keys);

/// C[c, i] += sum over keys of weight[key, i] * X[key, c] for the elements of X that are NaN or infinite, where the
/// query sees the key: packed as 0, they are added here. Slow, for few. weight: pair tiles; c: [dim, lanes]
void add_special_keys(const PackedPanel& work, const PackedKeys& keys, const HeadRows& x, std::int64_t dim,
                      const Bf16* weight_pairs, float* c);

}  // namespace tessera::cpu
