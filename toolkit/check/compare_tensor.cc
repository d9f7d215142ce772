// SPDX-License-Identifier: Apache-2.0
#include "check/compare_tensor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "check/rounding_noise.hpp"
#include "check/tolerances.hpp"
#include "core/numeric.hpp"

namespace tessera::check {
namespace {

double largest_finite(DType dtype) {
    switch (dtype) {
        case DType::fp16: return 65504.0;
        case DType::bf16: return 0x1.FEp127;
        case DType::fp64: return std::numeric_limits<double>::max();
        default: return std::numeric_limits<float>::max();
    }
}

/// Numbers below this may be flushed to zero or lose bits.
double tiny(DType dtype) {
    if (dtype == DType::fp16) return 0x1p-24;
    return dtype == DType::fp64 ? std::numeric_limits<double>::min() : 0x1p-126;
}

/// Rounds to bf16 or fp16 and back.
double rounded(double value, DType dtype) {
    return dtype == DType::bf16 ? to_double(from_double<Bf16>(value)) : to_double(from_double<Fp16>(value));
}

/// Sums over finite elements. An error counts only beyond the element's allowance.
struct Sums {
    double count = 0;
    double error = 0, value = 0, magnitude = 0, unfused = 0, perfect = 0;  // sums of squares
    double value_fourth = 0;                                               // sum of fourth powers
    double max_error = 0, max_unfused = 0, max_perfect = 0;

    void add(const Sums& other) {
        count += other.count;
        error += other.error, value += other.value, magnitude += other.magnitude;
        value_fourth += other.value_fourth;
        unfused += other.unfused, perfect += other.perfect;
        max_error = std::max(max_error, other.max_error);
        max_unfused = std::max(max_unfused, other.max_unfused);
        max_perfect = std::max(max_perfect, other.max_perfect);
    }
};

/// The element with the largest error relative to its own limit.
struct WorstElement {
    double error = 0, limit = 0, ratio = -1;
    std::string text;
};

/// True if NaN is where the gold has NaN and infinities are equal. Numbers beyond the dtype's range may be infinite.
bool same_kind(double expected, double got, DType dtype) {
    if (std::isnan(expected) || std::isnan(got)) return std::isnan(expected) && std::isnan(got);
    if (std::isinf(expected)) return got == expected;
    if (!std::isinf(got)) return true;
    return std::signbit(expected) == std::signbit(got) && std::abs(expected) >= 0.99 * largest_finite(dtype);
}

class TensorComparison {
 public:
    TensorComparison(const TensorGold& gold, const TensorView& got, DType dtype, Role role)
        : gold_(gold), got_(got), dtype_(dtype), role_(role), unit_(unit_roundoff(dtype)) {
        report_.name = gold.name;
        double largest = 0;
        for (const double m : gold.magnitude.data) largest = std::max(largest, m);
        tiny_ = tiny(got.dtype) + kFlushed * largest;
    }

    TensorReport run() {
        if (got_.size() != gold_.value.view.size()) return broken("shape differs from the inputs'");
        report_.rule = "exact";
        if (!gather()) return report_;
        report_.relative_rmse =
            squares_of_values_ > 0 ? std::sqrt(squares_of_errors_ / squares_of_values_) : std::sqrt(squares_of_errors_);
        if (element_.ratio < 0) return report_;  // no element is finite
        apply_rule(role_ == Role::lse ? "lse" : "element", element_.error, element_.limit, element_.text);
        if (role_ == Role::lse) return report_;
        if (in_16_bits()) check_against_unfused();
        else check_relative_rmse();
        return report_;
    }

 private:
    bool in_16_bits() const { return dtype_ == DType::bf16 || dtype_ == DType::fp16; }

    TensorReport broken(const std::string& what) {
        report_.rule = what;
        report_.pass = false;
        report_.value = 1;
        report_.limit = 0;
        return report_;
    }

    /// Returns the allowance of an element for errors of large scores, numbers too small for the dtype, and fp32 sums.
    double allowance(std::size_t i) const {
        const double sums = in_16_bits() ? kFp32Sums * 0x1p-24 * gold_.magnitude.data[i] : 0;
        return gold_.score.data[i] + gold_.subnormal.data[i] + tiny_ + sums;
    }

    double element_limit(std::size_t i) const {
        const double value = std::abs(gold_.value.data[i]);
        const double magnitude = gold_.magnitude.data[i];
        if (role_ == Role::lse) return kLseAbsolute + kLseRelative * value + gold_.score.data[i] + tiny_;
        if (in_16_bits()) return kElementRoundings * (unit_ + unit_) * magnitude + allowance(i);
        const double relative =
            (role_ == Role::output ? kOutputElement : kGradientElement) * (unit_ / 0x1p-24);  // scaled for fp64
        return relative * magnitude + kElementValue * unit_ * value + allowance(i);
    }

    /// Gathers the errors. Returns false if the kinds differ; the report says where.
    bool gather() {
        bool same = true;
        errors_.assign(gold_.value.data.size(), 0.0);
        finite_.assign(errors_.size(), false);
        for_each_element(got_, [&](std::int64_t flat, const std::byte* element) {
            const auto i = static_cast<std::size_t>(flat);
            const double got = load_as_double(element, got_.dtype);
            const double expected = gold_.value.data[i];
            if (!same) return;
            if (gold_.free[i]) {
                ++report_.free;
                return;
            }
            if (!same_kind(expected, got, got_.dtype)) {
                same = false;
                report_.worst = fmt::format("{} got {}, expected {}", index_text(got_, flat), got, expected);
                broken("NaN or infinity");
                return;
            }
            if (!std::isfinite(got) || !std::isfinite(expected)) return;
            ++report_.finite;
            add(i, flat, got, expected);
        });
        return same;
    }

    void add(std::size_t i, std::int64_t flat, double got, double expected) {
        const double error = std::abs(got - expected);
        errors_[i] = got - expected;
        finite_[i] = true;
        squares_of_errors_ += error * error;
        squares_of_values_ += expected * expected;
        const double limit = element_limit(i);
        const bool most_used = error / limit > element_.ratio;
        const bool largest = error > report_.max_abs_error || report_.worst.empty();
        if (!most_used && !largest) return;
        const std::string text = fmt::format("{} got {:.9g}, expected {:.9g}", index_text(got_, flat), got, expected);
        if (most_used) element_ = {error, limit, error / limit, text};
        if (largest) report_.max_abs_error = error, report_.worst = text;
    }

    /// Sums over some rows.
    Sums sums_of(const std::vector<std::size_t>& rows) const {
        const auto dim = static_cast<std::size_t>(gold_.row_size());
        Sums sums;
        for (const std::size_t row : rows) {
            for (std::size_t i = row * dim; i < (row + 1) * dim; ++i) {
                if (finite_[i]) add_to(sums, i);
            }
        }
        return sums;
    }

    void add_to(Sums& sums, std::size_t i) const {
        const double expected = gold_.value.data[i];
        const double error = std::max(0.0, std::abs(errors_[i]) - allowance(i));
        const auto track = [](double x, double& squares, double& largest) {
            squares += x * x;
            largest = std::max(largest, x);
        };
        if (in_16_bits()) {
            const double unfused = std::abs(gold_.unfused.data[i] - expected);
            if (!std::isfinite(unfused))
                return;  // no unfused result to compare with; the rule of elements still applies
            const double perfect = std::abs(rounded(expected, dtype_) - expected);
            track(unfused, sums.unfused, sums.max_unfused);
            track(std::isfinite(perfect) ? perfect : 0, sums.perfect, sums.max_perfect);
        }
        sums.count += 1;
        track(error, sums.error, sums.max_error);
        sums.value += expected * expected;
        sums.value_fourth += expected * expected * expected * expected;
        sums.magnitude += gold_.magnitude.data[i] * gold_.magnitude.data[i];
    }

    /// Compares a value with a limit. The rule closest to its limit stays in the report.
    void apply_rule(const std::string& rule, double value, double limit, const std::string& worst) {
        TensorReport next = report_;
        next.rule = rule;
        next.value = value;
        next.limit = limit;
        next.worst = worst;
        next.pass = report_.pass && value <= limit;
        if (report_.rule == "exact" || next.used() > report_.used()) report_ = next;
        report_.pass = next.pass;
    }

    /// Returns the rows of each block and, in the last entry, all rows.
    std::vector<std::vector<std::size_t>> scopes() const {
        const std::vector<std::size_t> block = gold_.blocks();
        std::vector<std::vector<std::size_t>> all;
        std::vector<std::size_t> every(block.size());
        for (std::size_t row = 0; row < block.size(); ++row) {
            if (all.size() <= block[row]) all.resize(block[row] + 1);
            all[block[row]].push_back(row);
            every[row] = row;
        }
        std::erase_if(all, [](const auto& rows) { return rows.empty(); });
        if (all.size() == 1) all.clear();
        all.push_back(std::move(every));
        return all;
    }

    std::string scope_text(const std::vector<std::size_t>& rows, bool whole) const {
        if (whole) return report_.worst;
        const std::int64_t size = gold_.row_size();
        return fmt::format("rows {} to {}", index_text(got_, static_cast<std::int64_t>(rows.front()) * size),
                           index_text(got_, static_cast<std::int64_t>(rows.back()) * size));
    }

    void check_relative_rmse() {
        const double relative = (role_ == Role::output ? kOutputRmse : kGradientRmse) * (unit_ / 0x1p-24);
        const auto all = scopes();
        for (const auto& rows : all) {
            const bool whole = &rows == &all.back();
            const Sums sums = sums_of(rows);
            if (sums.count == 0) continue;
            const double value = std::sqrt(sums.value);
            // The number of equal elements that would give this RMS; one large row counts as few.
            const double elements = sums.value > 0 ? sums.value * (sums.value / sums.value_fourth) : sums.count;
            const double few = 1 + kFewElements / std::sqrt(elements);
            // Terms that are copies share one error, so that nothing averages out.
            const double few_cancelled = gold_.has_copies ? 1 + kFewElements : few;
            const double cancelled = kCancelled * unit_ * std::sqrt(sums.magnitude);
            const double norm = value > 0 ? value : 1;
            apply_rule(whole ? "relative rmse" : "relative rmse of a block", std::sqrt(sums.error) / norm,
                       (whole ? 1 : kBlockRatio) * std::max(few * relative * value, few_cancelled * cancelled) / norm,
                       scope_text(rows, whole));
        }
    }

    /// Applies the contract's ratios to the unfused computation, or the error that unavoidable roundings exceed once in
    /// 10^5 tensors (rounding_noise.hpp) if that is larger, because the unfused errors may happen to be small.
    void check_against_unfused() {
        const RoundingNoise noise(gold_, dtype_, got_.dtype);
        const auto all = scopes();
        for (const auto& rows : all) {
            const bool whole = &rows == &all.back();
            const Sums sums = sums_of(rows);
            if (sums.count == 0) continue;
            const RoundingNoise::Squares roundings = noise.squares(rows, static_cast<double>(all.size()));
            const double ratio = kRmseRatio * std::sqrt(std::max(sums.unfused, sums.perfect));
            // Correct rounding of equal numbers costs more than expected in every kernel.
            const double excess = std::max(0.0, sums.perfect - roundings.last);
            const double sharp = kSharpRatio * std::sqrt(roundings.expected + excess);
            const bool is_sharp = sharp < ratio && !gold_.has_copies;
            const double limit = std::max(std::sqrt(roundings.rare + excess), is_sharp ? sharp : ratio);
            apply_rule(std::string(is_sharp ? "rmse / roundings" : "rmse / unfused") + (whole ? "" : " of a block"),
                       std::sqrt(sums.error / sums.count), limit / std::sqrt(sums.count), scope_text(rows, whole));
            if (whole) check_largest(noise, sums);
        }
        if (role_ == Role::output) check_bias(noise);
    }

    void check_largest(const RoundingNoise& noise, const Sums& sums) {
        const double limit = kMaxRatio * std::max(sums.max_unfused, sums.max_perfect);
        apply_rule("max error / unfused", sums.max_error, sums.max_error <= limit ? limit : noise.largest(limit),
                   report_.worst);
    }

    /// Checks the signed errors over the rows without an allowance for large scores. Their sum, and their sum away from
    /// 0, must stay within five deviations of the effect of roundings.
    void check_bias(const RoundingNoise& noise) {
        const auto dim = static_cast<std::size_t>(gold_.row_size());
        std::vector<std::size_t> rows;
        for (std::size_t row = 0; row < errors_.size() / dim; ++row) {
            const auto first = gold_.score.data.begin() + static_cast<std::ptrdiff_t>(row * dim);
            if (std::all_of(first, first + static_cast<std::ptrdiff_t>(dim), [](double x) { return x == 0; }))
                rows.push_back(row);
        }
        const double n = static_cast<double>(rows.size() * dim);
        if (n == 0) return;
        for (const bool outward : {false, true}) {
            double sum = 0;
            double perfect = 0;  // the bias of correctly rounded results, in which equal rows round alike
            double squares = 0;
            for (const std::size_t row : rows) {
                for (std::size_t i = row * dim; i < (row + 1) * dim; ++i) {
                    if (!finite_[i]) continue;
                    const double expected = gold_.value.data[i];
                    const double sign = outward && expected < 0 ? -1 : 1;
                    sum += sign * errors_[i];
                    perfect += sign * (rounded(expected, dtype_) - expected);
                    squares += expected * expected;
                }
            }
            perfect = std::isfinite(perfect) ? std::abs(perfect) : 0;
            const double limit = kBiasErrors * noise.deviation_of_sum(rows, outward) + kBiasPerfect * perfect;
            apply_rule(outward ? "bias outward" : "bias", std::abs(sum) / n,
                       limit / n + kBiasFloor * unit_ * std::sqrt(squares / n) + tiny_, report_.worst);
        }
    }

    const TensorGold& gold_;
    const TensorView& got_;
    DType dtype_;
    Role role_;
    double unit_;
    double tiny_ = 0;
    double squares_of_errors_ = 0, squares_of_values_ = 0;
    WorstElement element_;
    std::vector<double> errors_;  // signed, C order; 0 where not finite
    std::vector<bool> finite_;
    TensorReport report_;
};

}  // namespace

TensorReport compare_tensor(const TensorGold& gold, const TensorView& got, DType dtype, Role role) {
    return TensorComparison(gold, got, dtype, role).run();
}

}  // namespace tessera::check
