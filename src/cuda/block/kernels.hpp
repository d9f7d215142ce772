// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernel/decode_block.hpp"

namespace tessera::cuda::block {

/// The kernels of decode_block(): the one launch, and the GEMMs of the chain. Compute capability 9.0 and later.
const DecodeBlockKernels& kernels();

/// How one launch runs, for measurements.
struct Options {
    std::uint64_t* marks = nullptr;  ///< device memory [marks_of_launch()]: times in nanoseconds; null: not recorded
    int shared_bytes = 0;            ///< at most, of shared memory a thread block; 0: all that the device has
    int blocks = 0;                  ///< thread blocks; 0: one a multiprocessor
};

/// Numbers that a launch records on this device: [thread blocks, Mark::count].
std::int64_t marks_of_launch(const Device& device);

/// The one launch of a validated call, as kernels().one_launch starts it.
void one_launch(const DecodeBlockCall& call, std::span<std::byte> workspace, const Options& options);

}  // namespace tessera::cuda::block
