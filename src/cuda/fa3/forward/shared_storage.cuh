// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of a thread block: tiles of Q, K, V and O, and the mbarriers of their rings.
#pragma once

#include "cuda/fa3/forward/tile_scheduler.cuh"
#include "cuda/fa3/host/forward_config.h"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/swizzle_panel.cuh"

namespace tessera::cuda::fa3 {

/// Warps of the producer warpgroup that sanitize V, taking out NaN and infinities. Warp 0 issues the loads.
inline constexpr int kSanitizeWarps = 3;

/// Named barriers of the thread block. 0 is __syncthreads.
enum NamedBarrier : int {
    kSanitizeBarrier = 1,
    kPingPongBarrier = 2,  ///< 2 and 3: one for each of the two warpgroups
};

using Panel64 = std::uint16_t[64][kPanelColumns];

/// The buffer of O for its TMA store, if O has its own shared memory.
template <Config kConfig, bool kOwn>
struct OutputTiles {
    Panel64 o[kConfig.consumers][kConfig.v_panels()];
};
template <Config kConfig>
struct OutputTiles<kConfig, false> {};

/// A TMA box of keys in a page: its first row there.
struct PageBox {
    int row, page;
};

/// Cached shapes: the boxes of two blocks of keys, that whose K is loaded and that whose V is.
template <bool kCached>
struct PageBoxes {
    static constexpr int kMost = 16;  ///< of 8 rows
    PageBox of_block[2][kMost];
};
template <>
struct PageBoxes<false> {};

/// Shared memory of one thread block. Q is kept by warpgroup. The panels come first, since their swizzle needs
/// addresses at multiples of 1024 bytes.
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
    WorkTile epilogue_tiles[4 * kConfig.consumers];  ///< one per warp: the tile whose epilogue comes next
    ptx::Mbarrier v_unsanitized[kConfig.kv_stages];  ///< V of a partial block has arrived and is to be sanitized
    [[no_unique_address]] PageBoxes<kConfig.cached> boxes;

    __device__ void init_barriers() {
        constexpr int kReaders = 4 * kConfig.consumers;  // one arrival a warp
        q_ring.init(kReaders);
        tiles.ring.init(kReaders + kSanitizeWarps);
        k_ring.init(kReaders);
        v_ring.init(kReaders);
        for (auto& barrier : v_unsanitized) ptx::mbarrier_init(barrier, 1);
        ptx::fence_mbarrier_init();
    }
};

}  // namespace tessera::cuda::fa3
