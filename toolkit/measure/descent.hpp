// SPDX-License-Identifier: Apache-2.0
//
// Fits constants to measurements by coordinate descent with shrinking steps, while a loss falls.
#pragma once

#include <span>

namespace tessera::measure {

/// Returns the constants with the least loss(constants) that steps of 20, 5, 1 and 0.2 percent find from `start`. A
/// constant that is 0 stays 0.
template <class Constants, class Loss>
Constants descend(Constants start, std::span<double Constants::*const> free, const Loss& loss) {
    Constants constants = start;
    double least = loss(constants);
    const auto moves = [&](double Constants::*member, double factor) {
        const double before = constants.*member;
        if (before == 0) return false;
        constants.*member = before * factor;
        const double now = loss(constants);
        if (now < least) return least = now, true;
        constants.*member = before;
        return false;
    };
    for (const double step : {0.2, 0.05, 0.01, 0.002}) {
        bool moved = true;
        for (int i = 0; i < 60 && moved; ++i) {
            moved = false;
            for (double Constants::*const member : free)
                moved = moves(member, 1 + step) || moves(member, 1 / (1 + step)) || moved;
        }
    }
    return constants;
}

}  // namespace tessera::measure
