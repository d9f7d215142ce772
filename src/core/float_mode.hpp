// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cfenv>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera {

/// Sets the default arithmetic of IEEE 754 while it lives: round to nearest, with subnormal numbers, without traps. The
/// destructor restores the thread's mode. On x86-64 fegetround() of the C library would miss the mode of vectors.
class DefaultFloatMode {
 public:
#if defined(__x86_64__)
    DefaultFloatMode() {
        if ((before_ & ~kRaised) != kDefault) _mm_setcsr(kDefault);
    }
    ~DefaultFloatMode() {
        if ((before_ & ~kRaised) != kDefault) _mm_setcsr(before_);
    }
#else
    DefaultFloatMode() {
        if (before_ != FE_TONEAREST) std::fesetround(FE_TONEAREST);
    }
    ~DefaultFloatMode() {
        if (before_ != FE_TONEAREST) std::fesetround(before_);
    }
#endif
    DefaultFloatMode(const DefaultFloatMode&) = delete;
    DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
#if defined(__x86_64__)
    static constexpr unsigned kRaised = 0x3F;     // flags of exceptions that were raised
    static constexpr unsigned kDefault = 0x1F80;  // no trap, to nearest, no flush to zero
    unsigned before_ = _mm_getcsr();
#else
    int before_ = std::fegetround();
#endif
};

}  // namespace tessera
