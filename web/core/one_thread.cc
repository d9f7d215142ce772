// SPDX-License-Identifier: Apache-2.0
//
// Implements src/parallel.hpp on the page's only thread.
#include "parallel.hpp"

namespace tessera {

int available_threads() { return 1; }

void default_parallel_for(std::int64_t tasks, int, const TaskBody& body) {
    for (std::int64_t task = 0; task < tasks; ++task) body(task, 0);
}

}  // namespace tessera
