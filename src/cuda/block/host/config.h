// SPDX-License-Identifier: Apache-2.0
//
// The compiled shapes of the kernels of a decode step's attention block, and how their shared memory is laid out.
// Plain C++.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/host/shape_list.hpp"

namespace tessera::cuda::block {

/// A CTA has 12 or 16 consumer warps, which compute, and two producer warps, which load. All reads of weights, K and V
/// go through one ring of stages in shared memory, in the order of their use.
struct Config {
    static constexpr int kLoaders = 2;      ///< warps that load: one weights and K, the other V
    static constexpr int kUnitRows = 8;     ///< rows of a matrix of weights that a CTA multiplies at a time
    static constexpr int kChunk = 32;       ///< columns that a warp multiplies at a time
    static constexpr int kMostBatch = 8;    ///< rows of x
    static constexpr int kMostStages = 32;  ///< of the ring
    /// The fewest stages of the one launch's ring. A producer must not be two rounds ahead of the consumers, which
    /// release a stage of V up to three stages later than the one of K.
    static constexpr int kLeastStages = 6;
    static constexpr int kLeastStagesOfProduct = 2;  ///< of a kernel of the chain
    static constexpr int kRowsOfTile = 16;           ///< query heads of a kv head that are computed at a time
    static constexpr int kRowPadding = 16;           ///< bytes between rows in shared memory, against bank conflicts

    int head_dim;
    int warps;  ///< consumers; with the producers, as many as the registers suffice for

    /// Groups of four warps, each of which has a split of the keys.
    constexpr int groups() const { return warps / 4; }
    constexpr int threads() const { return 32 * (warps + kLoaders); }
    /// Columns of the weights' rows in a stage: a stage holds 8 rows of them, or a tile of 64 keys.
    constexpr int stage_columns() const { return 8 * head_dim; }
    constexpr int stage_row_bytes() const { return stage_columns() * 2 + kRowPadding; }
    constexpr int stage_bytes() const { return kUnitRows * stage_row_bytes(); }
};

struct HeadDim64 {
    static constexpr Config kConfig{.head_dim = 64, .warps = 16};
};
struct HeadDim128 {
    static constexpr Config kConfig{.head_dim = 128, .warps = 12};
};
using Shapes = ShapeList<HeadDim64, HeadDim128>;

/// Bytes of a row of `columns` numbers of x, or of O, in shared memory.
constexpr int row_bytes(std::int64_t columns) { return static_cast<int>(columns) * 2 + Config::kRowPadding; }

/// The dynamic shared memory of a CTA: barriers and exchange of the warps, the rows of x (later of O), the ring.
struct SharedLayout {
    int groups = 0;  ///< of warps that have a split each
    int rows = 0;    ///< offset of the rows
    int ring = 0;    ///< offset of the ring
    int stages = 0;  ///< of the ring: as many as fit, which may be too few
    int bytes = 0;   ///< of everything

    constexpr SharedLayout() = default;
    /// `fixed`: bytes before the groups. `of_group`: bytes of one. `most_groups`: of the kernel, fewer if the rows
    /// leave too little. `columns`: the most columns of x and O.
    constexpr SharedLayout(const Config& config, int fixed, int of_group, int most_groups, std::int64_t batch,
                           std::int64_t columns, int most_bytes)
        : groups(most_groups) {
        const auto up = [](std::int64_t n) { return (n + 127) / 128 * 128; };
        for (;; --groups) {
            const std::int64_t first_row = up(fixed + groups * of_group);
            const std::int64_t first_stage = up(first_row + batch * row_bytes(columns));
            const std::int64_t fit = (most_bytes - first_stage) / config.stage_bytes();
            rows = static_cast<int>(first_row);
            ring = static_cast<int>(first_stage);
            stages = static_cast<int>(std::clamp<std::int64_t>(fit, 0, Config::kMostStages));
            bytes = ring + stages * config.stage_bytes();
            if (groups <= 1 || stages >= Config::kLeastStages) return;
        }
    }
};

}  // namespace tessera::cuda::block
