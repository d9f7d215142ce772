// SPDX-License-Identifier: Apache-2.0
//
// Is a result right, against the fp64 reference? The rules, the allowances and their numbers stand in docs/numerics.md,
// "Accuracy"; the numbers again in tolerances.hpp.
//
// NaN and infinities are compared first, exactly: NaN where and only where the reference has NaN, infinities equal.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/attention.hpp"
#include "tessera/problem.hpp"

namespace tessera::check {

/// The comparison of one output tensor. It reports the rule that is broken or nearest to its limit.
struct TensorReport {
    std::string name;          ///< "o", "lse", "dq", ...
    double relative_rmse = 0;  ///< ||x - x*|| / ||x*|| over the finite elements
    double max_abs_error = 0;
    double value = 0;  ///< what is held against the limit
    double limit = 0;
    std::int64_t finite = 0;  ///< elements that are finite in both, of which the errors are
    std::int64_t free = 0;    ///< that nothing is promised of: their scores pass the largest fp32 number
    bool pass = true;
    std::string rule;   ///< which rule `value` and `limit` belong to
    std::string worst;  ///< the element with the largest error: index, what came, what was expected

    /// Share of the limit that is used; over 1 when the rule is broken.
    double used() const { return limit > 0 ? value / limit : value > 0 ? 1e300 : 0; }
};

struct Report {
    std::vector<TensorReport> tensors;
    bool pass() const;
    /// One line per tensor.
    std::string describe() const;
};

/// The fp64 results of one Problem and its inputs, and what the rules need besides: compute once, compare many kernels.
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
    /// `inputs.o` and `inputs.lse` are not read: the reference recomputes what it needs.
    BackwardGold(const Problem& problem, const BackwardArgs& inputs);
    ~BackwardGold();
    BackwardGold(BackwardGold&&) noexcept;
    Report compare(const BackwardArgs& finished) const;
    const TensorView& dq() const;
    const TensorView& dk() const;
    const TensorView& dv() const;
    const TensorView& dbias() const;  ///< not given without bias_gradient

 private:
    struct State;
    std::unique_ptr<State> state_;
};

/// Recomputes the outputs of a finished call from its inputs, and compares. The lse is compared when it is given.
Report check_forward(const Problem& problem, const ForwardArgs& finished);
Report check_backward(const Problem& problem, const BackwardArgs& finished);

}  // namespace tessera::check
