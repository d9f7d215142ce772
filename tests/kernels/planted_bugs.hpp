// SPDX-License-Identifier: Apache-2.0
//
// A kernel like others (tiles of 64 x 64, fp32 sums, an online softmax, weights and results rounded once), in which
// bugs that real kernels had can be planted. It serves to test the judge only.
#pragma once

#include <cstdint>

#include "kernels/support.hpp"

namespace tessera::check {

enum class Bug : std::uint8_t {
    none,
    // Forward.
    wrong_row,              // one row of O is the previous row
    skipped_tile,           // one tile of queries misses one tile of keys
    stale_sum,              // l is not rescaled when the maximum rises, in one tile of queries
    stale_output,           // O is not rescaled then
    output_cut,             // O is cut to the dtype, not rounded (fp32: a relative error of 4e-6)
    weights_cut,            // P is cut to the dtype (fp32: to 2^-16)
    key_dropped_at_edge,    // the last key of a tile is left out
    key_doubled_at_edge,    // the first key of a tile is counted twice
    diagonal_one_more,      // rows of one tile see a key too many
    diagonal_one_fewer,     // or one too few
    padding_counted,        // keys past the last one count as scores of 0
    queries_prescaled,      // scale * Q is rounded to the dtype (fp32: to 2^-12)
    sum_in_dtype,           // l is summed in the dtype (fp32: with 2^-16)
    scores_in_dtype,        // S is rounded to the dtype (fp32: to 2^-12)
    lse_of_base_two,        // LSE is a logarithm of base 2
    lse_off_in_one_row,     // by 2e-5
    other_kv_head,          // h % heads_kv for h / group
    late_rows_noisy,        // the errors of the last rows, which are small, are three times as large
    peaked_rows_noisy,      // the same for all rows, if scores and the unfused error are large
    value_of_neighbour,     // in one tile V is read a row too far, for one key
    output_in_dtype,        // O is summed in the dtype (fp32: with 2^-16)
    exponential_coarse,     // exp is off by up to 0.4 % (fp32: 1e-5), with both signs
    dropout_of_neighbour,   // the mask of the next key
    dropout_unscaled_once,  // one tile forgets 1 / (1 - p)
    // Backward.
    gradient_row_wrong,      // one row of dQ is the previous row
    delta_missing_in_tile,   // dS = P dP in one tile of queries
    delta_of_rounded_o,      // dO . O with the stored O, if V has a mean
    last_queries_missing,    // dK and dV without the last tile of queries
    group_head_missing,      // dK and dV without one head of the group
    score_gradient_cut,      // dS is cut to the dtype (fp32: to 2^-14)
    dlse_ignored,            //
    softcap_slope_missing,   // dS without 1 - tanh^2
    dropout_missing_in_dp,   // dP without the mask
    scale_twice_in_dk,       //
    late_dq_noisy,           // the errors of the last rows of dQ are three times as large
    transposed_weights_cut,  // P is cut before P^T dO (fp32: to 2^-14)
};

/// Runs the kernel with a bug: fills o and lse.
void planted_forward(Attention& a, Bug bug);
/// Fills dq, dk and dv.
void planted_backward(Attention& a, Bug bug);

}  // namespace tessera::check
