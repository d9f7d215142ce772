// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <numeric>
#include <string>

namespace tessera::walk {

/// An exact fraction in lowest terms, for numbers that a person could write down.
class Fraction {
 public:
    Fraction(std::int64_t whole = 0) : numerator_(whole) {}
    Fraction(std::int64_t numerator, std::int64_t denominator) : numerator_(numerator), denominator_(denominator) {
        if (denominator_ < 0) numerator_ = -numerator_, denominator_ = -denominator_;
        const std::int64_t common = std::gcd(numerator_, denominator_);
        if (common > 1) numerator_ /= common, denominator_ /= common;
    }

    std::int64_t numerator() const { return numerator_; }
    std::int64_t denominator() const { return denominator_; }
    double value() const { return static_cast<double>(numerator_) / static_cast<double>(denominator_); }
    /// "3", "-9/4"
    std::string text() const {
        std::string text = std::to_string(numerator_);
        if (denominator_ != 1) text.append("/").append(std::to_string(denominator_));
        return text;
    }

    friend Fraction operator+(const Fraction& a, const Fraction& b) {
        return {a.numerator_ * b.denominator_ + b.numerator_ * a.denominator_, a.denominator_ * b.denominator_};
    }
    friend Fraction operator-(const Fraction& a, const Fraction& b) {
        return a + Fraction(-b.numerator_, b.denominator_);
    }
    friend Fraction operator*(const Fraction& a, const Fraction& b) {
        return {a.numerator_ * b.numerator_, a.denominator_ * b.denominator_};
    }
    friend Fraction operator/(const Fraction& a, const Fraction& b) {
        return {a.numerator_ * b.denominator_, a.denominator_ * b.numerator_};
    }
    friend bool operator==(const Fraction&, const Fraction&) = default;

 private:
    std::int64_t numerator_ = 0;
    std::int64_t denominator_ = 1;
};

/// 2^power
inline Fraction power_of_two(std::int64_t power) {
    return power >= 0 ? Fraction(std::int64_t{1} << power) : Fraction(1, std::int64_t{1} << -power);
}

}  // namespace tessera::walk
