// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <span>

#include "measure/cold_cache.hpp"
#include "measure/gauge.hpp"
#include "measure/statistics.hpp"
#include "tessera/tensor.hpp"

namespace tessera::measure {

/// How a call is measured.
struct Method {
    int repeat = 9;         ///< calls that count
    double warm_up_ms = 0;  ///< before them: one call, and more until this time has passed
    /// A noisy measurement (statistics.hpp) is taken again, up to so many in all; the one of least spread counts.
    int rounds = 1;
    bool own_time = false;  ///< of a call on one thread: the time that the thread had, not the clock on the wall
};

struct Measurement {
    Summary ms;            ///< of the calls
    double clock_mhz = 0;  ///< median of readings right after each call; 0: not known
    /// Mean power during the calls; nothing when it can't be read or they are too short for the counter.
    std::optional<double> watts{};
};

/// Times `call` after a warm-up that is not counted (first use of memory, threads and code, clocks that rise). Before
/// each counted call, `make_cold` is called.
Measurement time_call(const std::function<void()>& call, const std::function<void()>& make_cold, const Method& method,
                      const Gauge* gauge = nullptr);

/// The same; before each call `operands` leave the caches of the host.
Measurement time_call(const std::function<void()>& call, std::span<const TensorView> operands, ColdCache& cache,
                      const Method& method, const Gauge* gauge = nullptr);

}  // namespace tessera::measure
