// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

namespace tessera::measure {

/// Time since its construction, on a clock that never jumps.
class Timer {
 public:
    double seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }
    double milliseconds() const { return seconds() * 1e3; }

 private:
    using Clock = std::chrono::steady_clock;
    Clock::time_point begin_ = Clock::now();
};

}  // namespace tessera::measure
