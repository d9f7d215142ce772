// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/fa3/forward/tile_scheduler.cuh"
#include "cuda/fa3/host/forward_config.h"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/swizzle_panel.cuh"

namespace tessera::cuda::fa3 {

/// Warps of the producer warpgroup that look for NaN and infinities in V (warp 0 of it starts the copies).
inline constexpr int kGuardWarps = 3;

/// Named barriers of the thread block. 0 is __syncthreads.
enum NamedBarrier : int {
    kGuardBarrier = 1,
    kTurnBarrier = 2,  ///< and 3: of each of two warpgroups
};

inline constexpr unsigned kAllLanes = 0xFFFFFFFF;

using Panel64 = std::uint16_t[64][kPanelColumns];

/// Where O waits for TMA: memory of its own, or nothing.
template <Config kConfig, bool kOwn>
struct OutputTiles {
    Panel64 o[kConfig.consumers][kConfig.v_panels()];
};
template <Config kConfig>
struct OutputTiles<kConfig, false> {};

/// With pairs of heads: what the first thread block draws for both.
template <bool kPairs>
struct PairOfHeads {
    DrawnTiles drawn;
};
template <>
struct PairOfHeads<false> {};

/// Shared memory of one block. Q is kept by warpgroup.
template <Config kConfig>
struct alignas(1024) Shared : OutputTiles<kConfig, kConfig.own_o()> {
    using PanelKv = std::uint16_t[kConfig.block_kv][kPanelColumns];

    Panel64 q[kConfig.q_stages][kConfig.consumers][kConfig.qk_panels()];
    PanelKv k[kConfig.kv_stages][kConfig.qk_panels()];
    PanelKv v[kConfig.kv_stages][kConfig.v_panels()];
    Ring<kConfig.q_stages> q_ring;
    Ring<kConfig.kv_stages> k_ring;
    Ring<kConfig.kv_stages> v_ring;
    TileRing tiles;
    WorkTile finishing[4 * kConfig.consumers];  ///< of each warp: the tile whose last P V is still to come
    ptx::Mbarrier v_raw[kConfig.kv_stages];     ///< V of a partial block has arrived, for the guard to search
    PairOfHeads<kConfig.pairs_of_heads> pair;   // behind the panels, whose swizzle needs 1024 bytes

    __device__ DrawnTiles* drawn_tiles() {
        if constexpr (kConfig.pairs_of_heads) return &pair.drawn;
        else return nullptr;
    }
    __device__ void init_barriers() {
        constexpr int kReaders = 4 * kConfig.consumers;  // one arrival a warp
        q_ring.init(kReaders);
        tiles.ring.init(kReaders + kGuardWarps);
        constexpr int kBlocks = kConfig.pairs ? 2 : 1;  // that read what is brought
        k_ring.init(kBlocks * kReaders);
        v_ring.init(kBlocks * kReaders);
        for (auto& barrier : v_raw) ptx::mbarrier_init(barrier, 1);
        if constexpr (kConfig.pairs_of_heads) pair.drawn.init();
        ptx::fence_mbarrier_init();
    }
};

}  // namespace tessera::cuda::fa3
