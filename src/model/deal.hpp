// SPDX-License-Identifier: Apache-2.0
//
// How long thread blocks take that are dealt to multiprocessors as these become free.
#pragma once

#include <span>

namespace tessera::model {

/// Where blocks run.
struct Seats {
    int multiprocessors = 1;
    int each = 1;      ///< blocks that a multiprocessor works on at a time, dividing its rate among them
    double alone = 1;  ///< how much longer a block takes that has it to itself than its share of the rate says
};

/// Clocks until the last block is done. `blocks`: clocks of each at the full rate of a multiprocessor, in the order in
/// which they begin; the first ones go round the multiprocessors, each later one to whoever has a seat free first.
double dealt(std::span<const double> blocks, const Seats& seats);

}  // namespace tessera::model
