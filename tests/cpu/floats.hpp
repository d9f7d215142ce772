// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace tessera::cpu {

/// Floats at an aligned address.
class Floats {
 public:
    explicit Floats(std::int64_t n, float value = 0) : memory_(static_cast<std::size_t>(n) + 16, value) {
        const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
        begin_ = memory_.data() + (64 - address % 64) % 64 / sizeof(float);
    }
    operator float*() { return begin_; }
    void randomise(std::mt19937& rng, std::int64_t n) {
        std::normal_distribution<float> normal;
        for (std::int64_t i = 0; i < n; ++i) begin_[i] = normal(rng);
    }

 private:
    std::vector<float> memory_;
    float* begin_;
};

}  // namespace tessera::cpu
