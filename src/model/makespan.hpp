// SPDX-License-Identifier: Apache-2.0
//
// The time of thread blocks that are assigned to multiprocessors as these become free.
#pragma once

#include <span>

namespace tessera::model {

/// The multiprocessors, and the resident blocks of each.
struct SmSlots {
    int multiprocessors = 1;
    int per_sm = 1;                  ///< resident blocks per multiprocessor, which share its rate
    double single_block_factor = 1;  ///< factor on the time of a block that is alone on a multiprocessor
};

/// The clocks until the last block is done. `blocks` holds the clocks of each at the full rate of a multiprocessor, in
/// launch order. The first ones are spread over the multiprocessors in turn; each later one goes to the first free
/// slot.
double makespan(std::span<const double> blocks, const SmSlots& slots);

}  // namespace tessera::model
