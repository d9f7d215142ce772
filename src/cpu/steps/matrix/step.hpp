// SPDX-License-Identifier: Apache-2.0
//
// One step of the matrix path: a panel of queries against a block of keys, by the primitives of matrix/primitives.hpp.
// The SIMD path's counterpart is steps/simd/step.hpp.
#pragma once

#include "cpu/steps/matrix/layout.hpp"
#include "cpu/steps/simd/step.hpp"

namespace tessera::cpu::matrix {

/// A panel on the matrix path.
struct TilePanel : HeadPanel {
    simd::ScoreRule rule;  ///< in bf16 with the whole scale, since packed queries carry none of it
    bool plain;            ///< the rule is a positive scale only, which the softmax applies
    int parts;             ///< bf16 parts of a packed element

    template <class Args>
    TilePanel(const Problem& p, const Args& args, const Layout& g, const Sequence& sequence, std::int64_t query_head,
              std::int64_t index)
        : HeadPanel(Head(p, args, sequence, query_head), index, g.block_q), rule(head.rule), parts(g.parts) {
        if (parts == 1) rule.scale = static_cast<float>(p.effective_scale());
        plain = rule.scale > 0 && rule.softcap == 0 && rule.alibi == 0 && rule.bias.data == nullptr;
    }

    /// The factor that is applied to queries when they are packed.
    float query_scale() const { return parts == 1 ? 1.0F : head.query_scale; }
    float weight_scale() const { return plain ? rule.scale : 1.0F; }
    std::int64_t lane_tiles() const { return panel.lanes / kTileRows; }
    /// Pair tiles [depth / 32][lanes / 16].
    Tiles pairs(Bf16* data) const { return {data, lane_tiles() * parts * kTileElements, parts * kTileElements}; }
};

/// Keys of one block that a panel sees, from a multiple of 32 on.
struct SeenKeys {
    Range keys;
    std::int64_t rows() const { return round_up(keys.size(), kTileDepth); }
};

/// The GEMM s = A B of `rows` tiles of keys by the panel's pair tiles over `depth_tiles`. s: [rows, lanes]
TileProduct scores_product(const TilePanel& work, const SeenKeys& keys, const Tiles& key_tiles, Bf16* query_pairs,
                           std::int64_t depth_tiles, float* s);

/// Turns the dot products S^T into scores: softcap, ALiBi, bias, and -inf for hidden pairs. bias_or_dropout: [rows,
/// lanes]
void transform_and_mask(const TilePanel& work, const SeenKeys& keys, float* s, float* bias_or_dropout,
                        float* cap_slope = nullptr);

/// Does every query of the panel see all of these keys?
bool all_visible(const TilePanel& work, const Range& keys);

/// Is an element packed as 0 although it is not? These are the unpackable elements of fp32, and NaN and infinity of
/// bf16.
float element(const HeadRows& x, std::int64_t row, std::int64_t column);
inline bool special(const HeadRows& x, float value) {
    return x.dtype == DType::fp32 ? unpackable(value) : !std::isfinite(value);
}

/// The value at (row, depth) of row tiles, or at (depth, lane) of pair tiles: the sum of its parts.
float row_tile_element(const Bf16* tile, int parts, std::int64_t row, std::int64_t depth);
float pair_tile_element(const Bf16* tile, int parts, std::int64_t depth, std::int64_t lane);

/// s[i, j] = scale * dot product of row `rows.begin + i` of x and row `columns.begin + j` of y, recomputed in fp32 if
/// one of them has special elements, which were packed as 0. Slow; meant for few rows. s: [rows, stride]
void redo_special_products(const HeadRows& x, const Range& rows, const HeadRows& y, const Range& columns,
                           std::int64_t dim, float scale, float* s, std::int64_t stride);

/// A view of C in either order of its dimensions: element (c, i) is at data + c * column_step + i * query_step.
struct Sums {
    float* data;
    std::int64_t column_step;
    std::int64_t query_step;
};

/// C[c, i] += sum over keys of weight[key, i] * X[key, c] for the special elements of X, which were packed as 0, if the
/// query sees the key. Slow; meant for few elements. weight: pair tiles
void add_special_keys(const TilePanel& work, const SeenKeys& keys, const HeadRows& x, std::int64_t dim,
                      const Bf16* weight_pairs, const Sums& c);

}  // namespace tessera::cpu::matrix
