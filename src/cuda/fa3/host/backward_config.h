// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/host/shape_list.hpp"

namespace tessera::cuda::fa3::backward {

/// One compiled shape of the backward. Dimensions of a Problem are padded with zeros to the next shape that holds them.
struct Config {
    int head_dim;        ///< of Q and K: a multiple of 32
    int head_dim_v;      ///< of V and dO: a multiple of 32
    int block_q = 64;    ///< queries of a step: 64; or 128, taken 64 at a time, then a third warpgroup makes dQ
    int block_kv = 128;  ///< keys: 64 of each warpgroup; or 64, then one makes dV and the other dK (roles)
    int q_stages = 3;
    int do_stages = 2;
    bool general = false;  ///< softcap, ALiBi, dropout, and scales of 0 and less

    static constexpr int kStages = 2;     ///< of dS: the parity of the step
    static constexpr int kRows = 64;      ///< of a warpgroup's products; of RowStats
    static constexpr int kConsumers = 2;  ///< warpgroups that make dK and dV
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr int kAdders = kConsumers + 1;  ///< threads that see to the sums of dQ, one of them to their order
    static constexpr int kProducerRegisters = 24;
    static constexpr int kConsumerRegisters = 240;
    static constexpr int kDeltaRegisters = 168;  ///< of each thread of delta_kernel when it starts, ...
    static constexpr int kDeltaProducerRegisters = 40, kDeltaConsumerRegisters = 232;  ///< ... and with a tile
    static constexpr int kDqRegisters = 88;         ///< of the warpgroup that makes dQ apart,
    static constexpr int kBesideDqRegisters = 200;  ///< and of the other two beside it

    /// Does a third consumer warpgroup make dQ (apart.cuh)?
    constexpr bool dq_apart() const { return block_q == 2 * kRows; }
    constexpr int threads() const { return kThreads + (dq_apart() ? 128 : 0); }
    constexpr int consumer_registers() const { return dq_apart() ? kBesideDqRegisters : kConsumerRegisters; }
    /// Panels of 64 columns in shared memory; zeros past head_dim.
    constexpr int qk_panels() const { return (head_dim + 63) / 64; }
    constexpr int v_panels() const { return (head_dim_v + 63) / 64; }
    /// Does one warpgroup make P and dV, the other one dS and dK? dQ then has a kernel of its own (dq_product.cuh).
    constexpr bool roles() const { return block_kv == kRows; }
    /// A warpgroup's first row of the block's keys.
    constexpr int first_row(int warpgroup) const { return roles() ? 0 : kRows * warpgroup; }
    /// Columns of dQ that a warpgroup of the main kernel multiplies at once, always of 64 queries.
    constexpr int dq_columns() const { return dq_apart() ? head_dim : head_dim / kConsumers; }
    /// Does a thread of its own keep the order of dQ (keep_order)?
    constexpr bool order_kept() const { return !roles() && !dq_apart(); }
    /// Does a thread block take one block of keys after the other? (Elsewhere its steps got dearer than what that
    /// saves.)
    constexpr bool goes_on() const { return order_kept() && !general; }
    /// May the last block of keys to add to dQ make it of the sum? (Elsewhere registers are short.)
    constexpr bool may_finish() const { return !roles() && !general; }
    /// Of block_q queries: where RowStats stand, one after the other.
    constexpr int row_stats() const { return block_q / kRows; }
    /// Blocks of keys in shared memory where queries are outer; K is there twice while dQ is made.
    constexpr int delta_stages() const { return head_dim > 192 ? 1 : 2; }
};

/// The compiled shapes (cuda/host/shape_list.hpp), as types: what __global__ functions can be templates of.
struct HeadDim64 {
    static constexpr Config kConfig{.head_dim = 64, .head_dim_v = 64, .block_q = 128};
};
struct HeadDim128 {
    static constexpr Config kConfig{.head_dim = 128, .head_dim_v = 128};
};
/// Where dK and dV of 64 keys fill the registers of a warpgroup each.
struct HeadDim192V128 {
    static constexpr Config kConfig{.head_dim = 192, .head_dim_v = 128, .block_kv = 64};
};
struct HeadDim192 {
    static constexpr Config kConfig{.head_dim = 192, .head_dim_v = 192, .block_kv = 64};
};
struct HeadDim256 {
    static constexpr Config kConfig{.head_dim = 256, .head_dim_v = 256, .block_kv = 64, .q_stages = 2};
};
/// Shapes that do more to a score.
struct HeadDim64General {
    static constexpr Config kConfig{.head_dim = 64, .head_dim_v = 64, .general = true};
};
struct HeadDim128General {
    static constexpr Config kConfig{.head_dim = 128, .head_dim_v = 128, .general = true};
};
using Shapes =
    ShapeList<HeadDim64, HeadDim128, HeadDim192V128, HeadDim192, HeadDim256, HeadDim64General, HeadDim128General>;
/// Those whose dQ blocks of keys add up, and those by roles, whose dQ has a kernel of its own.
using ShapesThatAdd = ShapeList<HeadDim64, HeadDim128, HeadDim64General, HeadDim128General>;
using ShapesByRoles = ShapeList<HeadDim192V128, HeadDim192, HeadDim256>;

}  // namespace tessera::cuda::fa3::backward
