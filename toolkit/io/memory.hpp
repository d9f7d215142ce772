// SPDX-License-Identifier: Apache-2.0
//
// How much memory this process may use, and how much of it is left: what is too much is refused with a message, before
// the system ends the process without one.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::io {

/// In bytes.
struct MemoryState {
    std::uint64_t limit = 0;  ///< the smallest of the machine's memory, the limits of its cgroups and RLIMIT_AS
    std::uint64_t left = 0;   ///< the smallest of what is left of each; memory that only caches files counts as left
};

/// Of this process, now. `root`: where /proc and /sys are, for tests.
MemoryState memory_state(const std::string& root = "");

/// Throws Error(out_of_memory) that names `what` when `bytes` are more than what is left.
void expect_memory(std::uint64_t bytes, const std::string& what);

}  // namespace tessera::io
