// SPDX-License-Identifier: Apache-2.0
//
// The accuracy rules of the contract (docs/numerics.md): is a result right, against the fp64 reference?
//
// NaN and infinities are compared first, exactly: NaN where and only where the reference has NaN, infinities equal.
// Then the numbers, with u = the unit roundoff of the dtype (fp32 2^-24, bf16 2^-8, fp16 2^-11) and, for each element,
// M = the sum of the absolute values of the terms that it is the sum of (for O: sum_j p_j |v_j|):
//
//   fp32        |x - x*| <= max(2e-6 |x*|, u/2 (1 + 4/sqrt(n)) |M|) + A, with norms over the n elements; 1e-5 for
//               gradients. The second term holds only where terms cancel to a 67th and less (gradients: a 330th), or
//               where a tensor of few elements is unlucky: no sum of rounded terms can do better.
//   bf16, fp16  element by element |x - x*| <= 3 u M + A;   and against the same-precision unfused computation
//               (unfused.hpp): max error <= 1.5x, RMSE <= 1.1x, where the unfused error counts at least as much as the
//               final rounding of a perfect result, or as much as the roundings that no kernel does without pass once
//               in 10^5 tensors (chance.hpp); gradients get the effect of the rounding of the stored O on top, in both
//               rules; and O has no bias: |mean| and |mean in the direction of O| of the error are within 5 standard
//               errors over rows, where copies count as one, as far as correct rounding of these numbers has none
//               (alike rows round alike).
//   LSE         |x - x*| <= 2e-6 + 2^-20 |x*| + A
//
// A is the score allowance: what an error of 4 * 2^-24 * a in each score does, where a is the sum of the absolute
// values that make up the score. Scores are fp32 in every kernel, so that an error in proportion to a * 2^-24 is
// nobody's fault. It is granted only to rows whose probability-weighted a passes 32 (for LSE: 16, since a score near 0
// that is a sum of large terms has no |x*| to be relative to); N(0, 1) inputs with the default scale stay under 13 at
// any head_dim, so that for them A = 0. Where it passes 10 % of a weight, the weight may be anything in [0, 1]. With a
// softcap A also holds an error of 2^-22 in its slope 1 - tanh^2. Every limit has "tiny" added: the smallest normal
// number (fp16: the spacing of its subnormals) and 2^-120 of the largest M, for weights that are flushed to 0.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/attention.hpp"
#include "tessera/problem.hpp"

namespace tessera::check {

/// How one output tensor compares. Of the rules that apply, the one that is used up furthest (or broken) is reported.
struct TensorReport {
    std::string name;          ///< "o", "lse", "dq", ...
    double relative_rmse = 0;  ///< ||x - x*|| / ||x*|| over the finite elements
    double max_abs_error = 0;
    double value = 0;  ///< what is held against the limit
    double limit = 0;
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
