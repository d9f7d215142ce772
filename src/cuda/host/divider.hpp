// SPDX-License-Identifier: Apache-2.0
//
// Division by a number that is fixed before the launch (CUTLASS: FastDivmod). Plain C++.
#pragma once

#include <bit>
#include <cstdint>

#include "tessera/mask.hpp"

namespace tessera::cuda {

/// n / divisor for 0 <= n < 2^31 by a multiplication and a shift (Granlund and Montgomery 1994). A GPU's own division
/// takes some 40 dependent instructions.
class Divider {
 public:
    Divider() = default;
    explicit Divider(int divisor)
        : divisor_(divisor),
          shift_(divisor == 1 ? 0 : std::bit_width(static_cast<unsigned>(divisor - 1)) - 1),
          // Rounded up: 2^(32 + shift) / divisor is in [2^31, 2^32).
          multiplier_(static_cast<std::uint32_t>(((std::uint64_t{1} << 32 << shift_) + divisor - 1) / divisor)) {}

    TESSERA_HOST_DEVICE int divisor() const { return divisor_; }
    TESSERA_HOST_DEVICE int quotient(int n) const {
        if (divisor_ == 1) return n;
        return static_cast<int>(
            static_cast<std::uint32_t>(std::uint64_t{static_cast<std::uint32_t>(n)} * multiplier_ >> 32) >> shift_);
    }

 private:
    int divisor_ = 1;
    int shift_ = 0;
    std::uint32_t multiplier_ = 0;  ///< unused where the divisor is 1
};

}  // namespace tessera::cuda
