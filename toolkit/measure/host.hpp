// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace tessera::measure {

/// The machine that a measurement ran on, as far as the operating system tells.
struct Host {
    std::string cpu;               ///< "AMD EPYC 9654 96-Core Processor"; "unknown" when nothing tells
    int cores = 1;                 ///< logical ones that this process may use
    std::int64_t cache_bytes = 0;  ///< last level cache that core 0 uses; 0 when nothing tells
};

Host describe_host();

/// Clock of the fastest core at this moment, in MHz (cpufreq, else /proc/cpuinfo); 0 when nothing tells. Virtual
/// machines often tell the nominal clock.
double clock_mhz();

/// "2026-03-01T12:00:00Z"
std::string utc_date();

}  // namespace tessera::measure
