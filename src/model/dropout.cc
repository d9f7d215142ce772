// SPDX-License-Identifier: Apache-2.0
#include "model/dropout.hpp"

#include <algorithm>
#include <cmath>

#include "core/dropout.hpp"

namespace tessera::model {

double philox_blocks(double probability, const PhiloxDraws& philox) {
    constexpr int kBits = 32, kBitsOfBlock = 4;
    const std::uint64_t threshold = keep_threshold(probability);
    if (threshold >> kBits != 0) return 0;
    // After these blocks every word is decided: the remaining bits of the threshold are ones.
    int most = 0;
    for (int bit = 0; bit < kBits; ++bit) {
        if (((threshold - 1) >> (kBits - 1 - bit) & 1) == 0) most = bit / kBitsOfBlock + 1;
    }
    double sum = 0;
    for (int done = 0; done < most;) {
        const int first = philox.skips_unused ? std::min(philox.first, most) : philox.first;
        const int next = done == 0 ? first : philox.further;
        const double level = std::exp2(-kBitsOfBlock * done);  // probability that a word is undecided
        sum += next * (done == 0 ? 1 : -std::expm1(philox.words * std::log1p(-level)));
        done += next;
    }
    return sum;
}

PhiloxDraws philox_draws_of(const Family& family, const Problem& problem) {
    constexpr double kWarp = 32, kKeysOfThread = 4, kOfTwoPatches = 2048;
    if (problem.dtype == DType::fp32) return {.weights = 1, .words = kWarp};
    if (family.schedule == Schedule::standard) return {.weights = kKeysOfThread, .words = kKeysOfThread * kWarp};
    const bool two = family.schedule == Schedule::fa3 && family.pass == Pass::forward;  // for 128 keys
    return two ? PhiloxDraws{.words = kOfTwoPatches} : PhiloxDraws{};
}

}  // namespace tessera::model
