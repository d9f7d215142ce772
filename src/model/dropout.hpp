// SPDX-License-Identifier: Apache-2.0
//
// What it takes to draw dropout's mask (core/dropout.hpp), counted in blocks of Philox.
#pragma once

#include "model/family.hpp"

namespace tessera::model {

/// How a kernel draws: the bits of a patch of 2 queries x 16 keys, four of each word from a block, until no word of
/// those that are drawn together is level with the threshold any more.
struct Drawing {
    double weights = 32;     ///< that a draw serves: of its patch those that the thread wants
    double together = 1024;  ///< words that wait for each other: of a warp, or of a vector
    int first = 1;           ///< blocks before any is looked at
    int further = 1;         ///< the same, after them
    bool spares = false;     ///< of the first no more than some word may need
};

/// Blocks of Philox that a draw takes in the mean. None where everything is kept; fewer where the threshold ends in
/// ones, as that of a probability of 1/2 or 1/16 does.
double blocks_of_draw(double probability, const Drawing& drawing);

/// How tessera's kernels of a family draw for a Problem (cuda/tile/dropout_mask.cuh).
Drawing drawing_of(const Family& family, const Problem& problem);

/// Instructions of a block of Philox, ten rounds of two wide products and two exclusive-ors of three; a multiprocessor
/// does so many in the time of an exponential (CUDA C++ Programming Guide, "Arithmetic Instructions": 64 and 16).
inline constexpr double kBlockInstructions = 40;
inline constexpr double kInstructionsPerExp = 4;

}  // namespace tessera::model
