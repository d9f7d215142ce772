// SPDX-License-Identifier: Apache-2.0
//
// The errors that chance alone can make. The rules of bf16 and fp16 compare a kernel with the unfused computation, and
// both errors are draws. What does not depend on luck is the error that is left when everything but two roundings is
// exact: of the weights (in gradients of Q and K: of dS), and of the result. Its variance in each element is known, so
// is what it passes once in 10^5 tensors, and no kernel of this precision can be asked to stay under that
// (docs/decisions/judging-draws.md).
#pragma once

#include <cstddef>
#include <vector>

#include "check/gold.hpp"

namespace tessera::check {

class Chance {
 public:
    /// `stored`: the dtype that the result is rounded to.
    Chance(const TensorGold& gold, DType dtype, DType stored);

    /// Sums of the squares of all errors of some rows.
    struct Squares {
        double expected = 0;
        double last = 0;  ///< the share of the result's rounding in that
        double rare = 0;  ///< passed once in 10^5 * `of` times
    };
    /// `of`: how many sets of rows are asked for.
    Squares squares(const std::vector<std::size_t>& rows, double of) const;
    /// The value that the largest error passes once in 10^5. `at_least`: a number known to be under it.
    double largest(double at_least) const;
    /// Deviation of the sum of the errors over some rows, or of the errors away from 0.
    double deviation_of_sum(const std::vector<std::size_t>& rows, bool outward) const;

 private:
    double passed(double limit) const;

    std::size_t dim_;
    double unit_squared_;                 // mean square of a relative rounding error
    std::vector<double> inner_;           // variance by the rounding of the terms
    std::vector<double> last_;            // half a step of the result: the most its rounding costs
    std::vector<double> alike_;           // how many elements of the row have the same value, and round alike
    std::vector<std::size_t> originals_;  // [rows], the first row with the same values
    std::vector<std::size_t> draws_;      // [rows], the first row whose weights round alike
    const RoundingsByValue& by_value_;
    bool has_copies_;
};

}  // namespace tessera::check
