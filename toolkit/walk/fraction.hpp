// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <numeric>
#include <string>

#include "tessera/error.hpp"

namespace tessera::walk {

/// An exact fraction in lowest terms. Arithmetic beyond 64 bits throws Error(invalid_argument) instead of overflowing.
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
    /// Formats the fraction as "3" or "-9/4".
    std::string text() const {
        std::string text = std::to_string(numerator_);
        if (denominator_ != 1) text.append("/").append(std::to_string(denominator_));
        return text;
    }

    friend Fraction operator+(const Fraction& a, const Fraction& b) {
        // The sum uses the common denominator in lowest terms, because products of denominators exceed 64 bits sooner.
        const std::int64_t common = std::gcd(a.denominator_, b.denominator_);
        const std::int64_t of_a = b.denominator_ / common, of_b = a.denominator_ / common;
        return {sum(product(a.numerator_, of_a), product(b.numerator_, of_b)), product(a.denominator_, of_a)};
    }
    friend Fraction operator-(const Fraction& a, const Fraction& b) {
        return a + Fraction(-b.numerator_, b.denominator_);
    }
    friend Fraction operator*(const Fraction& a, const Fraction& b) {
        const Fraction left(a.numerator_, b.denominator_), right(b.numerator_, a.denominator_);
        return {product(left.numerator_, right.numerator_), product(left.denominator_, right.denominator_)};
    }
    friend Fraction operator/(const Fraction& a, const Fraction& b) {
        return a * Fraction(b.denominator_, b.numerator_);
    }
    friend bool operator==(const Fraction&, const Fraction&) = default;

 private:
    [[noreturn]] static void refuse() {
        throw Error(ErrorCode::invalid_argument, "numbers", "expected smaller numbers: a fraction exceeds 64 bits");
    }
    static std::int64_t product(std::int64_t a, std::int64_t b) {
        std::int64_t result = 0;
        if (__builtin_mul_overflow(a, b, &result)) refuse();
        return result;
    }
    static std::int64_t sum(std::int64_t a, std::int64_t b) {
        std::int64_t result = 0;
        if (__builtin_add_overflow(a, b, &result)) refuse();
        return result;
    }

    std::int64_t numerator_ = 0;
    std::int64_t denominator_ = 1;
};

/// Returns 2^power.
inline Fraction power_of_two(std::int64_t power) {
    if (power > 61 || power < -61)
        throw Error(ErrorCode::invalid_argument, "numbers", "expected scores less than 62 apart");
    return power >= 0 ? Fraction(std::int64_t{1} << power) : Fraction(1, std::int64_t{1} << -power);
}

}  // namespace tessera::walk
