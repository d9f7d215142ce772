// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "emu.hpp"
namespace tessera::cuda::ptx {
inline std::uint32_t shared_address(const void* m) {
    return std::uint32_t(static_cast<const char*>(m) - emu::shared_base);
}
}  // namespace tessera::cuda::ptx
