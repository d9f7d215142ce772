// SPDX-License-Identifier: Apache-2.0
#include "measure/bench.hpp"

#include <vector>

#include "measure/timer.hpp"

namespace tessera::measure {

Summary time_call(const std::function<void()>& call, std::span<const TensorView> operands, ColdCache& cache,
                  int repeat) {
    call();
    std::vector<double> milliseconds;
    for (int i = 0; i < repeat; ++i) {
        cache.evict(operands);
        const Timer timer;
        call();
        milliseconds.push_back(timer.milliseconds());
    }
    return summarize(std::move(milliseconds));
}

}  // namespace tessera::measure
