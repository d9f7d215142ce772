// SPDX-License-Identifier: Apache-2.0
//
// Measures the memory that this process may use and the part that is available. Larger requests are refused with a
// message, because the system would end the process without one.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::io {

/// Memory in bytes.
struct MemoryState {
    std::uint64_t limit = 0;  ///< the smallest of the machine's memory, the limits of its cgroups and RLIMIT_AS
    std::uint64_t left = 0;   ///< the smallest remainder of these; memory that only caches files counts as available
};

/// Returns the current state of this process. `root` is the folder of /proc and /sys, for tests.
MemoryState memory_state(const std::string& root = "");

/// Throws Error(out_of_memory) that names `what` if `bytes` exceeds the available memory.
void expect_memory(std::uint64_t bytes, const std::string& what);

}  // namespace tessera::io
