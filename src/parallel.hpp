// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tessera/attention.hpp"

namespace tessera {

/// Threads that this process may use at once (its CPU affinity counts).
int available_threads();

/// The ParallelFor of callers that have none: threads that stay ready between calls, or oneTBB while another call has
/// those. Tasks are taken one by one in ascending order, so a caller that lists its longest tasks first gets a
/// balanced loop.
void default_parallel_for(std::int64_t tasks, int workers, const TaskBody& body);

}  // namespace tessera
