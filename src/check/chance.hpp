// SPDX-License-Identifier: Apache-2.0
//
// What chance may do. The rules of bf16 and fp16 compare a kernel with the unfused computation, and both errors are
// draws. Measured over seeds (docs/decisions/judging-draws.md): a kernel whose RMSE is 0.95 of the unfused one in the
// mean has up to 1.62 where all rows have their weights in common, and one with 0.64 has up to 2.65 times the maximum
// where few terms are large.
//
// What does not depend on luck is the error that is left when everything but two roundings is exact: of the weights (in
// gradients of Q and K: of dS), and of the result. Its deviation in each element is known, so is what it passes once in
// 10^5 tensors, and no kernel of this precision can be asked to stay under that.
#pragma once

#include <cstddef>
#include <vector>

#include "check/gold.hpp"

namespace tessera::check {

class Chance {
 public:
    /// `stored`: the dtype that the result is rounded to.
    Chance(const TensorGold& gold, DType dtype, DType stored);

    /// What the sum of the squares of all errors passes once in 10^5.
    double squares() const;
    /// What the largest error passes once in 10^5. `at_least`: a number known to be under it.
    double largest(double at_least) const;
    /// The group of each row; rows of one group have roundings in common.
    const std::vector<std::size_t>& groups() const { return groups_; }

 private:
    double passed(double limit) const;

    std::size_t dim_;
    std::vector<double> inner_;           // variance by the rounding of the terms
    std::vector<double> last_;            // half a step of the result: the most its rounding costs
    std::vector<std::size_t> groups_;     // [rows]
    std::vector<std::size_t> originals_;  // [rows], the first row with the same values
};

}  // namespace tessera::check
