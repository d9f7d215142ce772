// SPDX-License-Identifier: Apache-2.0
//
// TMA loads of whole tiles, panel by panel (tile/swizzle_panel.cuh). One thread issues them.
#pragma once

#include "cuda/ptx/tma.cuh"
#include "cuda/tile/swizzle_panel.cuh"

namespace tessera::cuda {

/// Starts the load of a tile: its panels, from row `row` of (head, batch) on. `full` counts the bytes.
template <class Panel, int kPanels>
__device__ __forceinline__ void copy_in(Panel (&panels)[kPanels], const CUtensorMap& map, int row, int head, int batch,
                                        ptx::Mbarrier& full, ptx::CacheHint hint) {
#pragma unroll
    for (int s = 0; s < kPanels; ++s) ptx::tma_load_4d(panels[s], map, s * kPanelColumns, row, head, batch, full, hint);
}

}  // namespace tessera::cuda
