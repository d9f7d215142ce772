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

/// The method by which a call is measured.
struct Method {
    int repeat = 9;         ///< timed calls
    double warm_up_ms = 0;  ///< warm-up before them: one call, and more until this time has passed
    /// The most measurements of the call. A noisy one (statistics.hpp) is repeated, and the result is the measurement
    /// with the least spread.
    int rounds = 1;
    bool own_time = false;  ///< for a call on one thread: takes CPU time of the thread instead of wall time
};

struct Measurement {
    Summary ms;            ///< time of the timed calls
    double clock_mhz = 0;  ///< median of readings right after each call; 0: unknown
    /// Mean power during the calls; empty if it cannot be read or the calls are too short for the counter.
    std::optional<double> watts{};
};

/// Times `call` after an uncounted warm-up (first use of memory, threads and code, rising clocks). Before each timed
/// call, `make_cold` is called.
Measurement time_call(const std::function<void()>& call, const std::function<void()>& make_cold, const Method& method,
                      const Gauge* gauge = nullptr);

/// Times `call` with `operands` evicted from the caches of the host before each call.
Measurement time_call(const std::function<void()>& call, std::span<const TensorView> operands, ColdCache& cache,
                      const Method& method, const Gauge* gauge = nullptr);

}  // namespace tessera::measure
