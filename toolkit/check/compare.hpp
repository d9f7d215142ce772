// SPDX-License-Identifier: Apache-2.0
//
// Compares a result with the fp64 reference. docs/numerics.md, "Accuracy", states the rules, the allowances and their
// numbers; tolerances.hpp repeats the numbers.
//
// NaN and infinities are compared first and exactly: NaN exactly where the reference has NaN, and equal infinities.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/attention.hpp"
#include "tessera/problem.hpp"

namespace tessera::check {

/// The comparison of one output tensor. It reports the rule that is broken or closest to its limit.
struct TensorReport {
    std::string name;          ///< "o", "lse", "dq", ...
    double relative_rmse = 0;  ///< ||x - x*|| / ||x*|| over the finite elements
    double max_abs_error = 0;
    double value = 0;  ///< the value compared with the limit
    double limit = 0;
    std::int64_t finite = 0;  ///< elements that are finite in both; the errors are taken over these
    std::int64_t free = 0;    ///< elements without a promise: their scores exceed the largest fp32 number
    bool pass = true;
    std::string rule;   ///< the rule that `value` and `limit` belong to
    std::string worst;  ///< the element with the largest error: its index, its value, and the expected value

    /// Fraction of the limit that is used; over 1 when the rule is broken.
    double used() const { return limit > 0 ? value / limit : value > 0 ? 1e300 : 0; }
};

struct Report {
    std::vector<TensorReport> tensors;
    bool pass() const;
    /// One line per tensor.
    std::string describe() const;
};

/// The fp64 results of one Problem and its inputs, with what the rules need. One object serves to compare many kernels.
class ForwardGold {
 public:
    ForwardGold(const Problem& problem, const ForwardArgs& inputs);
    ~ForwardGold();
    ForwardGold(ForwardGold&&) noexcept;
    Report compare(const ForwardArgs& finished) const;
    const TensorView& o() const;    ///< fp64, C order
    const TensorView& lse() const;  ///< fp64

 private:
    struct State;
    std::unique_ptr<State> state_;
};

class BackwardGold {
 public:
    /// `inputs.o` and `inputs.lse` are not read, because the reference recomputes what it needs.
    BackwardGold(const Problem& problem, const BackwardArgs& inputs);
    ~BackwardGold();
    BackwardGold(BackwardGold&&) noexcept;
    Report compare(const BackwardArgs& finished) const;
    const TensorView& dq() const;
    const TensorView& dk() const;
    const TensorView& dv() const;
    const TensorView& dbias() const;   ///< absent without bias_gradient
    const TensorView& dsinks() const;  ///< absent without sinks

 private:
    struct State;
    std::unique_ptr<State> state_;
};

/// Recomputes the outputs of a finished call from its inputs and compares them. LSE is compared if it is given.
Report check_forward(const Problem& problem, const ForwardArgs& finished);
Report check_backward(const Problem& problem, const BackwardArgs& finished);

}  // namespace tessera::check
