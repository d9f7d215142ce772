// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace tessera::measure {

/// The machine that a measurement ran on. Clouds give one processor name to many machines, so the name alone
/// identifies none.
struct Host {
    std::string cpu;               ///< "AMD EPYC 9654 96-Core Processor"; "unknown" if the system does not name it
    std::string isa;               ///< instruction set of the CPU kernels: "AVX3", "AVX2", "NEON"
    std::string matrix_unit;       ///< unit that multiplies bf16 tiles: "AMX", "AVX512-BF16", or empty
    int cores = 1;                 ///< logical cores that this process may use
    std::int64_t cache_bytes = 0;  ///< last-level cache that core 0 uses; 0 if unknown
    bool faked = false;            ///< described by TESSERA_FAKE_HOST
};

/// Returns the host as the operating system and the CPU kernels describe it. For tests, the environment variable
/// TESSERA_FAKE_HOST replaces some or all fields: "cpu=Intel(R) Xeon(R) Processor; isa=AVX3; matrix_unit=AMX; cores=16;
/// cache_mib=300". It changes the description only, not the code that runs or the measurements. Throws
/// Error(invalid_argument) for an unknown field or number.
Host describe_host();

/// Returns a text such as "Intel(R) Xeon(R) Processor (AVX3, AMX, 16 cores, 300 MiB cache)". It is the `device` of
/// Records, and machine_of_device() recognises a host by it.
std::string text_of(const Host& host);

/// Bytes of the last-level cache that core 0 uses; 0 if unknown.
std::int64_t last_level_cache();

/// Current clock of the fastest core in MHz (cpufreq, else /proc/cpuinfo); 0 if unknown. Virtual machines often report
/// the nominal clock.
double clock_mhz();

/// Returns the time in UTC, such as "2026-03-01T12:00:00Z".
std::string utc_date();

}  // namespace tessera::measure
