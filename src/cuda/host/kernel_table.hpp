// SPDX-License-Identifier: Apache-2.0
//
// What a CUDA kernel asks of a Problem and a device, as plain C++: the same question is put at run time, with the
// device that is there, and by the model and the command for a GPU that is not.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"

namespace tessera::cuda {

/// Rows and tiles are counted up to this: sums of two such numbers fit 32 bits.
inline constexpr std::int64_t kMaxIndex = std::int64_t{1} << 30;

/// What a device has, as far as a kernel can need it.
struct Limits {
    std::string who;                ///< "device 0", "h200"
    int capability = 0;             ///< compute capability, two digits in one number: 90 for 9.0
    std::int64_t shared_bytes = 0;  ///< shared memory that one block can have
    std::int64_t memory_bytes = 0;
};

struct Row {
    const char* name;  ///< "cuda.fa2.forward"
    Schedule schedule;
    Pass pass;
    std::vector<DType> dtypes;
    /// As Kernel::refuse. The dtype is one of the above.
    std::optional<std::string> (*refuse)(const Problem& problem, const std::optional<Tile>& tile, const Limits& limits);
    Tile (*tile_of)(const Problem& problem);
};

/// Every CUDA kernel, in order of preference, whether or not this build has it.
std::span<const Row> rows();

/// The row of a kernel. Throws Error(internal) when there is none: a schedule was added without its rows.
const Row& row_of(Schedule schedule, Pass pass);

/// Its answer; also for a dtype that it does not take.
std::optional<std::string> refusal(const Row& row, const Problem& problem, const std::optional<Tile>& tile,
                                   const Limits& limits);

/// Of the kernel that has this row: what its Kernel::refuse says.
std::optional<std::string> refusal(Schedule schedule, Pass pass, const Problem& problem,
                                   const std::optional<Tile>& tile, const Limits& limits);

/// Kernels count rows, heads and sequences in 32 bits. Empty when they fit.
std::optional<std::string> refuse_sizes(const Problem& problem);

}  // namespace tessera::cuda
