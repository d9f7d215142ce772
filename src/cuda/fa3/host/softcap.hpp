// SPDX-License-Identifier: Apache-2.0
//
// Softcap as the forward evaluates it: constants that the host works out once a call. Plain C++, tested by
// fa3_softcap_test.
#pragma once

#include <cmath>
#include <numbers>

#include "cuda/host/softcap.hpp"

namespace tessera::cuda::fa3 {

/// Softcap c, applied to an element x of Q K^T before the scale: x -> c / scale * tanh(x * scale / c). Times the scale
/// this is c * tanh(S / c).
struct Softcap {
    float near;             ///< for |x| below it: x (1 + c[0] x^2 + c[1] x^4 + ...)
    float coefficients[4];  ///< c[]
    float exponent;         ///< for |x| from `near` on: cap - twice_cap / (2^(exponent x) + 1)
    float cap, twice_cap;   ///< c / scale, and 2 c / scale
    float inverse_cap;      ///< scale / c
};

inline Softcap softcap_of(double softcap, double scale) {
    const double to_unit = scale / softcap;
    Softcap result{.near = static_cast<float>(kTanhNear / to_unit),
                   .coefficients = {},
                   .exponent = static_cast<float>(2 * std::numbers::log2e * to_unit),
                   .cap = static_cast<float>(1 / to_unit),
                   .twice_cap = static_cast<float>(2 / to_unit),
                   .inverse_cap = static_cast<float>(to_unit)};
    for (int i = 0; i < 4; ++i) result.coefficients[i] = static_cast<float>(kTanh[i] * std::pow(to_unit, 2 * i + 2));
    return result;
}

/// Are all constants of a softcap normal in fp32?
inline bool fits(const Softcap& softcap) {
    bool all = std::isnormal(softcap.near) && std::isnormal(softcap.exponent) && std::isnormal(softcap.cap) &&
               std::isnormal(softcap.inverse_cap);
    for (const float c : softcap.coefficients) all &= std::isnormal(c);
    return all;
}

}  // namespace tessera::cuda::fa3
