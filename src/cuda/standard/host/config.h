// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/host/shape_list.hpp"

namespace tessera::cuda::standard {

/// One compiled shape of the GEMMs. head_dim of a Problem (head_dim_v for P V) is padded with zeros.
struct Config {
    int head_dim;       ///< 64, 128 or 256
    int warps;          ///< each has its own rows of the query tile
    int row_tiles;      ///< rows of a warp in units of 16: each fragment of K or V serves all of them
    int blocks_per_sm;  ///< occupancy that the registers must allow

    constexpr int rows_per_warp() const { return 16 * row_tiles; }
    constexpr int block_q() const { return rows_per_warp() * warps; }
    constexpr int block_kv() const { return 64; }
    constexpr int threads() const { return 32 * warps; }
    constexpr int q_bytes() const { return block_q() * head_dim * 2; }
    constexpr int p_bytes() const { return block_q() * block_kv() * 2; }
    constexpr int kv_bytes() const { return block_kv() * head_dim * 2; }
    constexpr int score_stages() const { return 2; }  ///< stages of K: one is loaded while the other is worked on
    constexpr int score_shared_bytes() const { return q_bytes() + score_stages() * kv_bytes(); }
    constexpr int value_stages() const {
        return head_dim > 128 ? 2 : 3;
    }  ///< stages of P and V, both copied from global memory
    constexpr int value_shared_bytes() const { return value_stages() * (p_bytes() + kv_bytes()); }
};

/// The compiled shapes (cuda/host/shape_list.hpp). They are types, since __global__ functions can be templates of
/// those. All have tiles of 128 x 64.
struct HeadDim64 {
    static constexpr Config kConfig{.head_dim = 64, .warps = 4, .row_tiles = 2, .blocks_per_sm = 2};
};
struct HeadDim128 {
    static constexpr Config kConfig{.head_dim = 128, .warps = 4, .row_tiles = 2, .blocks_per_sm = 2};
};
struct HeadDim256 {
    static constexpr Config kConfig{.head_dim = 256, .warps = 8, .row_tiles = 1, .blocks_per_sm = 1};
};
using Shapes = ShapeList<HeadDim64, HeadDim128, HeadDim256>;

inline constexpr int kBlockQ = Shapes::kConfigs[0].block_q();
inline constexpr int kBlockKv = Shapes::kConfigs[0].block_kv();
static_assert(!Shapes::first([](const Config& c) { return c.block_q() != kBlockQ || c.block_kv() != kBlockKv; }));

/// The softmax kernel, with one CTA for each row.
inline constexpr int kSoftmaxThreads = 128;
inline constexpr int kKeysPerThread = 4;  ///< 16 bytes of S
inline constexpr int kKeysAtOnce = kSoftmaxThreads * kKeysPerThread;
inline constexpr int kKeysCached =
    16384;  ///< keys of a row kept in shared memory; the rest of a longer row is read twice

/// kKeysCached of the backward, which reads a row of S and one of dP.
inline constexpr int kGradientKeysCached = 4096;
inline constexpr int kKeysOfBlock = kBlockQ;  ///< keys of a CTA that computes dK or dV
inline constexpr int kStepQueries = 64;       ///< queries of one step of such a CTA
inline constexpr int kBiasTile = 64;          ///< queries, and keys, of a tile of dbias
inline constexpr int kBiasThreads = 256;

}  // namespace tessera::cuda::standard
