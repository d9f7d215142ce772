// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/fa3/backward/launch.hpp"
#include "cuda/fa3/backward/main/wait.cuh"
#include "cuda/fa3/host/backward_config.h"
#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/swizzle_panel.cuh"

namespace tessera::cuda::fa3::backward {

/// Named barriers of the thread block. 0 is __syncthreads.
enum NamedBarrier : int {
    kConsumersBarrier = 1,
    kWarpgroupBarrier = 2,  ///< of the first consumer warpgroup; the other's follows
    kEndBarrier = 4,        ///< of all consumer warpgroups
    kOwnBarrier = 5,        ///< of the first consumer warpgroup, between blocks of keys; the other's follows
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
    __device__ __forceinline__ int stage_before() const { return stage == 0 ? kStages - 1 : stage - 1; }
};

/// Where a consumer stands in its rings.
template <Config kConfig>
struct ConsumerPlace {
    Turn<kConfig.q_stages> q{};
    Turn<kConfig.do_stages> d_o{};
    std::uint32_t steps = 0;  ///< that are done, of all blocks of keys
};

/// The block of keys that a thread block works on.
template <Config kConfig>
struct KeyBlock {
    BlocksOf<kConfig> blocks;
    int batch, kv_head, n;
    int part, started;              ///< of a head's parts, and how many blocks of it start before
    int share;                      ///< of the group's query heads
    int end_head;                   ///< the query head after its last one
    int lost;                       ///< not 0: NaN or infinities may have been taken out of dO
    float unit;                     ///< fp16: what dS is held times beside P (units.cuh)
    bool finishes;                  ///< it is the last to add to some blocks of queries, and makes dQ of their sum
    int before, most;               ///< added_before(n), last_of_part(n)
    int first_q, first_kv;          ///< rows where a ragged sequence begins
    int first_block_q;              ///< of the sequence
    Span full[Config::kConsumers];  ///< blocks of queries that see all keys of a warpgroup

    /// Which keys.
    __device__ __forceinline__ void set_place(const Launch& launch, unsigned number) {
        const ForwardParams& p = launch.params.forward;
        // Some heads, all their parts; of a part all these heads; of a head its blocks.
        const int own = static_cast<int>(number);
        const int round = launch.round.quotient(own);
        const int of_round = own - round * launch.round.divisor();
        const int first_head = round * launch.heads_at_once;
        const Divider& of_part =
            launch.heads - first_head < launch.heads_at_once ? launch.of_last_part : launch.of_part;
        part = of_part.quotient(of_round);
        const int left = of_round - part * of_part.divisor();
        const int of_these = launch.of_part_kv.quotient(left);
        started = left - of_these * launch.part_kv;
        const int head = first_head + of_these;
        batch = launch.shared_heads.quotient(head);
        const int of_sequence = head - batch * launch.shared_heads.divisor();
        kv_head = launch.of_shares.quotient(of_sequence);
        share = of_sequence - kv_head * launch.shares;
        const Sequence sequence = sequence_of(p, batch);
        first_q = static_cast<int>(sequence.first_q);
        first_kv = static_cast<int>(sequence.first_kv);
        first_block_q = static_cast<int>(backward::first_block_q(p, kConfig.block_q, batch, sequence.first_q));
        const int len_q = sequence.len_q, len_kv = sequence.len_kv;
        forget_registers();
        blocks.set_of(launch.blocks, p.cu_seqlens_q != nullptr, p.mask, len_q, len_kv, p.group, p.heads_kv);
        forget_registers();
        end_head = kv_head * p.group + (share + 1) * blocks.share_heads;
        // By roles, nobody waits.
        if constexpr (kConfig.roles()) n = part * launch.part_kv + started;
        else n = blocks.block_of(part, started, launch.parts, launch.part_kv);
        if (share >= blocks.shares) n = blocks.count_kv;
    }
    /// The sequences are in memory, and are to be read from there: the thread that goes on to the next block has few
    /// registers.
    __device__ __forceinline__ static void forget_registers() {
        if constexpr (kConfig.goes_on()) ptx::compiler_memory_barrier();
    }
    /// And what follows from that.
    __device__ __forceinline__ void set_order(const Launch& launch) {
        lost = 0;
        before = blocks.added_before(n);
        finishes = launch.finishes && n == before;
        most = blocks.last_of_part(n);
        for (int w = 0; w < Config::kConsumers; ++w) {
            full[w] = blocks.full_queries_of(n * kConfig.block_kv + kConfig.first_row(w), Config::kRows);
        }
    }
    __device__ __forceinline__ bool exists() const { return n < blocks.count_kv; }
    /// The place of block m of a query head among all blocks of queries.
    __device__ __forceinline__ std::int64_t block_q(const Launch& launch, int head, int m) const {
        return std::int64_t{head} * launch.blocks_q + first_block_q + m;
    }
};

/// Where dQ of a step goes: to the sum in the workspace; or, when all others have added, out: with that sum, or alone.
enum class DqGoes : unsigned char { to_sum, out, out_alone };

/// What consumer warpgroups make for each other, and dQ on its way out.
template <Config kConfig, bool kRoles = kConfig.roles()>
struct Exchange {
    std::uint16_t ds[Config::kStages][kConfig.block_kv / 64][kConfig.block_q][kPanelColumns];  ///< 64 keys: a panel
    float dq[Config::kConsumers][Config::kRows * kConfig.dq_columns()];                        ///< as accumulators lie
};
template <Config kConfig>
struct Exchange<kConfig, true> {
    float p[kConfig.q_stages][Config::kRows * Config::kRows];  ///< P^T, as accumulators lie; in the stage of its Q
};

/// Where the copies stand between two blocks of keys: for registers there would be too many.
struct LoaderPlace {
    unsigned char parity;  ///< of the blocks of keys that are done
    unsigned char q_stage, q_phase, do_stage, do_phase;
};

/// Of a thread block that takes one block of keys after the other. All of Ring: `full`, there is another one; `empty`,
/// it may be overwritten.
template <Config kConfig, bool kGoesOn = kConfig.goes_on()>
struct GoingOn {
    Ring<1> block_ring;                         ///< Shared::block
    KeyBlock<kConfig> own[Config::kConsumers];  ///< what each consumer warpgroup works on
    Ring<1> own_ring;                           ///< own[0], for the threads that add to dQ
    ptx::Mbarrier k_empty, v_empty;             ///< K, V are not read any more
    unsigned char parity[Config::kConsumers], adder_parity[Config::kAdders];  ///< of the blocks of keys that are done
    LoaderPlace loader;

    __device__ void init() {
        constexpr int kReaders = 4 * Config::kConsumers;
        block_ring.init(kReaders);
        own_ring.init(Config::kAdders);
        ptx::mbarrier_init(k_empty, kReaders);
        ptx::mbarrier_init(v_empty, kReaders);
        for (unsigned char& p : parity) p = 0;
        for (unsigned char& p : adder_parity) p = 0;
    }
};
template <Config kConfig>
struct GoingOn<kConfig, false> {
    __device__ void init() {}
};

/// Shared memory of one block of the main kernel.
template <Config kConfig>
struct alignas(1024) Shared : Exchange<kConfig> {
    using PanelQ = std::uint16_t[kConfig.block_q][kPanelColumns];
    using PanelKv = std::uint16_t[kConfig.block_kv][kPanelColumns];

    PanelKv k[kConfig.qk_panels()];
    PanelKv v[kConfig.v_panels()];
    PanelQ q[kConfig.q_stages][kConfig.qk_panels()];
    PanelQ d_o[kConfig.do_stages][kConfig.v_panels()];
    std::uint16_t dk_rest[kConfig.goes_on() ? kConfig.block_kv : 1][kPanelColumns];  ///< dK over 64 columns, going out
    RowStats stats[kConfig.q_stages][kConfig.row_stats()];                           ///< come with Q
    int block_q[kConfig.q_stages], head[kConfig.q_stages];                           ///< whose Q it is
    Ring<kConfig.q_stages> q_ring;
    Ring<kConfig.do_stages> do_ring;
    ptx::Mbarrier k_full, v_full;
    ptx::Mbarrier dq_full[Config::kConsumers], dq_empty[Config::kConsumers];
    ptx::Mbarrier dq_turn, dq_added;  ///< both halves: it is this block's turn to add them; they are added
    unsigned dq_block;                ///< of the turn: DqTurn::block_q
    bool dq_first;                    ///< of the turn: nobody has added before
    /// dQ apart: dS of 64 queries, for the third warpgroup.
    Ring<kConfig.dq_apart() ? 2 * Config::kStages : 1> ds_ring;
    ptx::Mbarrier p_full[kConfig.roles() ? kConfig.q_stages : 1];  ///< roles: P, for the other warpgroup
    DqGoes dq_goes[Config::kConsumers];  ///< of the step, where this block of keys is the last to add to some
    KeyBlock<kConfig> block;             ///< the thread block's; if it goes on, the next one, as soon as that is drawn
    GoingOn<kConfig> on;

    __device__ void init_barriers() {
        constexpr int kReaders = 4 * Config::kConsumers;  // one arrival a warp
        q_ring.init(kConfig.threads() / 32 - 4);
        do_ring.init(kReaders);
        ds_ring.init(4, kReaders);
        ptx::mbarrier_init(dq_turn, 1);
        ptx::mbarrier_init(dq_added, Config::kConsumers);
        ptx::mbarrier_init(k_full, 1);
        ptx::mbarrier_init(v_full, 1);
        for (ptx::Mbarrier& full : p_full) ptx::mbarrier_init(full, 4);
        on.init();
        for (int w = 0; w < Config::kConsumers; ++w) {
            ptx::mbarrier_init(dq_full[w], 4);
            ptx::mbarrier_init(dq_empty[w], 1);
        }
        ptx::fence_mbarrier_init();
    }
};

}  // namespace tessera::cuda::fa3::backward
