// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <ctime>

namespace tessera::measure {

/// Measures wall time since its construction, on a clock that never jumps.
class Timer {
 public:
    double seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }
    double milliseconds() const { return seconds() * 1e3; }

 private:
    using Clock = std::chrono::steady_clock;
    Clock::time_point begin_ = Clock::now();
};

/// Measures the CPU time of the calling thread since its construction; other work on its core does not count.
class ThreadTimer {
 public:
    double seconds() const { return now() - begin_; }
    double milliseconds() const { return seconds() * 1e3; }

 private:
    static double now() {
        timespec time{};
        ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
    }
    double begin_ = now();
};

}  // namespace tessera::measure
