// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/host/shape_list.hpp"

namespace tessera::cuda::gradient {

/// Rows of a query tile in the workspace, for all kernels that write or read it.
inline constexpr int kBlockQ = 64;

/// A bound on the bytes of shared memory that a main kernel declares beside its tiles.
inline constexpr int kDeclaredShared = 6144;

/// One compiled shape of the main kernels, whose CTAs own a key block. head_dim and head_dim_v of a Problem are padded
/// with zeros to `head_dim`.
struct Config {
    int head_dim;         ///< 64, 128 or 256
    int key_tiles;        ///< keys of a pair of warps in units of 16: each fragment of Q and dO serves all of them
    bool general;         ///< softcap, ALiBi, bias, dropout and scales of 0 and less: MainloopWarpPairs
    int stages = 2;       ///< stages of Q and dO: one is worked on while the others are loaded
    int query_tiles = 1;  ///< tiles of kBlockQ queries in a step with plain scores
    // The part of one warp, in mainloops for plain scores:
    int score_queries = 32;  ///< queries of S and dP
    int score_tiles = 0;     ///< keys of S and dP, in units of 16; 0: key_tiles
    int sum_tiles = 0;       ///< keys of dV and dK, in units of 16; 0: key_tiles
    int dq_columns = 4;      ///< dims of dQ, in units of 8
    /// A warp sums dV and dK over its own queries, for all columns (MainloopSplitQueries, head_dim 64). Otherwise it
    /// sums them over all queries, for some columns (MainloopSplitColumns).
    bool split_queries = false;

    static constexpr int kPairs = 4;
    static constexpr int kRowBytes = 4 * kBlockQ * 4;

    constexpr int warps_of_keys(int tiles) const { return block_kv() / (16 * tiles); }
    constexpr int key_tiles_of_scores() const { return score_tiles == 0 ? key_tiles : score_tiles; }
    constexpr int key_tiles_of_sums() const { return sum_tiles == 0 ? key_tiles : sum_tiles; }
    /// The number of warps that have the same keys. They split the queries of S and dP, and the columns of dV and dK.
    constexpr int query_parts() const { return 2 * kPairs / warps_of_keys(key_tiles_of_scores()); }
    constexpr int column_parts() const { return split_queries ? 1 : 2 * kPairs / warps_of_keys(key_tiles_of_sums()); }

    constexpr int keys_per_pair() const { return 16 * key_tiles; }
    constexpr int block_kv() const { return kPairs * keys_per_pair(); }
    constexpr int threads() const { return 2 * kPairs * 32; }
    constexpr int kv_bytes() const { return block_kv() * head_dim * 2; }
    constexpr int q_bytes() const { return kBlockQ * head_dim * 2; }                         ///< one tile
    constexpr int stage_bytes() const { return query_tiles * (2 * q_bytes() + kRowBytes); }  ///< Q, dO, row data
    constexpr int score_bytes() const { return block_kv() * kBlockQ * 2; }                   ///< one tile of P or dS
    /// P in fp32 (MainloopWarpPairs), or P in 16 bits and the second buffer of dS.
    constexpr int p_bytes() const { return 2 * score_bytes(); }
    constexpr int ds_bytes() const { return query_tiles * score_bytes(); }
    constexpr int stage_offset() const { return 2 * kv_bytes(); }
    constexpr int p_offset() const { return stage_offset() + stages * stage_bytes(); }
    constexpr int ds_offset() const { return p_offset() + p_bytes(); }
    constexpr int shared_bytes() const { return ds_offset() + ds_bytes(); }
};

/// One compiled shape of the kernels whose CTAs own a query tile: delta, and the gradient of the bias.
struct RowConfig {
    int head_dim;
    int block_kv;
    int blocks_per_sm;  ///< occupancy that the registers must allow
    bool general;

    static constexpr int kWarps = 8;  // 16 queries each
    static constexpr int kStages = 2;

    constexpr int threads() const { return 32 * kWarps; }
    constexpr int block_q() const { return 16 * kWarps; }
    constexpr int q_bytes() const { return block_q() * head_dim * 2; }
    constexpr int kv_bytes() const { return block_kv * head_dim * 2; }
    constexpr int shared_bytes() const { return 2 * q_bytes() + kStages * 2 * kv_bytes(); }
};

/// One compiled shape of the kernels of fp32 multiply-adds: the main kernel over head_dim 128, delta, the gradient of
/// the bias.
struct ConfigFp32 {
    int head_dim;
    int block_kv;

    /// Q, dO, K and V. Rows are padded by four floats against bank conflicts.
    constexpr int floats() const { return 2 * (kBlockQ + block_kv) * (head_dim + 4); }
    /// All of shared memory: the above, then P and dS.
    constexpr int shared_bytes() const { return 4 * (floats() + 2 * kBlockQ * (block_kv + 4)); }
};

/// One compiled shape of the main kernel in fp32 by parts (MainloopParts).
struct PartsConfig {
    int head_dim;
    int block_kv;
    int query_warps;  ///< warps with the same 16 keys, which split the queries of a step

    static constexpr int kThreads = 256;
    static constexpr int kBytes = 6;  ///< of a number: three bf16 parts

    /// K, V, Q, dO and dS.
    constexpr int shared_bytes() const { return kBytes * (2 * (block_kv + kBlockQ) * head_dim + block_kv * kBlockQ); }
};

struct RowsHeadDim64 {
    static constexpr RowConfig kConfig{.head_dim = 64, .block_kv = 64, .blocks_per_sm = 2, .general = false};
};
struct RowsHeadDim64General {
    static constexpr RowConfig kConfig{.head_dim = 64, .block_kv = 64, .blocks_per_sm = 1, .general = true};
};
struct RowsHeadDim128 {
    static constexpr RowConfig kConfig{.head_dim = 128, .block_kv = 32, .blocks_per_sm = 2, .general = false};
};
struct RowsHeadDim128General {
    static constexpr RowConfig kConfig{.head_dim = 128, .block_kv = 64, .blocks_per_sm = 1, .general = true};
};
struct RowsHeadDim256 {
    static constexpr RowConfig kConfig{.head_dim = 256, .block_kv = 32, .blocks_per_sm = 1, .general = false};
};
struct RowsHeadDim256General {
    static constexpr RowConfig kConfig{.head_dim = 256, .block_kv = 32, .blocks_per_sm = 1, .general = true};
};
using RowShapes = ShapeList<RowsHeadDim64, RowsHeadDim64General, RowsHeadDim128, RowsHeadDim128General, RowsHeadDim256,
                            RowsHeadDim256General>;
/// The shapes of the gradient of a bias, which are general.
using BiasShapes = ShapeList<RowsHeadDim64General, RowsHeadDim128General, RowsHeadDim256General>;

struct RowsHeadDim64Fp32 {
    static constexpr ConfigFp32 kConfig{.head_dim = 64, .block_kv = 64};
};
struct RowsHeadDim128Fp32 {
    static constexpr ConfigFp32 kConfig{.head_dim = 128, .block_kv = 64};
};
struct RowsHeadDim256Fp32 {
    static constexpr ConfigFp32 kConfig{.head_dim = 256, .block_kv = 32};
};
using RowShapesFp32 = ShapeList<RowsHeadDim64Fp32, RowsHeadDim128Fp32, RowsHeadDim256Fp32>;

}  // namespace tessera::cuda::gradient
