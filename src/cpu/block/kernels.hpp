// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernel/decode_block.hpp"

namespace tessera::cpu::block {

/// The CPU's kernels of decode_block().
const DecodeBlockKernels& kernels();

}  // namespace tessera::cpu::block
