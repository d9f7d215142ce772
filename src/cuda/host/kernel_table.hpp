// SPDX-License-Identifier: Apache-2.0
//
// Every CUDA kernel: what it takes and its default tile, as plain C++. The registry asks at run time for the present
// device; the cost model and the command line ask for any GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"

namespace tessera::cuda {

/// Rows and tiles are counted up to this: sums of two such numbers fit 32 bits.
inline constexpr std::int64_t kMaxIndex = std::int64_t{1} << 30;

/// The properties of a device that decide whether a kernel runs on it.
struct Limits {
    std::string who;                ///< "device 0", "h200"
    int capability = 0;             ///< compute capability, two digits in one number: 90 for 9.0
    std::int64_t shared_bytes = 0;  ///< shared memory that one thread block can have
    std::int64_t memory_bytes = 0;
};

/// One CUDA kernel.
struct KernelEntry {
    const char* name;  ///< "cuda.fa2.forward"
    Schedule schedule;
    Pass pass;
    std::vector<DType> dtypes;
    /// Same contract as Kernel::refuse. The dtype is one of the above.
    std::optional<std::string> (*refuse)(const Problem& problem, const std::optional<Tile>& tile, const Limits& limits);
    Tile (*tile_of)(const Problem& problem, const Limits& limits);
    bool takes_cache = false;  ///< keys in slots or pages (Problem::kv_lengths)
};

/// All kernels in order of preference, whether or not this build has them.
std::span<const KernelEntry> kernel_entries();

/// The kernel of a name. Throws Error(internal) if there is none.
const KernelEntry& kernel_entry(std::string_view name);

/// The kernel "cuda.SCHEDULE.PASS". Throws Error(internal) if there is none: a schedule was added without an entry.
const KernelEntry& kernel_entry(Schedule schedule, Pass pass);

/// Why the kernel does not take a Problem, or nothing. Any dtype may be asked about.
std::optional<std::string> refusal(const KernelEntry& entry, const Problem& problem, const std::optional<Tile>& tile,
                                   const Limits& limits);
std::optional<std::string> refusal(Schedule schedule, Pass pass, const Problem& problem,
                                   const std::optional<Tile>& tile, const Limits& limits);

/// Why a Problem's sizes are too large, or nothing. Kernels count rows, heads and sequences in 32 bits.
std::optional<std::string> refuse_sizes(const Problem& problem);

}  // namespace tessera::cuda
