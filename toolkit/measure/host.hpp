// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace tessera::measure {

/// The machine that a measurement ran on. Clouds give one processor name to many machines, so the name alone
/// identifies none.
struct Host {
    std::string cpu;               ///< "AMD EPYC 9654 96-Core Processor"; "unknown" when nothing tells
    std::string isa;               ///< instruction set of the CPU kernels: "AVX3", "AVX2", "NEON"
    std::string matrix_unit;       ///< unit that multiplies bf16 tiles: "AMX", "AVX512-BF16", or empty
    int cores = 1;                 ///< logical ones that this process may use
    std::int64_t cache_bytes = 0;  ///< last-level cache that core 0 uses; 0 when nothing tells
    bool faked = false;            ///< described by TESSERA_FAKE_HOST
};

/// The host as the operating system and the CPU kernels describe it. For tests, the environment variable
/// TESSERA_FAKE_HOST replaces some or all fields: "cpu=Intel(R) Xeon(R) Processor; isa=AVX3; matrix_unit=AMX; cores=16;
/// cache_mib=300". It changes how the host is described, and neither what runs there nor how it is measured. Throws
/// Error(invalid_argument) for a field or a number that it does not know.
Host describe_host();

/// "Intel(R) Xeon(R) Processor (AVX3, AMX, 16 cores, 300 MiB cache)": the `device` of Records, and the text by which
/// machine_of_device() recognises a host.
std::string text_of(const Host& host);

/// Bytes of the last-level cache that core 0 uses; 0 when nothing tells.
std::int64_t last_level_cache();

/// Clock of the fastest core at this moment, in MHz (cpufreq, else /proc/cpuinfo); 0 when nothing tells. Virtual
/// machines often tell the nominal clock.
double clock_mhz();

/// "2026-03-01T12:00:00Z"
std::string utc_date();

}  // namespace tessera::measure
