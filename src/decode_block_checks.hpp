// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "tessera/decode_block.hpp"

namespace tessera {

/// Checks the shapes, dtypes, devices and memory of the tensors of decode_block(), but not the values of lengths,
/// tables and positions, which append() and forward() check on the CPU. Throws Error(invalid_argument) naming the
/// tensor.
void check_decode_block(const DecodeBlockProblem& problem, const DecodeBlockArgs& args, const Device& device,
                        std::span<const std::byte> workspace);

}  // namespace tessera
