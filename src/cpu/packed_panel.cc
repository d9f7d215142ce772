// SPDX-License-Identifier: Apache-2.0
#include "cpu/packed_panel.hpp"

#include <cmath>
#include <limits>

namespace tessera::cpu {

tile::TileProduct scores_product(const PackedPanel& work, const PackedKeys& keys, const tile::Tiles& key_tiles,
                                 Bf16* query_pairs, std::int64_t depth_tiles, float* s) {
    return {.m = keys.rows() / tile::kTileRows,
            .n = work.lane_tiles(),
            .k = depth_tiles,
            .a = key_tiles,
            .b = work.pairs(query_pairs),
            .c = s,
            .c_stride = work.panel.lanes};
}

bool all_visible(const PackedPanel& work, const Range& keys) {
    const Panel& panel = work.panel;
    return work.head.band.coverage(panel.first, panel.first + panel.queries, keys.begin, keys.end) == Coverage::full;
}

bool finish_scores(const PackedPanel& work, const PackedKeys& keys, float* s, float* other, float* cap_slope) {
    const std::int64_t lanes = work.panel.lanes;
    const tile::Place place{work.head.band, work.panel.first, keys.keys.begin};
    const bool transformed = !work.plain && !work.rule.trivial();
    if (transformed) {
        tile::transform_scores(work.rule, place, keys.keys.size(), work.panel.queries, s, lanes, other, cap_slope);
    }
    bool masked = false;
    for (std::int64_t key = keys.keys.begin; key < keys.keys.end; key += tile::kTileDepth) {
        const Range group{key, std::min(keys.keys.end, key + tile::kTileDepth)};
        if (all_visible(work, group)) continue;
        masked = true;
        tile::fill_hidden({place.band, place.q, key}, group.size(), s + (key - keys.keys.begin) * lanes, lanes,
                          -std::numeric_limits<float>::infinity());
    }
    return transformed || masked;
}

void add_special_keys(const PackedPanel& work, const PackedKeys& keys, const HeadRows& x, std::int64_t dim,
                      const Bf16* weight_pairs, float* c) {
    for (std::int64_t key = keys.keys.begin; key < keys.keys.end; ++key) {
        const std::int64_t row = key - keys.keys.begin;
        for (std::int64_t column = 0; column < dim; ++column) {
            const float value = to_float(*static_cast<const Bf16*>(x.at(key, column)));
            if (std::isfinite(value)) continue;
            for (std::int64_t i = 0; i < work.panel.queries; ++i) {
                if (!work.head.band.visible(work.panel.first + i, key)) continue;
                const std::int64_t tile = row / tile::kTileDepth * work.lane_tiles() + i / tile::kTileRows;
                const std::int64_t in_tile =
                    row % tile::kTileDepth / 2 * tile::kTileDepth + i % tile::kTileRows * 2 + row % 2;
                c[column * work.panel.lanes + i] +=
                    to_float(weight_pairs[tile * tile::kTileElements + in_tile]) * value;
            }
        }
    }
}

}  // namespace tessera::cpu
