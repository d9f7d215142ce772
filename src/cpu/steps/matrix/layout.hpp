// SPDX-License-Identifier: Apache-2.0
//
// The memory layout of a call's tiles (matrix/primitives.hpp), and the test for rows that need no packing.
#pragma once

#include <cmath>

#include "core/arena.hpp"
#include "cpu/matrix/primitives.hpp"
#include "cpu/steps/head.hpp"

namespace tessera::cpu::matrix {

constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) { return ceil_div(n, to) * to; }

/// The sizes that determine the layout of a call on the matrix path.
struct Layout : Geometry {
    std::int64_t depth_tiles;    ///< tiles of 32 in head_dim
    std::int64_t depth_tiles_v;  ///< tiles of 32 in head_dim_v
    std::int64_t dim_tiles;      ///< tiles of 16 in head_dim
    std::int64_t dim_tiles_v;    ///< tiles of 16 in head_dim_v
    int parts;                   ///< bf16 parts of an element: 1, or 3 for fp32

    Layout(const Plan& plan, std::int64_t queries_per_panel)
        : Geometry(plan, queries_per_panel),
          depth_tiles(ceil_div(head_dim, kTileDepth)),
          depth_tiles_v(ceil_div(head_dim_v, kTileDepth)),
          dim_tiles(ceil_div(head_dim, kTileRows)),
          dim_tiles_v(ceil_div(head_dim_v, kTileRows)),
          parts(parts_of(plan.problem.dtype)) {}

    /// Elements of a tile, in all its parts.
    std::int64_t tile_elements() const { return kTileElements * parts; }
    /// Elements of a packed row of tiles that are 32, or 16, elements wide.
    std::int64_t depth_row(std::int64_t depth_tiles_of) const { return depth_tiles_of * kTileDepth * parts; }
    std::int64_t dim_row(std::int64_t dim_tiles_of) const { return dim_tiles_of * kTileRows * parts; }
    std::int64_t block_kv_rows() const { return round_up(block_kv, kTileDepth); }
};

/// The largest scale that the matrix path takes. Units flush subnormal products to 0, and the scale is applied after
/// the sum: up to here the loss is under 2^-54.
inline constexpr double kMostScale = 0x1p64;

/// Can and should the plan's problem be computed on the matrix unit?
inline bool takes(const Plan& plan) {
    return packing_pays(plan.problem.dtype) && plan.tile.block_kv % kTileDepth == 0 &&
           plan.tile.block_q % kTileDepth == 0 && std::abs(plan.problem.effective_scale()) <= kMostScale;
}

/// Rows (queries or keys) of all sequences of a head if each sequence begins at a multiple of 32, and the first row of
/// one.
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

/// Tiles from key `key`, a multiple of 32, on, with keys as rows: row tiles [keys / 16][dim / 32].
inline Tiles key_rows(Bf16* data, const Layout& g, std::int64_t depth_tiles, std::int64_t key) {
    const std::int64_t step = depth_tiles * g.tile_elements();
    return {data == nullptr ? nullptr : data + key / kTileRows * step, step, g.tile_elements()};
}

/// Can a GEMM read the rows where they lie? They must be bf16 and fill tiles, with rows aligned to cache lines. Their
/// stride must not map the rows of a tile to the same cache sets.
inline bool tiles_in_place(const HeadRows& x, std::int64_t dim) {
    constexpr std::int64_t kLine = 64;
    constexpr std::int64_t kFarthest = 512;
    return !x.paged() && x.dtype == DType::bf16 && x.column_stride == 1 && dim % kTileDepth == 0 &&
           reinterpret_cast<std::uintptr_t>(x.data) % kLine == 0 && x.row_stride % kTileDepth == 0 &&
           x.row_stride > 0 && x.row_stride <= kFarthest;
}

/// key_rows() of the rows where they lie, if tiles_in_place().
inline Tiles rows_in_place(const HeadRows& x, std::int64_t row) {
    return {static_cast<Bf16*>(x.at(row, 0)), kTileRows * x.row_stride, kTileDepth};
}

/// Tiles with keys as depth: row tiles [dim / 16][keys / 32], those of 32 keys together.
inline Tiles key_columns(Bf16* data, const Layout& g, std::int64_t dim_tiles, std::int64_t key) {
    const std::int64_t step = dim_tiles * g.tile_elements();
    return {data == nullptr ? nullptr : data + key / kTileDepth * step, g.tile_elements(), step};
}

}  // namespace tessera::cpu::matrix
