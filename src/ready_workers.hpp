// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>

namespace tessera {

/// Runs loop(worker) on the calling thread (worker 0) and on up to `workers` - 1 threads that are ready for it, and
/// returns when all have returned. `loop` must be whole with any number of them, also with one: a thread that is late
/// finds the work done and is not waited for. It must not throw.
///
/// The threads stay between calls and look for work for a while before they sleep, so that a call a few microseconds
/// after the last one begins at once. One call at a time: returns false, having done nothing, when another has them.
bool run_on_ready_workers(int workers, const std::function<void(int)>& loop);

}  // namespace tessera
