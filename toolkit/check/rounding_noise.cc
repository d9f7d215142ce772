// SPDX-License-Identifier: Apache-2.0
#include "check/rounding_noise.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <unordered_map>

#include "check/tolerances.hpp"

namespace tessera::check {
namespace {

// Mean square of a relative rounding error, in squared unit roundoffs: a third of the mean square of 1 / mantissa. That
// mean square is 0.541 for mantissas between 1 and 2 whose logarithms are spread evenly.
constexpr double kRounding = 0.18;

/// Returns half the distance between neighbours of x. Subnormal numbers are spaced like the smallest normal number.
double half_step(double x, DType dtype) {
    int exponent = 0;
    std::frexp(std::max(std::abs(x), smallest_normal(dtype)), &exponent);
    return std::ldexp(unit_roundoff(dtype), exponent - 1);
}

/// Sum, sum of squares and maximum of the weights of independent squares.
struct WeightSums {
    double sum = 0, squares = 0, largest = 0;
    /// Adds one of `equal` equal weights of one square.
    void add(double weight, double equal = 1) {
        sum += weight;
        squares += weight * weight * equal;
        largest = std::max(largest, weight * equal);
    }
};

}  // namespace

RoundingNoise::RoundingNoise(const TensorGold& gold, DType dtype, DType stored)
    : dim_(static_cast<std::size_t>(gold.row_size())),
      unit_squared_(kRounding * std::pow(unit_roundoff(dtype), 2)),
      by_value_(gold.by_value),
      has_copies_(gold.has_copies) {
    const std::vector<double>& values = gold.value.data;
    for (std::size_t i = 0; i < values.size(); ++i) {
        const bool finite = std::isfinite(values[i]);
        const double variance = unit_squared_ * gold.rounded.data[i];
        inner_.push_back(finite && std::isfinite(variance) ? variance : 0);
        last_.push_back(finite ? half_step(values[i], stored) : 0);
    }
    std::unordered_map<std::string, std::size_t> of_values;
    // The key is fp32, so that the order of a sum in fp64 does not separate copies. It includes the variances: a row
    // that cancels to 0 is no copy of a row without terms.
    std::vector<float> row(dim_), both(2 * dim_);
    for (std::size_t r = 0; r < values.size() / dim_; ++r) {
        std::transform(values.begin() + static_cast<std::ptrdiff_t>(r * dim_),
                       values.begin() + static_cast<std::ptrdiff_t>((r + 1) * dim_), row.begin(),
                       [](double x) { return static_cast<float>(x); });
        std::copy(row.begin(), row.end(), both.begin());
        std::transform(inner_.begin() + static_cast<std::ptrdiff_t>(r * dim_),
                       inner_.begin() + static_cast<std::ptrdiff_t>((r + 1) * dim_),
                       both.begin() + static_cast<std::ptrdiff_t>(dim_),
                       [](double x) { return static_cast<float>(x); });
        const std::string bytes(reinterpret_cast<const char*>(both.data()), both.size() * sizeof(float));
        originals_.push_back(of_values.emplace(bytes, r).first->second);
        std::unordered_map<float, double> counts;
        for (const float x : row) counts[x] += 1;
        for (const float x : row) equal_.push_back(counts[x]);
    }
    draws_ = originals_;
    for (std::size_t r = 0; r < gold.draws.size(); ++r) draws_[r] = originals_[gold.draws[r]];
}

/// Bounds a sum of squares of normal errors, w_1 x_1^2 + w_2 x_2^2 + .... It exceeds |w|_1 + 2 |w|_2 sqrt(t) + 2 max(w)
/// t with a probability of at most exp(-t) (Laurent and Massart 2000, lemma 1). Roundings have lighter tails than
/// normal errors. For the roundings of the terms, either the rows of one draw or the terms of one value count as one x,
/// whichever gives the larger bound. Rows of one draw are copies, or have one query on the same keys, of which a mask
/// may hide different ones. For the last rounding, all copies of an element count as one x, in other rows and in its
/// own (columns of V that are copies).
RoundingNoise::Squares RoundingNoise::squares(const std::vector<std::size_t>& rows, double sets) const {
    std::map<std::size_t, double> terms;  // terms summed over the rows of one draw
    std::map<std::size_t, double> copies;
    for (const std::size_t r : rows) {
        double& sum = terms[draws_[r]];
        for (std::size_t i = r * dim_; i < (r + 1) * dim_; ++i) sum += inner_[i];
        copies[originals_[r]] += 1;
    }
    WeightSums by_row, by_value, last;
    for (const auto& [row, sum] : terms) by_row.add(sum);
    for (const double squares : by_value_.squares()) by_value.add(squares);
    for (const auto& [row, count] : copies) {
        for (std::size_t i = row * dim_; i < (row + 1) * dim_; ++i)
            last.add(count * last_[i] * last_[i] / 3, equal_[i]);
    }
    const double fraction = by_value.sum > 0 ? by_row.sum / by_value.sum : 0;
    const double t = std::log(sets / kRare);
    const double squares = std::max(by_row.squares, fraction * fraction * by_value.squares) + last.squares;
    const double largest = std::max({by_row.largest, fraction * by_value.largest, last.largest});
    const double expected = by_row.sum + last.sum;
    return {expected, last.sum, expected + 2 * std::sqrt(squares * t) + 2 * largest * t};
}

/// Returns an upper bound on the probability that some error exceeds the limit: the sum over the elements, which needs
/// no independence. The last rounding counts either as one more normal error or as a fixed half step.
double RoundingNoise::probability_above(double limit) const {
    const auto tail = [](double x, double variance) {
        if (x <= 0) return 1.0;
        return variance > 0 ? std::erfc(x / std::sqrt(2 * variance)) : 0.0;
    };
    double sum = 0;
    for (std::size_t r = 0; r < originals_.size(); ++r) {
        if (originals_[r] != r) continue;
        for (std::size_t i = r * dim_; i < (r + 1) * dim_; ++i)
            sum += std::min(tail(limit - last_[i], inner_[i]), tail(limit, inner_[i] + last_[i] * last_[i] / 3));
    }
    return sum;
}

double RoundingNoise::largest(double at_least) const {
    double low = at_least;
    double high = std::max(at_least, std::numeric_limits<double>::min());
    if (probability_above(low) <= kRare) return low;
    while (probability_above(high) > kRare) high *= 2;
    for (int halving = 0; halving < 12; ++halving) {
        const double middle = (low + high) / 2;
        (probability_above(middle) > kRare ? low : high) = middle;
    }
    return high;
}

double RoundingNoise::deviation_of_sum(const std::vector<std::size_t>& rows, bool outward) const {
    double variance = unit_squared_ * by_value_.largest_squared(outward, has_copies_);
    for (const double sum : by_value_.sums(outward)) variance += unit_squared_ * sum * sum;
    std::map<std::size_t, double> copies;
    for (const std::size_t r : rows) copies[originals_[r]] += 1;
    for (const auto& [row, count] : copies) {
        for (std::size_t i = row * dim_; i < (row + 1) * dim_; ++i)
            variance += std::pow(count * last_[i], 2) * equal_[i] / 3;
    }
    return std::sqrt(variance);
}

}  // namespace tessera::check
