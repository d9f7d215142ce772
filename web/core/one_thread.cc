// SPDX-License-Identifier: Apache-2.0
//
// src/parallel.hpp on the one thread that a page has.
#include "parallel.hpp"

namespace tessera {

int available_threads() { return 1; }

void default_parallel_for(std::int64_t tasks, int, const TaskBody& body) {
    for (std::int64_t task = 0; task < tasks; ++task) body(task, 0);
}

}  // namespace tessera
