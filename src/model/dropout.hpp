// SPDX-License-Identifier: Apache-2.0
//
// The cost of drawing dropout's mask (core/dropout.hpp), in blocks of Philox.
#pragma once

#include "model/family.hpp"

namespace tessera::model {

/// The Philox calls of a kernel. Each block yields four bits per word of a patch of 2 queries x 16 keys. Blocks are
/// drawn until no word of those drawn together still equals the threshold's bits.
struct PhiloxDraws {
    double weights = 32;        ///< elements of P that a draw serves: those of its patch that the thread needs
    double words = 1024;        ///< words that wait for each other: those of a warp or a vector
    int first = 1;              ///< blocks drawn before the first comparison
    int further = 1;            ///< blocks drawn between later comparisons
    bool skips_unused = false;  ///< skips first blocks that no word can need
};

/// The mean number of Philox blocks of a draw: 0 if everything is kept, and fewer if the threshold ends in ones, as for
/// a probability of 1/2 or 1/16.
double philox_blocks(double probability, const PhiloxDraws& philox);

/// The Philox calls of tessera's kernels of a family for a Problem (cuda/tile/dropout_mask.cuh).
PhiloxDraws philox_draws_of(const Family& family, const Problem& problem);

/// Instructions of a Philox block: ten rounds of two wide multiplications and two three-input exclusive-ors.
/// kInstructionsPerExp of them take as long as an exponential on a multiprocessor (CUDA C++ Programming Guide,
/// "Arithmetic Instructions": 64 and 16).
inline constexpr double kBlockInstructions = 40;
inline constexpr double kInstructionsPerExp = 4;

}  // namespace tessera::model
