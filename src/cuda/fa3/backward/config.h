// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/shared/shapes.hpp"

namespace tessera::cuda::fa3::backward {

/// One compiled shape of the backward. Dimensions of a Problem are padded with zeros to the next shape that holds them.
struct Config {
    int head_dim;    ///< of Q and K: a multiple of 32
    int head_dim_v;  ///< of V and dO: a multiple of 32
    int q_stages = 3;
    bool general = false;  ///< softcap, ALiBi, dropout, and scales of 0 and less

    static constexpr int kStages = 2;  ///< of dO and of dS: the parity of the step
    static constexpr int kBlockQ = 64;
    static constexpr int kConsumers = 2;  ///< warpgroups of 64 keys each
    static constexpr int kBlockKv = 64 * kConsumers;
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr int kProducerRegisters = 24;
    static constexpr int kConsumerRegisters = 240;

    /// Slabs of 64 columns in shared memory; zeros past head_dim.
    constexpr int qk_slabs() const { return (head_dim + 63) / 64; }
    constexpr int v_slabs() const { return (head_dim_v + 63) / 64; }
    /// Columns of dQ that one warpgroup multiplies.
    constexpr int dq_columns() const { return head_dim / kConsumers; }
};

/// The compiled shapes (cuda/shared/shapes.hpp), as types: what __global__ functions can be templates of.
struct HeadDim64 {
    static constexpr Config kConfig{.head_dim = 64, .head_dim_v = 64};
};
struct HeadDim128 {
    static constexpr Config kConfig{.head_dim = 128, .head_dim_v = 128};
};
/// Shapes that do more to a score.
struct HeadDim64General {
    static constexpr Config kConfig{.head_dim = 64, .head_dim_v = 64, .general = true};
};
struct HeadDim128General {
    static constexpr Config kConfig{.head_dim = 128, .head_dim_v = 128, .general = true};
};
using Shapes = ShapeList<HeadDim64, HeadDim128, HeadDim64General, HeadDim128General>;

}  // namespace tessera::cuda::fa3::backward
