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

/// The position of one side in a ring of any number of stages.
template <int kStages>
using RingState = PipelineState<kStages, StateStorage::index_and_phase>;

/// The positions of a consumer in its rings.
template <Config kConfig>
struct ConsumerState {
    RingState<kConfig.q_stages> q{};
    RingState<kConfig.do_stages> d_o{};
    std::uint32_t steps = 0;  ///< steps done, of all key blocks
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

/// The state of the loads between two key blocks. The producer has no registers to keep it in.
struct LoadState {
    unsigned char parity;  ///< parity of the number of key blocks done
    unsigned char q_index, q_phase, do_index, do_phase;
};

/// The additional state of a persistent CTA (main/persistent.cuh). The full barrier of a ring signals that there is
/// another key block, the empty one that its copy may be overwritten.
template <Config kConfig, bool kPersistent = kConfig.persistent()>
struct PersistentState {
    Ring<1> block_ring;                               ///< signals Shared::block to the consumers
    KeyBlock<kConfig> own_block[Config::kConsumers];  ///< the copy of each consumer warpgroup
    Ring<1> own_ring;                                 ///< signals own_block[0] to the threads that add to dQ
    ptx::Mbarrier k_empty, v_empty;                   ///< K, V are not read any more
    unsigned char parity[Config::kConsumers];         ///< parity of the key blocks done, for each consumer warpgroup
    unsigned char dq_parity[Config::kDqThreads];      ///< likewise for each thread that adds to dQ
    LoadState loads;

    __device__ void init() {
        constexpr int kReaders = 4 * Config::kConsumers;
        block_ring.init(kReaders);
        own_ring.init(Config::kDqThreads);
        ptx::mbarrier_init(k_empty, kReaders);
        ptx::mbarrier_init(v_empty, kReaders);
        for (unsigned char& p : parity) p = 0;
        for (unsigned char& p : dq_parity) p = 0;
    }
};
template <Config kConfig>
struct PersistentState<kConfig, false> {
    __device__ void init() {}
};

template <Config kConfig>
struct alignas(1024) Shared : Exchange<kConfig> {
    using PanelQ = std::uint16_t[kConfig.block_q][kPanelColumns];
    using PanelKv = std::uint16_t[kConfig.block_kv][kPanelColumns];

    PanelKv k[kConfig.qk_panels()];
    PanelKv v[kConfig.v_panels()];
    PanelQ q[kConfig.q_stages][kConfig.qk_panels()];
    PanelQ d_o[kConfig.do_stages][kConfig.v_panels()];
    std::uint16_t dk_upper[kConfig.persistent() ? kConfig.block_kv : 1][kPanelColumns];  ///< dK from column 64 on
    RowStats stats[kConfig.q_stages][kConfig.row_stats()];                               ///< arrive with Q
    int block_q[kConfig.q_stages], head[kConfig.q_stages];                               ///< query block of this Q
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
    KeyBlock<kConfig> block;  ///< the CTA's; in a persistent CTA the next block, once its number is drawn
    PersistentState<kConfig> persistent;

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
        persistent.init();
        for (int w = 0; w < Config::kConsumers; ++w) {
            ptx::mbarrier_init(dq_full[w], 4);
            ptx::mbarrier_init(dq_empty[w], 1);
        }
        ptx::fence_mbarrier_init();
    }
};

}  // namespace tessera::cuda::fa3::backward
