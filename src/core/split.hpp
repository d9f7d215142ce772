// SPDX-License-Identifier: Apache-2.0
//
// How fa2 on the CPU cuts its work into tasks: the numbers that its kernels (cpu/fa2) and the cost model share.
#pragma once

#include <cstdint>

namespace tessera {

/// The fa2 forward sums the keys of a row in chunks of this many, each with its own (m, l, O), and merges them in
/// ascending order (docs/decisions/fixed-split.md). Tiles of keys begin anew with each chunk; a merge costs under 1 %
/// of a chunk's GEMMs.
inline constexpr std::int64_t kSplitKeys = 512;

/// Up to this many queries per head have the primitives of simd/few_queries.hpp. More fill enough lanes of a panel.
inline constexpr std::int64_t kFewQueries = 8;
/// The most rows of a kv head in the backward of few queries: more would take more memory than the tensors, and are
/// work enough for panels.
inline constexpr std::int64_t kMostFewRows = 64;

/// Does one task for each head keep all threads busy to the end? From 4 tasks per thread on, an uneven rest does not
/// matter.
constexpr bool heads_fill_threads(std::int64_t heads, std::int64_t threads) {
    return heads >= threads && (heads % threads == 0 || heads >= 4 * threads);
}

/// The SIMD path.
namespace simd_split {
inline constexpr std::int64_t kMaxPanels = 4;  ///< panels of a task of the forward: they share each loaded K/V tile
inline constexpr std::int64_t kTasksPerThread = 4;
/// Key tiles of the backward that a thread keeps loaded while the panels pass. With 4 at head_dim 128, they and their
/// dK, dV take 512 KiB of the L2 cache. The panels, which stream from L3, are read a quarter as often.
inline constexpr std::int64_t kColumns = 4;
/// Larger squares are used only if a round has at least this many per thread. A causal mask removes one square from
/// each round, and the last rounds leave threads idle.
inline constexpr std::int64_t kSquaresPerThread = 8;
}  // namespace simd_split

/// The matrix path.
namespace matrix_split {
inline constexpr std::int64_t kMaxPanels = 8;  ///< panels of a task: they share a block of K and V in the L2 cache
inline constexpr std::int64_t kTasksPerThread = 3;
inline constexpr std::int64_t kTasksOfShortRows = 2;  ///< per thread, if rows have a single block of keys
inline constexpr std::int64_t kBlockQ = 128;   ///< queries of a backward tile: 4 steps of 32 per GEMM of dK and dV
inline constexpr std::int64_t kBlockKv = 256;  ///< they and their dK and dV fit in the L2 cache
inline constexpr std::int64_t kStripesPerThread = 4;
}  // namespace matrix_split

}  // namespace tessera
