// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tessera::cuda::fa2 {

/// One compiled shape of the kernel. head_dim and head_dim_v of a Problem are padded with zeros to `head_dim`.
struct Config {
    int head_dim;   ///< of Q, K, V and O in shared memory: 64, 128 or 256
    int block_kv;   ///< keys of a tile
    int warps;      ///< each has its own rows of the tile of queries
    int row_tiles;  ///< rows of a warp in units of 16: each fragment of K and V serves all of them
    bool q_in_registers;
    int blocks_per_sm;  ///< that registers must allow for
    bool general;       ///< softcap, ALiBi, bias, dropout and scales of 0 and less

    constexpr int rows_per_warp() const { return 16 * row_tiles; }
    constexpr int block_q() const { return rows_per_warp() * warps; }
    constexpr int threads() const { return 32 * warps; }
    constexpr int stages() const { return 2; }  ///< of K and of V: one is loaded while the other is worked on
    constexpr int q_bytes() const { return block_q() * head_dim * 2; }
    constexpr int kv_bytes() const { return block_kv * head_dim * 2; }
    constexpr int shared_bytes() const { return q_bytes() + 2 * stages() * kv_bytes(); }
};

/// The compiled shapes, as types: what __global__ functions can be templates of. The general shape of a head_dim has
/// the same tile; it needs registers for more than the products, so that more warps have fewer rows each.
struct HeadDim64 {
    static constexpr Config kConfig{.head_dim = 64,
                                    .block_kv = 64,
                                    .warps = 4,
                                    .row_tiles = 2,
                                    .q_in_registers = true,
                                    .blocks_per_sm = 2,
                                    .general = false};
};
struct HeadDim64General {
    static constexpr Config kConfig{.head_dim = 64,
                                    .block_kv = 64,
                                    .warps = 8,
                                    .row_tiles = 1,
                                    .q_in_registers = false,
                                    .blocks_per_sm = 2,
                                    .general = true};
};
struct HeadDim128 {
    static constexpr Config kConfig{.head_dim = 128,
                                    .block_kv = 64,
                                    .warps = 4,
                                    .row_tiles = 2,
                                    .q_in_registers = false,
                                    .blocks_per_sm = 2,
                                    .general = false};
};
struct HeadDim128General {
    static constexpr Config kConfig{.head_dim = 128,
                                    .block_kv = 64,
                                    .warps = 8,
                                    .row_tiles = 1,
                                    .q_in_registers = false,
                                    .blocks_per_sm = 1,
                                    .general = true};
};
struct HeadDim256 {
    static constexpr Config kConfig{.head_dim = 256,
                                    .block_kv = 32,
                                    .warps = 8,
                                    .row_tiles = 1,
                                    .q_in_registers = false,
                                    .blocks_per_sm = 1,
                                    .general = false};
};
struct HeadDim256General {
    static constexpr Config kConfig{.head_dim = 256,
                                    .block_kv = 32,
                                    .warps = 8,
                                    .row_tiles = 1,
                                    .q_in_registers = false,
                                    .blocks_per_sm = 1,
                                    .general = true};
};

}  // namespace tessera::cuda::fa2
