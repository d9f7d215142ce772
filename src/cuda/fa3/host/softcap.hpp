// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <numbers>

#include "cuda/host/softcap.hpp"

namespace tessera::cuda::fa3 {

/// A softcap c over scores S = scale * x, on products x of Q and K, so that S stays scale * (what x becomes):
/// x -> c / scale * tanh(x * scale / c).
struct Cap {
    float near;             ///< under this |x|, the polynomial x (1 + c[0] x^2 + c[1] x^4 + ...)
    float coefficients[4];  ///< in powers of x^2
    float exponent;         ///< over it, most - swing / (2^(exponent x) + 1)
    float most, swing;
};

inline Cap cap_of(double softcap, double scale) {
    const double to_unit = scale / softcap;
    Cap cap{.near = static_cast<float>(kTanhNear / to_unit),
            .coefficients = {},
            .exponent = static_cast<float>(2 * std::numbers::log2e * to_unit),
            .most = static_cast<float>(1 / to_unit),
            .swing = static_cast<float>(2 / to_unit)};
    for (int i = 0; i < 4; ++i) cap.coefficients[i] = static_cast<float>(kTanh[i] * std::pow(to_unit, 2 * i + 2));
    return cap;
}

/// Are all numbers of a cap normal in fp32?
inline bool fits(const Cap& cap) {
    bool all = std::isnormal(cap.near) && std::isnormal(cap.exponent) && std::isnormal(cap.most);
    for (const float c : cap.coefficients) all &= std::isnormal(c);
    return all;
}

}  // namespace tessera::cuda::fa3
