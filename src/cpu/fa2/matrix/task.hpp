// SPDX-License-Identifier: Apache-2.0
//
// Functions shared by the kinds of forward tasks on a matrix unit: panels in the lanes (forward.cc), queries as rows
// (decode.cc) and keys in the lanes (few_queries.cc).
#pragma once

#include "cpu/fa2/matrix/run.hpp"

namespace tessera::cpu::fa2::matrix_path {

/// The keys of one block that a panel sees, from a multiple of 32 on; may be none. Counts tiles in `tally`, if given.
matrix::SeenKeys keys_seen(const ForwardRun& run, const matrix::TilePanel& work, std::int64_t block,
                           TileTally* tally = nullptr);

/// Completes the scores of some keys after their GEMM: special elements, the score rule, the mask, and the maximum.
/// `finite`: no element of these keys or of the queries was packed as 0. s, bias_or_dropout: [keys, lanes]
void transform_and_mask_some(const ForwardRun& run, const matrix::TilePanel& work, const matrix::SeenKeys& some,
                             bool finite, float* s, float* bias_or_dropout, float* maximum);

/// Computes a per-row offset. exp(-offset) multiplies a row's weights before they round to bf16, and cancels in O.
/// Scores that saturate or repeat give all rows the same few weights and rounding errors, which don't average out;
/// factors of their own make the errors of rows independent. The offset is a hash of the query's bits, so a row's
/// result depends on its own inputs only. offsets: [lanes], in [0, ln 2)
void rounding_offsets(const matrix::TilePanel& work, const Bf16* query_pairs, std::int64_t depth_tiles, float* offsets);

/// The job that turns scores s into weights in `at`. bias_or_dropout: [keys, lanes], for dropout; offsets: used in
/// bf16.
matrix::WeightsJob weights_job(const matrix::TilePanel& work, const matrix::SeenKeys& keys, const float* s,
                               float* bias_or_dropout, const float* offsets, const Stage& at);

/// Could the row's scores be finite although its state is not? Without a bias, either all are finite or q and k are
/// not.
bool may_have_overflowed(const matrix::TilePanel& work, const simd::RowState& state, std::int64_t row);

/// Writes O and LSE of a panel from its sums.
void epilogue(const ForwardRun& run, const matrix::TilePanel& work, const EpilogueScratch& scratch,
              simd::PanelSums& sums);

}  // namespace tessera::cpu::fa2::matrix_path
