// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/fa3/backward/config.h"
#include "cuda/fa3/backward/launch.hpp"
#include "cuda/fa3/backward/order.hpp"
#include "cuda/fa3/backward/wait.cuh"
#include "cuda/tile/member.cuh"
#include "cuda/tile/slab.cuh"

namespace tessera::cuda::fa3::backward {

/// Named barriers of the thread block. 0 is __syncthreads.
enum NamedBarrier : int {
    kConsumersBarrier = 1,
    kWarpgroupBarrier = 2,  ///< of the first consumer warpgroup; the other's follows
};

inline constexpr unsigned kAllLanes = 0xFFFFFFFF;

/// Where one side stands in a ring of any number of stages.
template <int kStages>
struct Turn {
    int stage = 0;
    std::uint32_t phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
};

/// The block of keys that a thread block works on.
struct KeyBlock {
    Blocks blocks;
    int batch, kv_head, n;
    int first_q, first_kv;  ///< rows where a ragged member begins
    int first_block_q;      ///< of the member

    __device__ __forceinline__ void set(const Launch& launch, unsigned number) {
        const ForwardParams& p = launch.params.forward;
        // The same n of some heads, then the next n; then the next heads.
        const int per_group = launch.heads_together * launch.blocks_kv;
        const int index = static_cast<int>(number);
        const int first_head = index / per_group * launch.heads_together;
        const int heads_here = min(launch.heads_together, static_cast<int>(p.batch) * p.heads_kv - first_head);
        const int within = index % per_group;
        const int head = first_head + within % heads_here;
        const int place = within / heads_here;
        n = launch.sums == 1 ? place : launch.blocks_kv - 1 - place;
        batch = head / p.heads_kv;
        kv_head = head - batch * p.heads_kv;
        const Member member = member_of(p, batch);
        first_q = static_cast<int>(member.first_q);
        first_kv = static_cast<int>(member.first_kv);
        first_block_q = static_cast<int>(backward::first_block_q(p, batch, member.first_q));
        blocks.set(p.mask, member.len_q, member.len_kv, launch.sums == 1);
    }
    __device__ __forceinline__ bool exists() const { return n < blocks.count_kv; }
    /// The place of block m of a query head among all blocks of queries.
    __device__ __forceinline__ std::int64_t block_q(const Launch& launch, int head, int m) const {
        return std::int64_t{head} * launch.blocks_q + first_block_q + m;
    }
};

/// Shared memory of one block of the main kernel.
template <Config kConfig>
struct alignas(1024) Shared {
    using SlabQ = std::uint16_t[Config::kBlockQ][kSlabColumns];
    using SlabKv = std::uint16_t[Config::kBlockKv][kSlabColumns];

    SlabKv k[kConfig.qk_slabs()];
    SlabKv v[kConfig.v_slabs()];
    SlabQ q[kConfig.q_stages][kConfig.qk_slabs()];
    SlabQ d_o[Config::kStages][kConfig.v_slabs()];
    SlabQ ds[Config::kStages][Config::kConsumers];  ///< a warpgroup's 64 keys are the columns of a slab
    float dq[Config::kConsumers][Config::kBlockQ * kConfig.dq_columns()];  ///< as accumulators lie
    RowStats stats[kConfig.q_stages];                                      ///< come with Q
    int block_q[kConfig.q_stages], head[kConfig.q_stages];                 ///< whose Q it is
    Ring<kConfig.q_stages> q_ring;
    Ring<Config::kStages> do_ring;
    ptx::Mbarrier kv_full;
    ptx::Mbarrier dq_full[Config::kConsumers], dq_empty[Config::kConsumers];
    KeyBlock block;
    int lost;  ///< not 0: NaN or infinities may have been taken out of dO

    __device__ void init_barriers() {
        constexpr int kReaders = 4 * Config::kConsumers;  // one arrival a warp
        q_ring.init(kReaders);
        do_ring.init(kReaders);
        ptx::mbarrier_init(kv_full, 1);
        for (int w = 0; w < Config::kConsumers; ++w) {
            ptx::mbarrier_init(dq_full[w], 4);
            ptx::mbarrier_init(dq_empty[w], 1);
        }
        ptx::fence_mbarrier_init();
    }
};

}  // namespace tessera::cuda::fa3::backward
