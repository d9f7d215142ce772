// SPDX-License-Identifier: Apache-2.0
//
// The compiled shapes of the backward, and which of its modes each one has. Plain C++.
#pragma once

#include "cuda/fa3/host/score_mod.h"
#include "cuda/host/shape_list.hpp"

namespace tessera::cuda::fa3::backward {

/// One compiled shape of the backward. Dimensions of a Problem are padded with zeros to the next shape that holds them.
struct Config {
    int head_dim;        ///< columns of Q and K: a multiple of 32
    int head_dim_v;      ///< columns of V and dO: a multiple of 32
    int block_q = 64;    ///< queries of a step: 64, or 128 in two halves (with a dedicated dQ warpgroup)
    int block_kv = 128;  ///< keys of a CTA: 64 for each warpgroup, or 64 for both (dV and dK split)
    int q_stages = 3;
    int do_stages = 2;
    Scores scores = Scores::plain;

    static constexpr int kDsStages = 2;   ///< stages of dS; the stage is the parity of the step
    static constexpr int kRows = 64;      ///< M of a warpgroup's MMA, and rows of one RowStats
    static constexpr int kConsumers = 2;  ///< warpgroups that make dK and dV
    static constexpr int kQueryTile =
        kRows * kConsumers;  ///< queries of a CTA in kernels with the outer loop over queries
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr int kProducerRegisters = 24;
    static constexpr int kConsumerRegisters = 240;
    static constexpr int kDeltaRegisters = 168;  ///< registers of a delta_kernel thread at launch
    static constexpr int kDeltaProducerRegisters = 40, kDeltaConsumerRegisters = 232;  ///< after setmaxnreg
    static constexpr int kDqWarpgroupRegisters = 88;    ///< registers of a thread of the dedicated dQ warpgroup
    static constexpr int kKeyWarpgroupRegisters = 200;  ///< registers of a thread of the two warpgroups beside it

    /// Does a third consumer warpgroup make dQ (main/mainloop_64.cuh)?
    constexpr bool dedicated_dq_warpgroup() const { return block_q == 2 * kRows; }
    constexpr int threads() const { return kThreads + (dedicated_dq_warpgroup() ? 128 : 0); }
    constexpr int consumer_registers() const {
        return dedicated_dq_warpgroup() ? kKeyWarpgroupRegisters : kConsumerRegisters;
    }
    /// Panels of 64 columns in shared memory; zeros past head_dim.
    constexpr int qk_panels() const { return (head_dim + 63) / 64; }
    constexpr int v_panels() const { return (head_dim_v + 63) / 64; }
    /// Does one warpgroup compute P and dV, the other one dS and dK (main/mainloop_wide.cuh)? A separate kernel then
    /// computes dQ (after/dq_kernel.cuh).
    constexpr bool splits_dv_dk() const { return block_kv == kRows; }
    /// A warpgroup's first row of the CTA's keys.
    constexpr int first_row(int warpgroup) const { return splits_dv_dk() ? 0 : kRows * warpgroup; }
    /// Columns of dQ in one MMA of the main kernel. Such an MMA has 64 queries.
    constexpr int dq_columns() const { return dedicated_dq_warpgroup() ? head_dim : head_dim / kConsumers; }
    /// Does one producer thread wait for the dQ semaphores of both halves (order_dq_additions)?
    constexpr bool has_dq_order_thread() const { return !splits_dv_dk() && !dedicated_dq_warpgroup(); }
    /// May the last key block that adds to dQ write the finished dQ? The other shapes have no registers for it.
    constexpr bool may_write_dq() const { return !splits_dv_dk() && scores != Scores::general; }
    constexpr bool takes_bias() const { return scores == Scores::bias || scores == Scores::general; }
    /// RowStats of a query block, one after the other.
    constexpr int row_stats() const { return block_q / kRows; }
    /// Stages of K and V in the kernels whose outer loop is over queries. The dQ kernel has two of K in any case.
    constexpr int delta_stages() const { return head_dim > 192 ? 1 : 2; }
};

/// The compiled shapes (cuda/host/shape_list.hpp), as types: __global__ functions are templates of them.
struct HeadDim64 {
    static constexpr Config kConfig{.head_dim = 64, .head_dim_v = 64, .block_q = 128};
};
struct HeadDim128 {
    static constexpr Config kConfig{.head_dim = 128, .head_dim_v = 128};
};
/// From here on, dK or dV of 64 keys fills the registers of a warpgroup.
struct HeadDim192V128 {
    static constexpr Config kConfig{.head_dim = 192, .head_dim_v = 128, .block_kv = 64};
};
struct HeadDim192 {
    static constexpr Config kConfig{.head_dim = 192, .head_dim_v = 192, .block_kv = 64};
};
struct HeadDim256 {
    static constexpr Config kConfig{.head_dim = 256, .head_dim_v = 256, .block_kv = 64, .q_stages = 2};
};
/// Returns the shape with a score modification (main/score_mod.cuh).
constexpr Config with(Scores scores, Config config) {
    config.scores = scores;
    return config;
}
struct HeadDim64Capped {
    static constexpr Config kConfig = with(Scores::capped, HeadDim64::kConfig);
};
struct HeadDim128Capped {
    static constexpr Config kConfig = with(Scores::capped, HeadDim128::kConfig);
};
struct HeadDim64Alibi {
    static constexpr Config kConfig = with(Scores::alibi, HeadDim64::kConfig);
};
struct HeadDim128Alibi {
    static constexpr Config kConfig = with(Scores::alibi, HeadDim128::kConfig);
};
struct HeadDim64Dropout {
    static constexpr Config kConfig = with(Scores::dropout, HeadDim64::kConfig);
};
struct HeadDim128Dropout {
    static constexpr Config kConfig = with(Scores::dropout, HeadDim128::kConfig);
};
struct HeadDim64Bias {
    static constexpr Config kConfig = with(Scores::bias, HeadDim64::kConfig);
};
struct HeadDim128Bias {
    static constexpr Config kConfig = with(Scores::bias, HeadDim128::kConfig);
};
struct HeadDim64General {
    static constexpr Config kConfig{.head_dim = 64, .head_dim_v = 64, .scores = Scores::general};
};
struct HeadDim128General {
    static constexpr Config kConfig = with(Scores::general, HeadDim128::kConfig);
};
using Shapes = ShapeList<HeadDim64, HeadDim128, HeadDim192V128, HeadDim192, HeadDim256, HeadDim64Capped,
                         HeadDim128Capped, HeadDim64Alibi, HeadDim128Alibi, HeadDim64Dropout, HeadDim128Dropout,
                         HeadDim64Bias, HeadDim128Bias, HeadDim64General, HeadDim128General>;

/// The shapes whose kernels run before and after the main one: `Delta` computes any score modification, and `Sums`
/// none.
template <class OfDelta, class OfSums>
struct Beside {
    using Delta = OfDelta;
    using Sums = OfSums;
};
template <class Shape>
struct KernelsBeside : Beside<Shape, Shape> {};
template <>
struct KernelsBeside<HeadDim64Capped> : Beside<HeadDim64Dropout, HeadDim64> {};
template <>
struct KernelsBeside<HeadDim64Alibi> : KernelsBeside<HeadDim64Capped> {};
template <>
struct KernelsBeside<HeadDim64Dropout> : KernelsBeside<HeadDim64Capped> {};
template <>
struct KernelsBeside<HeadDim64Bias> : Beside<HeadDim64Bias, HeadDim64> {};
template <>
struct KernelsBeside<HeadDim128Bias> : Beside<HeadDim128Bias, HeadDim128> {};
template <>
struct KernelsBeside<HeadDim128Capped> : Beside<HeadDim128General, HeadDim128> {};
template <>
struct KernelsBeside<HeadDim128Alibi> : KernelsBeside<HeadDim128Capped> {};
template <>
struct KernelsBeside<HeadDim128Dropout> : KernelsBeside<HeadDim128Capped> {};
template <>
struct KernelsBeside<HeadDim128General> : KernelsBeside<HeadDim128Capped> {};

/// The shapes that kernels beside the main one are compiled for: those that compute delta; those that sum the gradient
/// of a bias; those that write dQ from its accumulators; those that sum dK and dV; and those that make dQ, where the
/// main kernel does not add it up.
using DeltaShapes = ShapeList<HeadDim64, HeadDim128, HeadDim192V128, HeadDim192, HeadDim256, HeadDim64Dropout,
                              HeadDim64Bias, HeadDim128Bias, HeadDim64General, HeadDim128General>;
using ShapesTakingBias = ShapeList<HeadDim64Bias, HeadDim128Bias, HeadDim64General, HeadDim128General>;
using ShapesAddingDq = ShapeList<HeadDim64, HeadDim128, HeadDim64General>;
using ReduceShapes = ShapeList<HeadDim64, HeadDim128, HeadDim192V128, HeadDim192, HeadDim256, HeadDim64General>;
using ShapesSplitDvDk = ShapeList<HeadDim192V128, HeadDim192, HeadDim256>;

}  // namespace tessera::cuda::fa3::backward
