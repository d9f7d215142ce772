// SPDX-License-Identifier: Apache-2.0
//
// The time of thread blocks that are assigned to multiprocessors as these become free.
#pragma once

#include <span>

namespace tessera::model {

/// The multiprocessors that blocks run on.
struct Seats {
    int multiprocessors = 1;
    int each = 1;      ///< resident blocks per multiprocessor, which share its rate
    double alone = 1;  ///< factor on the time of a block that is alone on a multiprocessor
};

/// The clocks until the last block is done. `blocks`: clocks of each at the full rate of a multiprocessor, in starting
/// order. The first ones go round the multiprocessors; each later one goes to the first that is free.
double dealt(std::span<const double> blocks, const Seats& seats);

}  // namespace tessera::model
