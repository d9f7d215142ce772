// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tessera::cuda::ptx {

/// Address in the shared memory window, as instructions take it.
__device__ __forceinline__ std::uint32_t shared_address(const void* memory) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(memory));
}

}  // namespace tessera::cuda::ptx
