// SPDX-License-Identifier: Apache-2.0
#include "plot/ticks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tessera/error.hpp"

namespace tessera::plot {
namespace {

/// Returns the smallest 1, 2 or 5 times a power of ten that is >= value.
double round_step(double value) {
    const double power = std::pow(10.0, std::floor(std::log10(value)));
    for (const double factor : {1.0, 2.0, 5.0}) {
        if (factor * power >= value * (1 - 1e-9)) return factor * power;
    }
    return 10 * power;
}

std::vector<Tick> linear_ticks(const Limits& limits, int most_ticks, bool binary = false) {
    const double step = round_step((limits.most - limits.least) / std::max(1, most_ticks));
    std::vector<Tick> result;
    for (double i = std::ceil(limits.least / step - 1e-6); i * step <= limits.most + step * 1e-6; ++i) {
        result.push_back({i * step, number_text(i * step, binary)});
    }
    return result;
}

/// Returns powers of `base`; every n-th has a number, so that there are at most `most_ticks` numbers.
std::vector<Tick> power_ticks(const Limits& limits, double base, int most_ticks, bool binary) {
    const int first = static_cast<int>(std::ceil(std::log(limits.least) / std::log(base) - 1e-9));
    const int last = static_cast<int>(std::floor(std::log(limits.most) / std::log(base) + 1e-9));
    const int every = std::max(1, (last - first + most_ticks) / std::max(1, most_ticks));
    std::vector<Tick> result;
    for (int power = first; power <= last; ++power) {
        const double value = std::pow(base, power);
        result.push_back({value, (power - first) % every == 0 ? number_text(value, binary) : ""});
    }
    return result;
}

std::vector<Tick> decade_ticks(const Limits& limits, int most_ticks) {
    const double decades = std::log10(limits.most / limits.least);
    if (decades < 0.8) return linear_ticks(limits, most_ticks);
    std::vector<Tick> result = power_ticks(limits, 10, most_ticks, false);
    const bool numbered = 3 * decades <= most_ticks;
    for (double power = std::pow(10.0, std::floor(std::log10(limits.least))); power <= limits.most; power *= 10) {
        for (const double factor : {2.0, 5.0}) {
            const double value = factor * power;
            if (value < limits.least || value > limits.most || (!numbered && decades > 4)) continue;
            result.push_back({value, numbered ? number_text(value) : ""});
        }
    }
    std::sort(result.begin(), result.end(), [](const Tick& a, const Tick& b) { return a.value < b.value; });
    return result;
}

void expect_on_scale(const Axis& axis, const std::string& name, double value) {
    if (!std::isfinite(value)) {
        throw Error(ErrorCode::invalid_argument, name, fmt::format("expected finite numbers to plot, got {}", value));
    }
    if (axis.scale != Scale::linear && value <= 0) {
        throw Error(ErrorCode::invalid_argument, name,
                    fmt::format("expected numbers over 0 on a logarithmic axis, got {}", value));
    }
}

}  // namespace

std::vector<Tick> ticks(const Limits& limits, Scale scale, int most_ticks) {
    switch (scale) {
        case Scale::log2: {
            // If fewer than two powers of two fit, other round numbers mark the scale.
            const bool narrow = std::floor(std::log2(limits.most)) - std::ceil(std::log2(limits.least)) < 1;
            return narrow ? linear_ticks(limits, most_ticks / 2, true) : power_ticks(limits, 2, most_ticks, true);
        }
        case Scale::log10: return decade_ticks(limits, most_ticks);
        case Scale::linear: break;
    }
    return linear_ticks(limits, most_ticks);
}

Limits limits_of(const Axis& axis, const std::string& name, const std::vector<double>& values) {
    for (const double value : values) expect_on_scale(axis, name, value);
    for (const auto& end : {axis.least, axis.most}) {
        if (end) expect_on_scale(axis, name, *end);
    }
    const bool is_log = axis.scale != Scale::linear;
    Limits limits{is_log ? 1.0 : 0.0, is_log ? 10.0 : 1.0};
    if (!values.empty()) {
        limits.least = *std::min_element(values.begin(), values.end());
        limits.most = *std::max_element(values.begin(), values.end());
        if (is_log) {
            const double margin = std::max(1.06, std::pow(limits.most / limits.least, 0.04));
            limits = {limits.least / margin, limits.most * margin};
        } else {
            if (axis.from_zero) limits = {std::min(0.0, limits.least), std::max(0.0, limits.most)};
            if (limits.least == limits.most) limits = {limits.least - 0.5, limits.most + 0.5};
            const double step = round_step((limits.most - limits.least) / 6);
            limits = {std::floor(limits.least / step) * step, std::ceil(limits.most / step + 0.05) * step};
        }
    }
    if (axis.least) limits.least = *axis.least;
    if (axis.most) limits.most = *axis.most;
    if (!(limits.least < limits.most)) {
        throw Error(ErrorCode::invalid_argument, name,
                    fmt::format("expected an axis that rises, got {} to {}", limits.least, limits.most));
    }
    return limits;
}

std::string number_text(double value, bool binary) {
    struct Unit {
        double size;
        const char* letter;
    };
    const double k = binary ? 1024 : 1000;
    for (const Unit& unit : {Unit{k * k * k * k, "T"}, {k * k * k, "G"}, {k * k, "M"}, {k, "k"}}) {
        const bool whole =
            !binary || std::fmod(value, unit.size) == 0;  // 1,500 is not a round number in units of 1,024
        if (std::abs(value) >= unit.size * (1 - 1e-9) && whole)
            return fmt::format("{:.4g}{}", value / unit.size, unit.letter);
    }
    if (std::abs(value) < 1e-12) return "0";
    return std::abs(value) < 1e-4 ? fmt::format("{:.3g}", value) : fmt::format("{:.4g}", std::round(value * 1e9) / 1e9);
}

}  // namespace tessera::plot
