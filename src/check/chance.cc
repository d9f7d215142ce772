// SPDX-License-Identifier: Apache-2.0
#include "check/chance.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <unordered_map>

namespace tessera::check {
namespace {

constexpr double kRare = 1e-5;
// Mean square of a relative rounding error in units of the unit roundoff: a third of that of 1 / mantissa, which is
// 0.541 for mantissas between 1 and 2 that are spread as logarithms are.
constexpr double kRounding = 0.18;

/// Half the distance between neighbours of x; numbers under the normal ones are as far apart as the smallest of these.
double half_step(double x, DType dtype) {
    int exponent = 0;
    std::frexp(std::max(std::abs(x), smallest_normal(dtype)), &exponent);
    return std::ldexp(unit_roundoff(dtype), exponent - 1);
}

/// Sets of rows that are joined one by one.
class Sets {
 public:
    explicit Sets(std::size_t count) : parent_(count) { std::iota(parent_.begin(), parent_.end(), std::size_t{0}); }
    std::size_t first(std::size_t row) {
        while (parent_[row] != row) row = parent_[row] = parent_[parent_[row]];
        return row;
    }
    void join(std::size_t a, std::size_t b) {
        a = first(a), b = first(b);
        parent_[std::max(a, b)] = std::min(a, b);
    }

 private:
    std::vector<std::size_t> parent_;
};

/// Sum, sum of squares and maximum of the weights of independent squares.
struct Spread {
    double sum = 0, squares = 0, largest = 0;
    void add(double weight) {
        sum += weight;
        squares += weight * weight;
        largest = std::max(largest, weight);
    }
};

}  // namespace

Chance::Chance(const TensorGold& gold, DType dtype, DType stored) : dim_(static_cast<std::size_t>(gold.row_size())) {
    const std::vector<double>& values = gold.value.data;
    const double u = unit_roundoff(dtype);
    for (std::size_t i = 0; i < values.size(); ++i) {
        const bool finite = std::isfinite(values[i]);
        const double variance = kRounding * u * u * (gold.rounded.data[i] + gold.stored_o.data[i]);
        inner_.push_back(finite && std::isfinite(variance) ? variance : 0);
        last_.push_back(finite ? half_step(values[i], stored) : 0);
    }
    const std::size_t rows = values.size() / dim_;
    Sets sets(rows);
    std::unordered_map<std::uint64_t, std::size_t> of_cause;
    std::unordered_map<std::string, std::size_t> of_values;
    std::vector<float> row(dim_);  // fp32, so that the order of a sum in fp64 tells no copies apart
    for (std::size_t r = 0; r < rows; ++r) {
        std::transform(values.begin() + static_cast<std::ptrdiff_t>(r * dim_),
                       values.begin() + static_cast<std::ptrdiff_t>((r + 1) * dim_), row.begin(),
                       [](double x) { return static_cast<float>(x); });
        const std::string bytes(reinterpret_cast<const char*>(row.data()), dim_ * sizeof(float));
        originals_.push_back(of_values.emplace(bytes, r).first->second);
        sets.join(r, originals_.back());
        if (!gold.cause.empty()) sets.join(r, of_cause.emplace(gold.cause[r], r).first->second);
    }
    for (std::size_t r = 0; r < rows; ++r) groups_.push_back(sets.first(r));
}

/// A sum of squares of normal errors, w_1 x_1^2 + w_2 x_2^2 + ..., passes |w|_1 + 2 |w|_2 sqrt(t) + 2 max(w) t with a
/// probability of exp(-t) at most (Laurent and Massart 2000, lemma 1). Roundings have lighter tails than normal errors.
/// A group of rows counts as one x for the terms' roundings, the copies of an element as one x for the last.
double Chance::squares() const {
    std::vector<double> of_group(groups_.size());
    std::vector<double> copies(groups_.size());
    for (std::size_t r = 0; r < groups_.size(); ++r) {
        for (std::size_t i = r * dim_; i < (r + 1) * dim_; ++i) of_group[groups_[r]] += inner_[i];
        copies[originals_[r]] += 1;
    }
    Spread spread;
    for (std::size_t r = 0; r < groups_.size(); ++r) {
        spread.add(of_group[r]);
        for (std::size_t i = r * dim_; i < (r + 1) * dim_; ++i) spread.add(copies[r] * last_[i] * last_[i] / 3);
    }
    const double t = -std::log(kRare);
    return spread.sum + 2 * std::sqrt(spread.squares * t) + 2 * spread.largest * t;
}

/// At most how probable it is that some error passes the limit: the sum over the elements, which asks for no
/// independence. The last rounding is either one more normal error, or half a step whatever happens.
double Chance::passed(double limit) const {
    const auto tail = [](double x, double variance) {
        if (x <= 0) return 1.0;
        return variance > 0 ? std::erfc(x / std::sqrt(2 * variance)) : 0.0;
    };
    double sum = 0;
    for (std::size_t r = 0; r < groups_.size(); ++r) {
        if (originals_[r] != r) continue;
        for (std::size_t i = r * dim_; i < (r + 1) * dim_; ++i)
            sum += std::min(tail(limit - last_[i], inner_[i]), tail(limit, inner_[i] + last_[i] * last_[i] / 3));
    }
    return sum;
}

double Chance::largest(double at_least) const {
    double low = at_least;
    double high = std::max(at_least, std::numeric_limits<double>::min());
    if (passed(low) <= kRare) return low;
    while (passed(high) > kRare) high *= 2;
    for (int halving = 0; halving < 12; ++halving) {
        const double middle = (low + high) / 2;
        (passed(middle) > kRare ? low : high) = middle;
    }
    return high;
}

}  // namespace tessera::check
