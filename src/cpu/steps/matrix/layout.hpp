// SPDX-License-Identifier: Apache-2.0
//
// Where the tiles of a call lie (words.hpp), and which rows need no packing.
#pragma once

#include <cmath>

#include "core/arena.hpp"
#include "cpu/matrix/primitives.hpp"
#include "cpu/steps/head.hpp"

namespace tessera::cpu::matrix {

constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) { return ceil_div(n, to) * to; }

/// The sizes that a call on tiles is laid out by.
struct Layout : Geometry {
    std::int64_t depth_tiles;    ///< of head_dim, 32 each
    std::int64_t depth_tiles_v;  ///< of head_dim_v
    std::int64_t dim_tiles;      ///< of head_dim, 16 each
    std::int64_t dim_tiles_v;    ///< of head_dim_v
    int parts;                   ///< of each element

    Layout(const Plan& plan, std::int64_t queries_per_panel)
        : Geometry(plan, queries_per_panel),
          depth_tiles(ceil_div(head_dim, kTileDepth)),
          depth_tiles_v(ceil_div(head_dim_v, kTileDepth)),
          dim_tiles(ceil_div(head_dim, kTileRows)),
          dim_tiles_v(ceil_div(head_dim_v, kTileRows)),
          parts(parts_of(plan.problem.dtype)) {}

    /// Elements of a tile, in all its parts.
    std::int64_t tile_elements() const { return kTileElements * parts; }
    /// Elements of a packed row: so many tiles of 32, or of 16.
    std::int64_t depth_row(std::int64_t depth_tiles_of) const { return depth_tiles_of * kTileDepth * parts; }
    std::int64_t dim_row(std::int64_t dim_tiles_of) const { return dim_tiles_of * kTileRows * parts; }
    std::int64_t block_kv_rows() const { return round_up(block_kv, kTileDepth); }
};

/// The units make subnormal products 0, and the scale comes after the sum: up to here what is lost is under 2^-54.
inline constexpr double kMostScale = 0x1p64;

/// Can and should the plan's problem be computed on the matrix unit?
inline bool takes(const Plan& plan) {
    return packing_pays(plan.problem.dtype) && plan.tile.block_kv % kTileDepth == 0 &&
           plan.tile.block_q % kTileDepth == 0 && std::abs(plan.problem.effective_scale()) <= kMostScale;
}

/// Rows (queries or keys) of all sequences of a head when each sequence begins at a multiple of 32, and where one
/// begins.
inline std::int64_t padded_rows(const Problem& p, std::int64_t len, std::int64_t total) {
    return p.ragged ? round_up(total, kTileDepth) + p.batch * kTileDepth : p.batch * round_up(len, kTileDepth);
}
inline std::int64_t first_padded_row(const Problem& p, const Sequence& m, std::int64_t len, std::int64_t first) {
    return p.ragged ? (first / kTileDepth + m.batch) * kTileDepth : m.batch * round_up(len, kTileDepth);
}
inline std::int64_t padded_keys(const Problem& p) { return padded_rows(p, p.len_kv, p.total_kv); }
inline std::int64_t padded_queries(const Problem& p) { return padded_rows(p, p.len_q, p.total_q); }
inline std::int64_t first_padded_key(const Problem& p, const Sequence& m) {
    return first_padded_row(p, m, p.len_kv, m.first_kv);
}
inline std::int64_t first_padded_query(const Problem& p, const Sequence& m) {
    return first_padded_row(p, m, p.len_q, m.first_q);
}

/// Tiles from key `key`, a multiple of 32, on. Keys as rows: row tiles [keys / 16][dim / 32].
inline Tiles key_rows(Bf16* data, const Layout& g, std::int64_t depth_tiles, std::int64_t key) {
    const std::int64_t step = depth_tiles * g.tile_elements();
    return {data == nullptr ? nullptr : data + key / kTileRows * step, step, g.tile_elements()};
}

/// Rows that a product can read where they lie: bf16 that fill tiles, each line of a row one of the cache, and not so
/// far apart that those of a tile push each other out of it.
inline bool tiles_in_place(const HeadRows& x, std::int64_t dim) {
    constexpr std::int64_t kLine = 64;
    constexpr std::int64_t kFarthest = 512;
    return x.dtype == DType::bf16 && x.column_stride == 1 && dim % kTileDepth == 0 &&
           reinterpret_cast<std::uintptr_t>(x.data) % kLine == 0 && x.row_stride % kTileDepth == 0 &&
           x.row_stride > 0 && x.row_stride <= kFarthest;
}

/// The same where the rows lie, if tiles_in_place().
inline Tiles rows_in_place(const HeadRows& x, std::int64_t row) {
    return {static_cast<Bf16*>(x.at(row, 0)), kTileRows * x.row_stride, kTileDepth};
}

/// Keys as depth: row tiles [dim / 16][keys / 32], those of 32 keys together.
inline Tiles key_columns(Bf16* data, const Layout& g, std::int64_t dim_tiles, std::int64_t key) {
    const std::int64_t step = dim_tiles * g.tile_elements();
    return {data == nullptr ? nullptr : data + key / kTileDepth * step, g.tile_elements(), step};
}

}  // namespace tessera::cpu::matrix
