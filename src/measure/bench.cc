// SPDX-License-Identifier: Apache-2.0
#include "measure/bench.hpp"

#include <vector>

#include "measure/timer.hpp"

namespace tessera::measure {

Summary time_call(const std::function<void()>& call, const std::function<void()>& make_cold, int repeat) {
    call();
    std::vector<double> milliseconds;
    for (int i = 0; i < repeat; ++i) {
        make_cold();
        const Timer timer;
        call();
        milliseconds.push_back(timer.milliseconds());
    }
    return summarize(std::move(milliseconds));
}

Summary time_call(const std::function<void()>& call, std::span<const TensorView> operands, ColdCache& cache,
                  int repeat) {
    return time_call(
        call, [&] { cache.evict(operands); }, repeat);
}

}  // namespace tessera::measure
