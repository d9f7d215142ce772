// SPDX-License-Identifier: Apache-2.0
//
// What the two kinds of forward tasks on a matrix unit share: panels in the lanes (forward.cc) and few queries as
// rows (decode.cc).
#pragma once

#include "cpu/fa2/matrix/run.hpp"

namespace tessera::cpu::fa2::matrix_path {

/// Keys of one block that a panel sees, from a multiple of 32 on; none: it sees no key. Counted in `tally`, when given.
matrix::SeenKeys keys_seen(const ForwardRun& run, const matrix::TilePanel& work, std::int64_t block,
                           TileTally* tally = nullptr);

/// Scores of some keys after their product: special elements, what is done to scores, and the maximum. `finite`: no
/// element of these keys or of the queries was packed as 0. s, other: [keys, lanes]
void transform_and_mask_some(const ForwardRun& run, const matrix::TilePanel& work, const matrix::SeenKeys& some,
                             bool finite, float* s, float* other, float* maximum);

/// exp(-offset) is what a row's weights are multiplied by before bf16 rounds them; it cancels in O. Scores that
/// saturate or repeat give all rows the same few weights, and so the same rounding errors, which don't average out:
/// with factors of their own the errors of rows are their own. Made of the query's bits, so that a row's result depends
/// on nothing else than before. offsets: [lanes], in [0, ln 2)
void rounding_offsets(const matrix::TilePanel& work, const Bf16* query_pairs, std::int64_t depth_tiles, float* offsets);

/// The weights of scores s, to `at`. other: [keys, lanes], for dropout; offsets: in bf16.
matrix::WeightsJob weights_job(const matrix::TilePanel& work, const matrix::SeenKeys& keys, const float* s,
                               float* other, const float* offsets, const Stage& at);

/// Writes O and LSE of a panel from its sums.
void epilogue(const ForwardRun& run, const matrix::TilePanel& work, const EpilogueScratch& scratch,
              simd::PanelSums& sums);

}  // namespace tessera::cpu::fa2::matrix_path
