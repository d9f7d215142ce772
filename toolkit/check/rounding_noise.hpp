// SPDX-License-Identifier: Apache-2.0
//
// Computes the errors that rounding alone makes. The bf16 and fp16 rules compare a kernel with the unfused
// computation, and both errors are random draws. The bound here assumes that only two roundings are inexact: that of
// the weights (of dS in the gradients of Q and K) and that of the result. The variance of this error is known for each
// element, and so is the value that it exceeds once in 10^5 tensors. No kernel of this precision can be asked to stay
// below that value (docs/decisions/judging-draws.md).
#pragma once

#include <cstddef>
#include <vector>

#include "check/gold.hpp"

namespace tessera::check {

class RoundingNoise {
 public:
    /// `stored` is the dtype that the result is rounded to.
    RoundingNoise(const TensorGold& gold, DType dtype, DType stored);

    /// Sums of the squares of all errors of some rows.
    struct Squares {
        double expected = 0;
        double last = 0;  ///< the part of it that the rounding of the result makes
        double rare = 0;  ///< the value exceeded once in 10^5 * `sets` times
    };
    /// `sets` is the number of sets of rows that are compared.
    Squares squares(const std::vector<std::size_t>& rows, double sets) const;
    /// Returns the value that the largest error exceeds once in 10^5 times. `at_least` is a known lower bound.
    double largest(double at_least) const;
    /// Returns the standard deviation of the sum of the errors over some rows, or (`outward`) of those away from 0.
    double deviation_of_sum(const std::vector<std::size_t>& rows, bool outward) const;

 private:
    double probability_above(double limit) const;

    std::size_t dim_;
    double unit_squared_;                 // mean square of a relative rounding error
    std::vector<double> inner_;           // variance from the rounding of the terms
    std::vector<double> last_;            // half a step of the result: the largest error of its rounding
    std::vector<double> equal_;           // number of elements of the row with the same value, which round alike
    std::vector<std::size_t> originals_;  // [rows], the first row with the same values
    std::vector<std::size_t> draws_;      // [rows], the first row whose weights round alike
    const RoundingsByValue& by_value_;
    bool has_copies_;
};

}  // namespace tessera::check
