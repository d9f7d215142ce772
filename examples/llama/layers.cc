// SPDX-License-Identifier: Apache-2.0
#include "llama/layers.hpp"

#include <cmath>
#include <numbers>

namespace llama {

void rms_norm(std::span<const float> x, std::span<const float> weight, double eps, std::span<float> out) {
    double squares = 0;
    for (const float value : x) squares += static_cast<double>(value) * value;
    const auto scale = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(x.size()) + eps));
    for (std::size_t i = 0; i < x.size(); ++i) out[i] = x[i] * scale * weight[i];
}

void silu_times(std::span<float> gate, std::span<const float> up) {
    for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
}

namespace {

/// Llama 3.1: waves longer than the original context are stretched by `factor`, short ones stay, and those between are
/// interpolated.
double llama3_frequency(double frequency, const Llama3Rotary& rotary) {
    const double waves = rotary.original_positions * frequency / (2 * std::numbers::pi);  // in the original context
    if (waves < rotary.low_frequency_factor) return frequency / rotary.factor;
    if (waves > rotary.high_frequency_factor) return frequency;
    const double smooth =
        (waves - rotary.low_frequency_factor) / (rotary.high_frequency_factor - rotary.low_frequency_factor);
    return (1 - smooth) * frequency / rotary.factor + smooth * frequency;
}

}  // namespace

Rotary::Rotary(const Config& config) {
    const std::int64_t pairs = config.head_dim / 2;
    for (std::int64_t i = 0; i < pairs; ++i) {
        double frequency = std::pow(config.rope_theta, -static_cast<double>(i) / static_cast<double>(pairs));
        if (config.llama3_rotary) frequency = llama3_frequency(frequency, *config.llama3_rotary);
        frequencies_.push_back(static_cast<float>(frequency));
    }
}

void Rotary::rotate(std::span<float> row, std::int64_t position) const {
    const std::size_t pairs = frequencies_.size();
    for (std::size_t i = 0; i < pairs; ++i) {
        // The angle is rounded to fp32, as it is where such models are trained.
        const float angle = static_cast<float>(position) * frequencies_[i];
        const float c = std::cos(angle), s = std::sin(angle);
        for (std::size_t head = 0; head < row.size(); head += 2 * pairs) {
            float& first = row[head + i];
            float& second = row[head + i + pairs];
            const float turned = first * c - second * s;
            second = second * c + first * s;
            first = turned;
        }
    }
}

RotaryTables Rotary::tables(std::int64_t positions) const {
    RotaryTables tables;
    for (std::int64_t position = 0; position < positions; ++position) {
        for (const float frequency : frequencies_) {
            const float angle = static_cast<float>(position) * frequency;
            tables.cos.push_back(std::cos(angle));
            tables.sin.push_back(std::sin(angle));
        }
    }
    return tables;
}

}  // namespace llama
