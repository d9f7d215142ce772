// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/gradient/host/config.h"
#include "cuda/host/shape_list.hpp"

namespace tessera::cuda::fa1 {

/// Warps of a group, which split the keys of a block and share a query tile.
inline constexpr int kWarps = 4;
inline constexpr int kGroupThreads = 32 * kWarps;

/// One compiled shape of the kernel. head_dim and head_dim_v of a Problem are padded with zeros to `head_dim`.
struct Config {
    int head_dim;   ///< columns of Q, K, V and O in shared memory: 64, 128 or 256
    int block_kv;   ///< keys of a block, as many as fit: every block costs a pass over O
    int row_tiles;  ///< queries of a tile in units of 16; every warp holds all rows of O
    int groups;     ///< groups of kWarps warps, with query tiles of their own: one computes while another exchanges
    bool general;   ///< softcap, ALiBi, bias, dropout

    constexpr int block_q() const { return 16 * row_tiles; }
    constexpr int keys_per_warp() const { return block_kv / kWarps; }
    constexpr int threads() const { return kGroupThreads * groups; }

    /// Sums of O are exchanged in units of 16 rows x 64 columns. Each warp owns 16 columns of a unit, two tiles of 16 x
    /// 8, which it receives from each of the others.
    constexpr int units() const { return row_tiles * head_dim / 64; }
    constexpr int units_at_once() const { return units() > 1 ? 2 : 1; }
    constexpr int rounds() const { return units() / units_at_once(); }
    static constexpr int unit_bytes() { return kWarps * (kWarps - 1) * 2 * 16 * 8 * 4; }

    constexpr int kv_bytes() const { return block_kv * head_dim * 2; }
    constexpr int q_bytes() const { return block_q() * head_dim * 2; }
    constexpr int state_bytes() const { return kWarps * block_q() * 8; }  ///< m and l of each warp's keys
    constexpr int group_bytes() const { return q_bytes() + units_at_once() * unit_bytes() + state_bytes(); }
    constexpr int shared_bytes() const { return 2 * kv_bytes() + groups * group_bytes() + 16; }
};

/// The compiled shapes (cuda/host/shape_list.hpp). They are types, since __global__ functions can be templates of
/// those.
struct HeadDim64 {
    static constexpr Config kConfig{.head_dim = 64, .block_kv = 256, .row_tiles = 2, .groups = 2, .general = false};
};
struct HeadDim64General {
    static constexpr Config kConfig{.head_dim = 64, .block_kv = 256, .row_tiles = 1, .groups = 2, .general = true};
};
struct HeadDim128 {
    static constexpr Config kConfig{.head_dim = 128, .block_kv = 192, .row_tiles = 2, .groups = 2, .general = false};
};
struct HeadDim128General {
    static constexpr Config kConfig{.head_dim = 128, .block_kv = 192, .row_tiles = 1, .groups = 2, .general = true};
};
struct HeadDim256 {
    static constexpr Config kConfig{.head_dim = 256, .block_kv = 128, .row_tiles = 1, .groups = 2, .general = false};
};
struct HeadDim256General {
    static constexpr Config kConfig{.head_dim = 256, .block_kv = 128, .row_tiles = 1, .groups = 2, .general = true};
};
using Shapes = ShapeList<HeadDim64, HeadDim64General, HeadDim128, HeadDim128General, HeadDim256, HeadDim256General>;

/// The shapes of the backward. All of them are general, since fa1 serves for comparison only.
struct BackwardHeadDim64 {
    static constexpr gradient::Config kConfig{.head_dim = 64, .key_tiles = 2, .general = true};
};
struct BackwardHeadDim128 {
    static constexpr gradient::Config kConfig{.head_dim = 128, .key_tiles = 1, .general = true};
};
struct BackwardHeadDim256 {
    static constexpr gradient::Config kConfig{.head_dim = 256, .key_tiles = 1, .general = true};
};
using BackwardShapes = ShapeList<BackwardHeadDim64, BackwardHeadDim128, BackwardHeadDim256>;

}  // namespace tessera::cuda::fa1
