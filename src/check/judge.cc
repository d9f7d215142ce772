// SPDX-License-Identifier: Apache-2.0
#include "check/judge.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "check/chance.hpp"
#include "core/numeric.hpp"

namespace tessera::check {
namespace {

constexpr double kForwardRmse = 2e-6;  // fp32, relative
constexpr double kGradientRmse = 1e-5;
constexpr double kLseAbsolute = 2e-6;
constexpr double kLseRelative = 0x1p-20;
constexpr double kCancelled = 2;   // roundings of the sum of absolute values that any sum may cost
constexpr double kMaxRatio = 1.5;  // against the unfused computation
constexpr double kRmseRatio = 1.1;
constexpr double kLuck = 4;  // fp32: an RMSE of few elements
constexpr double kFp32Noise = 8 * 0x1p-24;
constexpr double kFlushed = 0x1p-120;  // of the largest element: weights under 2^-126 may be flushed to 0
constexpr double kStoredTail = 2.5;    // largest of many rounding errors, in units of their deviation
constexpr double kBiasSigmas = 5;      // by chance 2.3e-6 of tensors in both directions, if sums are normal
constexpr double kBiasFloor = 0.01;    // of a rounding: what is no bias worth the name
constexpr double kBiasPerfect = 1.5;   // of the bias that correct rounding happens to have

double largest_finite(DType dtype) {
    switch (dtype) {
        case DType::fp16: return 65504.0;
        case DType::bf16: return 0x1.FEp127;
        case DType::fp64: return std::numeric_limits<double>::max();
        default: return std::numeric_limits<float>::max();
    }
}

/// Numbers under this may be flushed to zero or keep few bits.
double tiny(DType dtype) {
    if (dtype == DType::fp16) return 0x1p-24;
    return dtype == DType::fp64 ? std::numeric_limits<double>::min() : 0x1p-126;
}

/// To bf16 or fp16 and back.
double rounded(double value, DType dtype) {
    return dtype == DType::bf16 ? to_double(from_double<Bf16>(value)) : to_double(from_double<Fp16>(value));
}

/// Sums over the elements whose right value is finite.
struct Sums {
    std::int64_t count = 0;
    double error = 0, value = 0, magnitude = 0, score = 0, stored_o = 0, unfused = 0, perfect = 0;  // of squares
    double max_error = 0, max_unfused = 0, max_perfect = 0, max_magnitude = 0, max_score = 0, max_stored_o = 0;
    bool unfused_finite = true;
    double worst_ratio = 0, worst_ratio_error = 0, worst_ratio_limit = 0;  // of the elementwise rule
    std::string worst;                                                     // the element of max_error
    std::string worst_of_limit;                                            // the element of worst_ratio
};

/// NaN where and only where the gold is NaN; infinities equal, and numbers beyond the dtype may be infinite.
bool same_kind(double expected, double got, DType dtype) {
    if (std::isnan(expected) || std::isnan(got)) return std::isnan(expected) && std::isnan(got);
    if (std::isinf(expected)) return got == expected;
    if (!std::isinf(got)) return true;
    return std::signbit(expected) == std::signbit(got) && std::abs(expected) >= 0.99 * largest_finite(dtype);
}

class Judge {
 public:
    Judge(const TensorGold& gold, const TensorView& got, DType dtype, Role role)
        : gold_(gold), got_(got), dtype_(dtype), role_(role), unit_(unit_roundoff(dtype)) {
        report_.name = gold.name;
        double largest = 0;
        for (const double m : gold.magnitude.data) largest = std::max(largest, m);
        tiny_ = tiny(got.dtype) + kFlushed * largest;
    }

    TensorReport run() {
        if (got_.size() != gold_.value.view.size()) return broken("shape differs from the inputs'");
        if (!gather()) return report_;
        report_.relative_rmse = sums_.value > 0 ? std::sqrt(sums_.error / sums_.value) : std::sqrt(sums_.error);
        report_.max_abs_error = sums_.max_error;
        report_.worst = sums_.worst;
        report_.rule = "exact";
        if (sums_.count == 0) return report_;
        if (role_ == Role::lse) {
            hold("lse", sums_.worst_ratio_error, sums_.worst_ratio_limit);
            report_.worst = sums_.worst_of_limit;
        } else if (dtype_ == DType::bf16 || dtype_ == DType::fp16) {
            hold("element", sums_.worst_ratio_error, sums_.worst_ratio_limit);
            report_.worst = sums_.worst_of_limit;
            const Chance chance(gold_, dtype_, got_.dtype);
            if (sums_.unfused_finite) against_unfused(chance);
            if (role_ == Role::output && sums_.score == 0) unbiased(chance);
        } else {
            relative_rmse();
        }
        return report_;
    }

 private:
    TensorReport broken(const std::string& what) {
        report_.rule = what;
        report_.pass = false;
        report_.value = 1;
        report_.limit = 0;
        return report_;
    }

    double element_limit(std::size_t i) const {
        const double a = gold_.score.data[i] + tiny_;
        if (role_ == Role::lse) return kLseAbsolute + kLseRelative * std::abs(gold_.value.data[i]) + a;
        const double stored = kStoredTail * unit_ * std::sqrt(gold_.stored_o.data[i]);
        return 1.5 * (unit_ + unit_) * gold_.magnitude.data[i] + stored + a;
    }

    /// Returns false when the kinds differ: the report says where.
    bool gather() {
        bool same = true;
        errors_.assign(gold_.value.data.size(), 0.0);
        for_each_element(got_, [&](std::int64_t flat, const std::byte* element) {
            const auto i = static_cast<std::size_t>(flat);
            const double got = load_as_double(element, got_.dtype);
            const double expected = gold_.value.data[i];
            if (!same) return;
            if (!same_kind(expected, got, got_.dtype)) {
                same = false;
                report_.worst = fmt::format("{} got {}, expected {}", index_text(got_, flat), got, expected);
                broken("NaN or infinity");
                return;
            }
            if (!std::isfinite(got) || !std::isfinite(expected)) return;
            add(i, flat, got, expected);
        });
        return same;
    }

    std::string element_text(std::int64_t flat, double got, double expected) const {
        return fmt::format("{} got {:.9g}, expected {:.9g}", index_text(got_, flat), got, expected);
    }

    void add(std::size_t i, std::int64_t flat, double got, double expected) {
        const double error = std::abs(got - expected);
        errors_[i] = got - expected;
        ++sums_.count;
        sums_.error += error * error;
        sums_.value += expected * expected;
        const auto track = [](double x, double& squares, double& largest) {
            squares += x * x;
            largest = std::max(largest, x);
        };
        track(gold_.magnitude.data[i], sums_.magnitude, sums_.max_magnitude);
        track(gold_.score.data[i], sums_.score, sums_.max_score);
        track(std::sqrt(gold_.stored_o.data[i]), sums_.stored_o, sums_.max_stored_o);
        if (!gold_.unfused.data.empty()) {
            const double unfused = std::abs(gold_.unfused.data[i] - expected);
            sums_.unfused_finite = sums_.unfused_finite && std::isfinite(unfused);
            track(unfused, sums_.unfused, sums_.max_unfused);
            const double perfect = std::abs(rounded(expected, dtype_) - expected);
            track(std::isfinite(perfect) ? perfect : 0, sums_.perfect, sums_.max_perfect);
        }
        const double limit = element_limit(i);
        if (error / limit > sums_.worst_ratio || sums_.count == 1) {
            sums_.worst_ratio = error / limit;
            sums_.worst_ratio_error = error;
            sums_.worst_ratio_limit = limit;
            sums_.worst_of_limit = element_text(flat, got, expected);
        }
        if (error > sums_.max_error || sums_.count == 1) {
            sums_.max_error = error;
            sums_.worst = element_text(flat, got, expected);
        }
    }

    /// Holds a value against a limit; the rule that is used up furthest stays in the report, with the element of the
    /// largest error beside it.
    void hold(const char* rule, double value, double limit) {
        TensorReport next = report_;
        next.rule = rule;
        next.value = value;
        next.limit = limit;
        next.worst = sums_.worst;
        next.pass = report_.pass && value <= limit;
        if (report_.rule == "exact" || next.used() > report_.used()) report_ = next;
        report_.pass = next.pass;
    }

    void relative_rmse() {
        const double relative = dtype_ == DType::fp64 ? 0x1p-44 : role_ == Role::output ? kForwardRmse : kGradientRmse;
        const double value = std::sqrt(sums_.value);
        const double n = static_cast<double>(sums_.count);
        const double cancelled = kCancelled * (1 + kLuck / std::sqrt(n)) * unit_ * std::sqrt(sums_.magnitude);
        const double limit = std::max(relative * value, cancelled) + std::sqrt(sums_.score) + tiny_ * std::sqrt(n);
        const double norm = value > 0 ? value : 1;
        hold("relative rmse", std::sqrt(sums_.error) / norm, limit / norm);
    }

    /// The contract's ratios, or what the roundings that no kernel does without pass once in 10^5 tensors (chance.hpp):
    /// an unfused computation that was lucky is no yardstick.
    void against_unfused(const Chance& chance) {
        const double n = static_cast<double>(sums_.count);
        const double max_noise = kFp32Noise * sums_.max_magnitude + sums_.max_score + tiny_;
        const double max_limit = kMaxRatio * std::max(sums_.max_unfused, sums_.max_perfect) + max_noise +
                                 kStoredTail * unit_ * sums_.max_stored_o;
        const bool ratio_holds = sums_.max_error <= max_limit;
        hold("max error / unfused", sums_.max_error,
             ratio_holds ? max_limit : std::max(max_limit, chance.largest(max_limit - max_noise) + max_noise));
        const double rmse_limit = std::max(
            kRmseRatio * std::sqrt(std::max(sums_.unfused, sums_.perfect) / n) + unit_ * std::sqrt(sums_.stored_o / n),
            std::sqrt(chance.squares() / n));
        hold("rmse / unfused", std::sqrt(sums_.error / n),
             rmse_limit + kFp32Noise * std::sqrt(sums_.magnitude / n) + std::sqrt(sums_.score / n) + tiny_);
    }

    /// Errors of one row share its weights, and so do rows with a cause in common: the sums of such groups are what may
    /// be taken for independent. A sum of n of them passes s standard errors, the errors taken from the sums' squares,
    /// with a probability of 2 exp(-s^2 / 2) at most if errors of either sign are alike (Efron 1969), and never where n
    /// is under s^2: few groups say nothing about a mean.
    void unbiased(const Chance& chance) {
        const auto dim = static_cast<std::size_t>(gold_.row_size());
        const std::size_t rows = errors_.size() / dim;
        const auto n = static_cast<double>(errors_.size());
        for (const bool outward : {false, true}) {
            std::vector<double> groups(rows);
            double sum = 0;
            double perfect = 0;  // the bias of correctly rounded results: alike rows round alike
            for (std::size_t i = 0; i < errors_.size(); ++i) {
                const double expected = gold_.value.data[i];
                const double sign = outward && expected < 0 ? -1 : 1;
                sum += sign * errors_[i];
                groups[chance.groups()[i / dim]] += sign * errors_[i];
                if (std::isfinite(expected)) perfect += sign * (rounded(expected, dtype_) - expected);
            }
            double squares = 0;
            for (const double x : groups) squares += x * x;
            const double floor = kBiasFloor * unit_ * std::sqrt(sums_.value / static_cast<double>(sums_.count));
            perfect = std::isfinite(perfect) ? std::abs(perfect) / n : 0;
            hold(outward ? "bias outward" : "bias", std::abs(sum) / n,
                 kBiasSigmas * std::sqrt(squares) / n + kBiasPerfect * perfect + floor);
        }
    }

    const TensorGold& gold_;
    const TensorView& got_;
    DType dtype_;
    Role role_;
    double unit_;
    double tiny_ = 0;
    Sums sums_;
    std::vector<double> errors_;  // signed, C order; 0 where not finite
    TensorReport report_;
};

}  // namespace

TensorReport judge(const TensorGold& gold, const TensorView& got, DType dtype, Role role) {
    return Judge(gold, got, dtype, role).run();
}

}  // namespace tessera::check
