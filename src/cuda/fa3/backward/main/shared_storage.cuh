// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of a CTA of the main kernel, and its mbarriers.
#pragma once

#include "cuda/fa3/backward/common/wait.cuh"
#include "cuda/fa3/backward/launch.hpp"
#include "cuda/fa3/backward/main/key_block.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/swizzle_panel.cuh"

namespace tessera::cuda::fa3::backward {

/// PipelineState for any number of stages.
template <int kStages>
using AnyPipelineState = PipelineState<kStages, StateStorage::index_and_phase>;

/// The positions of a consumer in its rings.
template <Config kConfig>
struct ConsumerState {
    AnyPipelineState<kConfig.q_stages> q{};
    AnyPipelineState<kConfig.do_stages> d_o{};
    std::uint32_t steps = 0;  ///< steps done
};

/// The destination of a step's dQ: the accumulator in the workspace; or, if all other key blocks have added, the output
/// tensor, with or without the accumulator's sum.
enum class DqTarget : unsigned char { accumulator, output_with_sum, output_alone };

/// Buffers for data that consumer warpgroups pass to each other, and for dQ on its way out.
template <Config kConfig, bool kSplitsDvDk = kConfig.splits_dv_dk()>
struct Exchange {
    std::uint16_t ds[Config::kDsStages][kConfig.block_kv / 64][kConfig.block_q][kPanelColumns];  ///< a panel: 64 keys
    float dq[Config::kConsumers][Config::kRows * kConfig.dq_columns()];  ///< in accumulator layout
};
template <Config kConfig>
struct Exchange<kConfig, true> {
    float p[kConfig.q_stages][Config::kRows * Config::kRows];  ///< P^T in accumulator layout, by the stage of its Q
};

template <Config kConfig>
struct alignas(1024) Shared : Exchange<kConfig> {
    using PanelQ = std::uint16_t[kConfig.block_q][kPanelColumns];
    using PanelKv = std::uint16_t[kConfig.block_kv][kPanelColumns];

    PanelKv k[kConfig.qk_panels()];
    PanelKv v[kConfig.v_panels()];
    PanelQ q[kConfig.q_stages][kConfig.qk_panels()];
    PanelQ d_o[kConfig.do_stages][kConfig.v_panels()];
    RowStats stats[kConfig.q_stages][kConfig.row_stats()];  ///< arrive with Q
    int block_q[kConfig.q_stages], head[kConfig.q_stages];  ///< query block of this Q
    Ring<kConfig.q_stages> q_ring;
    Ring<kConfig.do_stages> do_ring;
    ptx::Mbarrier k_full, v_full;
    ptx::Mbarrier dq_full[Config::kConsumers], dq_empty[Config::kConsumers];
    ptx::Mbarrier dq_may_add, dq_added;  ///< order thread: both halves may be added; both have been
    unsigned dq_block;                   ///< order thread: DqSemaphore::block_q of the halves that may be added
    bool dq_first;                       ///< order thread: no key block has added to them yet
    /// With a dedicated dQ warpgroup: dS of 64 queries in each stage.
    Ring<kConfig.dedicated_dq_warpgroup() ? 2 * Config::kDsStages : 1> ds_ring;
    ptx::Mbarrier p_full[kConfig.splits_dv_dk() ? kConfig.q_stages : 1];  ///< dV and dK split: P, for the dK warpgroup
    DqTarget dq_target[Config::kConsumers];  ///< where the step's dQ goes, if this key block writes it
    /// The keys of each warp of the consumers that have NaN or infinities (ConsumerThread::is_nonfinite_key).
    unsigned nonfinite_keys[Config::kConsumers][4];
    KeyBlock<kConfig> block;

    __device__ void init_barriers() {
        constexpr int kReaders = 4 * Config::kConsumers;  // one arrival a warp
        q_ring.init(kConfig.threads() / 32 - 4);
        do_ring.init(kReaders);
        ds_ring.init(4, kReaders);
        ptx::mbarrier_init(dq_may_add, 1);
        ptx::mbarrier_init(dq_added, Config::kConsumers);
        ptx::mbarrier_init(k_full, 1);
        ptx::mbarrier_init(v_full, 1);
        for (ptx::Mbarrier& full : p_full) ptx::mbarrier_init(full, 4);
        for (int w = 0; w < Config::kConsumers; ++w) {
            ptx::mbarrier_init(dq_full[w], 4);
            ptx::mbarrier_init(dq_empty[w], 1);
        }
        ptx::fence_mbarrier_init();
    }
};

}  // namespace tessera::cuda::fa3::backward
