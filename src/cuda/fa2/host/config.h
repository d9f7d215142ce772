// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/gradient/host/config.h"
#include "cuda/host/shape_list.hpp"

namespace tessera::cuda::fa2 {

/// One compiled shape of the kernel. head_dim and head_dim_v of a Problem are padded with zeros to `head_dim`.
struct Config {
    int head_dim;   ///< columns of Q, K, V and O in shared memory: 64, 128 or 256
    int block_kv;   ///< keys of a tile
    int warps;      ///< each has its own rows of the query tile
    int row_tiles;  ///< rows of a warp in units of 16: each fragment of K and V serves all of them
    int stages;     ///< stages of K and V. 2: the next tile is loaded during this one. 1: V is loaded during Q K^T, the
                    ///< next K during P V
    bool q_in_registers;
    bool rows_in_shared;  ///< m and l are kept in shared memory, since registers do not suffice
    int blocks_per_sm;    ///< occupancy that the registers must allow
    bool general;         ///< softcap, ALiBi, bias, dropout and scales of 0 and less

    constexpr int rows_per_warp() const { return 16 * row_tiles; }
    constexpr int block_q() const { return rows_per_warp() * warps; }
    constexpr int threads() const { return 32 * warps; }
    constexpr int q_bytes() const { return block_q() * head_dim * 2; }
    constexpr int kv_bytes() const { return block_kv * head_dim * 2; }
    constexpr int stage_bytes() const { return 2 * kv_bytes(); }  ///< K, then V
    constexpr int rows_bytes() const { return rows_in_shared ? row_tiles * threads() * 16 : 0; }
    constexpr int rows_offset() const { return q_bytes() + stages * stage_bytes(); }
    constexpr int shared_bytes() const { return rows_offset() + rows_bytes(); }
};

/// One compiled shape of the kernel in fp32.
struct ConfigFp32 {
    int head_dim;  ///< 64, 128 or 256: head_dim and head_dim_v are padded with zeros to it
    int block_kv;
    int warps;          ///< each has 16 rows of the query tile
    int blocks_per_sm;  ///< occupancy that the registers must allow

    constexpr int block_q() const { return 16 * warps; }
    constexpr int threads() const { return 32 * warps; }
    /// Q, K and V in three bf16 parts.
    constexpr int shared_bytes() const { return 6 * head_dim * (block_q() + 2 * block_kv); }
};

/// The compiled shapes (cuda/host/shape_list.hpp). They are types, since __global__ functions can be templates of
/// those. The general shape of a head_dim has the same tile, but needs more registers: its occupancy is lower, or it
/// has more warps with fewer rows each.
struct HeadDim64 {
    static constexpr Config kConfig{.head_dim = 64,
                                    .block_kv = 64,
                                    .warps = 4,
                                    .row_tiles = 2,
                                    .stages = 2,
                                    .q_in_registers = true,
                                    .rows_in_shared = false,
                                    .blocks_per_sm = 2,
                                    .general = false};
};
struct HeadDim64General {
    static constexpr Config kConfig{.head_dim = 64,
                                    .block_kv = 64,
                                    .warps = 8,
                                    .row_tiles = 1,
                                    .stages = 2,
                                    .q_in_registers = false,
                                    .rows_in_shared = false,
                                    .blocks_per_sm = 1,
                                    .general = true};
};
struct HeadDim128 {
    static constexpr Config kConfig{.head_dim = 128,
                                    .block_kv = 64,
                                    .warps = 4,
                                    .row_tiles = 2,
                                    .stages = 2,
                                    .q_in_registers = false,
                                    .rows_in_shared = true,
                                    .blocks_per_sm = 2,
                                    .general = false};
};
struct HeadDim128General {
    static constexpr Config kConfig{.head_dim = 128,
                                    .block_kv = 64,
                                    .warps = 8,
                                    .row_tiles = 1,
                                    .stages = 2,
                                    .q_in_registers = false,
                                    .rows_in_shared = false,
                                    .blocks_per_sm = 1,
                                    .general = true};
};
struct HeadDim256 {
    static constexpr Config kConfig{.head_dim = 256,
                                    .block_kv = 64,
                                    .warps = 8,
                                    .row_tiles = 1,
                                    .stages = 2,
                                    .q_in_registers = false,
                                    .rows_in_shared = false,
                                    .blocks_per_sm = 1,
                                    .general = false};
};
struct HeadDim256General {
    static constexpr Config kConfig{.head_dim = 256,
                                    .block_kv = 64,
                                    .warps = 8,
                                    .row_tiles = 1,
                                    .stages = 2,
                                    .q_in_registers = false,
                                    .rows_in_shared = false,
                                    .blocks_per_sm = 1,
                                    .general = true};
};
using Shapes = ShapeList<HeadDim64, HeadDim64General, HeadDim128, HeadDim128General, HeadDim256, HeadDim256General>;

struct HeadDim64Fp32 {
    static constexpr ConfigFp32 kConfig{.head_dim = 64, .block_kv = 64, .warps = 4, .blocks_per_sm = 2};
};
struct HeadDim128Fp32 {
    static constexpr ConfigFp32 kConfig{.head_dim = 128, .block_kv = 32, .warps = 4, .blocks_per_sm = 2};
};
struct HeadDim256Fp32 {
    static constexpr ConfigFp32 kConfig{.head_dim = 256, .block_kv = 16, .warps = 2, .blocks_per_sm = 2};
};
using ShapesFp32 = ShapeList<HeadDim64Fp32, HeadDim128Fp32, HeadDim256Fp32>;

/// The shapes of the backward, in 16 bits.
struct BackwardHeadDim64 {
    static constexpr gradient::Config kConfig{
        .head_dim = 64, .key_tiles = 2, .general = false, .stages = 3, .query_tiles = 2, .split_queries = true};
};
struct BackwardHeadDim64General {
    static constexpr gradient::Config kConfig{.head_dim = 64, .key_tiles = 2, .general = true};
};
struct BackwardHeadDim128 {
    static constexpr gradient::Config kConfig{.head_dim = 128, .key_tiles = 2, .general = false, .stages = 3};
};
struct BackwardHeadDim128General {
    static constexpr gradient::Config kConfig{.head_dim = 128, .key_tiles = 1, .general = true};
};
struct BackwardHeadDim256 {
    static constexpr gradient::Config kConfig{.head_dim = 256,
                                              .key_tiles = 1,
                                              .general = false,
                                              .score_queries = 16,
                                              .score_tiles = 2,
                                              .sum_tiles = 2,
                                              .dq_columns = 8};
};
struct BackwardHeadDim256General {
    static constexpr gradient::Config kConfig{.head_dim = 256, .key_tiles = 1, .general = true};
};
using BackwardShapes = ShapeList<BackwardHeadDim64, BackwardHeadDim64General, BackwardHeadDim128,
                                 BackwardHeadDim128General, BackwardHeadDim256, BackwardHeadDim256General>;

/// The shapes of the backward in fp32 by parts, up to head_dim 128. The first of a head_dim for which a device has
/// enough shared memory runs.
struct BackwardHeadDim64Fp32 {
    static constexpr gradient::PartsConfig kConfig{.head_dim = 64, .block_kv = 128, .query_warps = 1};
};
struct BackwardHeadDim64Fp32Small {
    static constexpr gradient::PartsConfig kConfig{.head_dim = 64, .block_kv = 64, .query_warps = 2};
};
struct BackwardHeadDim128Fp32 {
    static constexpr gradient::PartsConfig kConfig{.head_dim = 128, .block_kv = 64, .query_warps = 2};
};
using BackwardShapesParts = ShapeList<BackwardHeadDim64Fp32, BackwardHeadDim64Fp32Small, BackwardHeadDim128Fp32>;

/// The shape of the backward in fp32 by multiply-adds, over head_dim 128.
struct BackwardHeadDim256Fp32 {
    static constexpr gradient::ConfigFp32 kConfig{.head_dim = 256, .block_kv = 32};
};
using BackwardShapesFp32 = ShapeList<BackwardHeadDim256Fp32>;

}  // namespace tessera::cuda::fa2
