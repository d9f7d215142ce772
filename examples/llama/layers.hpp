// SPDX-License-Identifier: Apache-2.0
//
// The parts of a layer that are neither matrix products nor attention. Each works on one row.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "llama/config.hpp"

namespace llama {

/// out[i] = x[i] / sqrt(mean of the squares + eps) * weight[i]. `out` may be `x`.
void rms_norm(std::span<const float> x, std::span<const float> weight, double eps, std::span<float> out);

/// gate[i] = silu(gate[i]) * up[i], with silu(x) = x / (1 + exp(-x)).
void silu_times(std::span<float> gate, std::span<const float> up);

/// Cosines and sines of a rotary embedding, [positions, head_dim / 2].
struct RotaryTables {
    std::vector<float> cos, sin;
};

/// The rotary position embedding of Hugging Face's Llama: elements i and i + head_dim / 2 of a head are one pair, which
/// is turned by position * frequency[i].
class Rotary {
 public:
    explicit Rotary(const Config& config);

    /// Turns the `heads` heads of one row, [heads, head_dim].
    void rotate(std::span<float> row, std::int64_t position) const;

    /// The numbers that rotate() uses for positions from 0 on.
    RotaryTables tables(std::int64_t positions) const;

 private:
    std::vector<float> frequencies_;  // [head_dim / 2]
};

}  // namespace llama
