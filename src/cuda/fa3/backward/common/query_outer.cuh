// SPDX-License-Identifier: Apache-2.0
//
// Shared memory and loads of the kernels whose outer loop is over queries: delta_kernel and dq_kernel. Q and dO of a
// tile stay, K and V go through rings.
#pragma once

#include "cuda/fa3/backward/common/query_tile.cuh"
#include "cuda/fa3/backward/common/wait.cuh"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/swizzle_panel.cuh"
#include "cuda/tile/tma_copy.cuh"

namespace tessera::cuda::fa3::backward {

/// Shared memory of a CTA. kTwoKStages: K has two stages even where V has one.
template <Config kConfig, bool kTwoKStages>
struct alignas(1024) QueryOuterShared {
    static constexpr int kKStages = kTwoKStages ? 2 : kConfig.delta_stages();
    static constexpr int kVStages = kConfig.delta_stages();
    static constexpr int kBlocks = Config::kQueryTile / kConfig.block_q;
    using PanelQ = std::uint16_t[kConfig.block_q][kPanelColumns];
    using PanelKv = std::uint16_t[kConfig.block_kv][kPanelColumns];

    PanelQ q[kBlocks][kConfig.qk_panels()];
    PanelQ d_o[kBlocks][kConfig.v_panels()];
    PanelKv k[kKStages][kConfig.qk_panels()];
    PanelKv v[kVStages][kConfig.v_panels()];
    ptx::Mbarrier q_full;
    Ring<kKStages> k_ring;
    Ring<kVStages> v_ring;
    int some_nonfinite[Config::kConsumers], some_large[Config::kConsumers];
    int tile;  ///< delta_kernel: the number of the next tile

    __device__ void init_barriers() {
        ptx::mbarrier_init(q_full, 1);
        k_ring.init(4 * Config::kConsumers);
        v_ring.init(4 * Config::kConsumers);
        ptx::fence_mbarrier_init();
    }
    /// The barriers may then be initialized again.
    __device__ void end_barriers() {
        ptx::mbarrier_inval(q_full);
        k_ring.end();
        v_ring.end();
    }
};

/// One thread: all loads of a tile.
template <Config kConfig, class OfShared>
__device__ __forceinline__ void load_query_tile(const Launch& launch, OfShared& shared,
                                                const QueryTile<kConfig>& tile) {
    const ForwardParams& p = launch.params.forward;
    const int batch = p.cu_seqlens_q != nullptr ? 0 : tile.batch;
    ptx::mbarrier_arrive_expect(shared.q_full, sizeof(shared.q) + sizeof(shared.d_o));
    for (int m = 0; m < OfShared::kBlocks; ++m) {
        const int row = tile.first_q + tile.query + m * kConfig.block_q;
        copy_in(shared.q[m], launch.maps.q, row, tile.head, batch, shared.q_full, ptx::CacheHint::evict_first);
        copy_in(shared.d_o[m], launch.maps.d_o, row, tile.head, batch, shared.q_full, ptx::CacheHint::evict_first);
    }
    PipelineState<OfShared::kKStages> k;
    PipelineState<OfShared::kVStages> v;
    for (int n = tile.n_begin; n < tile.n_end; ++n, k.advance(), v.advance()) {
        const int row = tile.first_kv + n * kConfig.block_kv;
        const int kv_head = tile.head / p.group;
        wait_for(shared.k_ring.empty[k.index()], k.phase() ^ 1);
        ptx::mbarrier_arrive_expect(shared.k_ring.full[k.index()], sizeof(shared.k[0]));
        copy_in(shared.k[k.index()], launch.maps.k, row, kv_head, batch, shared.k_ring.full[k.index()],
                ptx::CacheHint::evict_last);
        wait_for(shared.v_ring.empty[v.index()], v.phase() ^ 1);
        ptx::mbarrier_arrive_expect(shared.v_ring.full[v.index()], sizeof(shared.v[0]));
        copy_in(shared.v[v.index()], launch.maps.v, row, kv_head, batch, shared.v_ring.full[v.index()],
                ptx::CacheHint::evict_last);
    }
}

}  // namespace tessera::cuda::fa3::backward
