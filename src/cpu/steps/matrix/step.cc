// SPDX-License-Identifier: Apache-2.0
#include "cpu/steps/matrix/step.hpp"

#include <cmath>
#include <limits>
#include <vector>

namespace tessera::cpu::matrix {

TileProduct scores_product(const TilePanel& work, const SeenKeys& keys, const Tiles& key_tiles, Bf16* query_pairs,
                           std::int64_t depth_tiles, float* s) {
    return {.parts = work.parts,
            .m = keys.rows() / kTileRows,
            .n = work.lane_tiles(),
            .k = depth_tiles,
            .a = key_tiles,
            .b = work.pairs(query_pairs),
            .c = s,
            .c_stride = work.panel.lanes,
            .small_first = true};
}

bool all_visible(const TilePanel& work, const Range& keys) {
    const Panel& panel = work.panel;
    return work.head.band.coverage(panel.first, panel.first + panel.queries, keys.begin, keys.end) == Coverage::full;
}

void transform_and_mask(const TilePanel& work, const SeenKeys& keys, float* s, float* bias_or_dropout,
                        float* cap_slope) {
    const std::int64_t lanes = work.panel.lanes;
    const simd::TilePosition position{work.head.band, work.panel.first, keys.keys.begin};
    if (!work.plain && !work.rule.trivial()) {
        simd::transform_scores(work.rule, position, keys.keys.size(), work.panel.queries, s, lanes, bias_or_dropout,
                               cap_slope);
    }
    for (std::int64_t key = keys.keys.begin; key < keys.keys.end; key += kTileDepth) {
        const Range group{key, std::min(keys.keys.end, key + kTileDepth)};
        if (all_visible(work, group)) continue;
        simd::fill_masked({position.band, position.q, key}, group.size(), s + (key - keys.keys.begin) * lanes, lanes,
                          -std::numeric_limits<float>::infinity());
    }
}

float element(const HeadRows& x, std::int64_t row, std::int64_t column) {
    const void* at = x.at(row, column);
    return x.dtype == DType::fp32 ? *static_cast<const float*>(at) : to_float(*static_cast<const Bf16*>(at));
}

float row_tile_element(const Bf16* tile, int parts, std::int64_t row, std::int64_t depth) {
    float sum = 0;
    for (int part = 0; part < parts; ++part) {
        sum += to_float(tile[part * kTileElements + row * kTileDepth + depth]);
    }
    return sum;
}

float pair_tile_element(const Bf16* tile, int parts, std::int64_t depth, std::int64_t lane) {
    return row_tile_element(tile, parts, depth / 2, lane * 2 + depth % 2);
}

void redo_special_products(const HeadRows& x, const Range& rows, const HeadRows& y, const Range& columns,
                           std::int64_t dim, float scale, float* s, std::int64_t stride) {
    const auto is_special = [&](const HeadRows& matrix, std::int64_t row) {
        for (std::int64_t c = 0; c < dim; ++c) {
            if (special(matrix, element(matrix, row, c))) return true;
        }
        return false;
    };
    std::vector<char> special_columns;
    for (std::int64_t j = columns.begin; j < columns.end; ++j) special_columns.push_back(is_special(y, j) ? 1 : 0);
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
        const bool special_row = is_special(x, i);
        for (std::int64_t j = columns.begin; j < columns.end; ++j) {
            if (!special_row && special_columns[static_cast<std::size_t>(j - columns.begin)] == 0) continue;
            float sum = 0;
            for (std::int64_t c = 0; c < dim; ++c) sum += element(x, i, c) * (element(y, j, c) * scale);
            s[(i - rows.begin) * stride + j - columns.begin] = sum;
        }
    }
}

void add_special_keys(const TilePanel& work, const SeenKeys& keys, const HeadRows& x, std::int64_t dim,
                      const Bf16* weight_pairs, const Sums& c) {
    for (std::int64_t key = keys.keys.begin; key < keys.keys.end; ++key) {
        const std::int64_t row = key - keys.keys.begin;
        for (std::int64_t column = 0; column < dim; ++column) {
            const float value = element(x, key, column);
            if (!special(x, value)) continue;
            for (std::int64_t i = 0; i < work.panel.queries; ++i) {
                if (!work.head.band.visible(work.panel.first + i, key)) continue;
                const std::int64_t tile = row / kTileDepth * work.lane_tiles() + i / kTileRows;
                const Bf16* weights = weight_pairs + tile * work.parts * kTileElements;
                c.data[column * c.column_step + i * c.query_step] +=
                    pair_tile_element(weights, work.parts, row % kTileDepth, i % kTileRows) * value;
            }
        }
    }
}

}  // namespace tessera::cpu::matrix
