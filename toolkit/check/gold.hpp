// SPDX-License-Identifier: Apache-2.0
//
// The gold holds the packed fp64 values and bounds for compare.cc, one struct per output tensor.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "check/packed.hpp"
#include "tessera/attention.hpp"
#include "tessera/problem.hpp"

namespace tessera::check {

/// Unit roundoff: half the distance from 1 to the next number.
constexpr double unit_roundoff(DType dtype) {
    switch (dtype) {
        case DType::bf16: return 0x1p-8;
        case DType::fp16: return 0x1p-11;
        case DType::fp64: return 0x1p-53;
        default: return 0x1p-24;
    }
}

/// The smallest normal number. Numbers below it are rounded with the same absolute error as it is.
constexpr double smallest_normal(DType dtype) { return dtype == DType::fp16 ? 0x1p-14 : 0x1p-126; }

/// Groups the roundings of one tensor's terms by value. The rounding of a weight depends on its position between two
/// numbers of the dtype. Weights that agree to a quarter of that distance and a power of two share one rounding. Copies
/// of a query, a saturated softcap, or equal keys under ALiBi leave few values.
class RoundingsByValue {
 public:
    explicit RoundingsByValue(DType dtype = DType::fp64);
    /// Adds a term `value` times others. `squares` is the sum of squares that it contributes. `sum` and `outward` are
    /// its contributions to the sum of all elements and to the sum of their absolute values.
    void add(double value, double squares, double sum = 0, double outward = 0);
    /// Adds the largest weight of a row with its `sum` and `outward`. Most kernels represent it as 1, so that no other
    /// row shares its rounding. Rows of one `draw` round it alike in every kernel.
    void add_largest(std::size_t draw, double weight, double sum, double outward);
    const std::vector<double>& squares() const { return squares_; }
    /// Returns the sum of the squares of what the largest weights contribute, with those of one draw added first. If
    /// rows are copies, the result is the larger of that and the sum by value, because a kernel may divide by l first.
    double largest_squared(bool outward, bool has_copies) const;
    const std::vector<double>& sums(bool outward) const { return outward ? outward_ : sums_; }

 private:
    struct Largest {
        std::size_t draw, position;
        double sum, outward;
    };
    std::size_t position_of(double value) const;

    std::vector<double> squares_;  // [positions]
    std::vector<double> sums_;
    std::vector<double> outward_;
    std::vector<Largest> largest_;
};

/// The dimension of a tensor that counts queries or keys. Blocks of 64 neighbouring rows in it are also compared alone.
enum class Positions : std::uint8_t { before_heads, last_but_one };

/// One output: the right values and, for each element, how far a kernel may deviate and why (see compare.hpp).
struct TensorGold {
    std::string name;
    Packed value;      ///< from the fp64 reference
    Packed magnitude;  ///< M: sum of the absolute values of the terms
    Packed score;      ///< A: the score allowance, 0 in rows of ordinary scores
    Packed subnormal;  ///< fp16: the loss in weights (in gradients: dS) that are small beside the largest
    Packed unfused;    ///< the same-precision unfused result; empty for fp32 and fp64
    /// Squares of the terms with a factor that every kernel rounds to the dtype (P in O and dV, dS in the others).
    Packed rounded;
    RoundingsByValue by_value;  ///< those terms of all elements, by value
    Positions positions;
    /// O: for each row, the first row with the same query on the same keys, whose weights round alike. Empty if no two
    /// rows share a query.
    std::vector<std::size_t> draws;
    /// Elements without a promise in docs/numerics.md: a score that they depend on exceeds the largest fp32 number.
    std::vector<bool> free;
    /// True if rows of the inputs are copies of others (stride 0). Their terms round alike and may all add up.
    bool has_copies = false;

    /// Fills everything with zeros in the shape of `like`. `dtype` is the dtype that the terms are rounded to.
    TensorGold(std::string tensor_name, const TensorView& like, DType dtype = DType::fp64,
               Positions which = Positions::before_heads)
        : name(std::move(tensor_name)),
          value(packed_zeros(like)),
          magnitude(packed_zeros(like)),
          score(packed_zeros(like)),
          subnormal(packed_zeros(like)),
          rounded(packed_zeros(like)),
          by_value(dtype),
          positions(which),
          free(value.data.size(), false) {}

    std::int64_t row_size() const {
        const TensorView& v = value.view;
        return v.rank == 0 ? 1 : std::max<std::int64_t>(v.shape[static_cast<std::size_t>(v.rank) - 1], 1);
    }
    /// The block of each row (C order, without the last dimension): 64 neighbouring positions of one head.
    std::vector<std::size_t> blocks() const;
};

/// fp64 copies of the inputs of a call. `call` is the same call on the copies: fp64 throughout, no outputs.
template <class Args>
struct PackedCall {
    Problem problem;  ///< dtype fp64
    DType dtype;      ///< dtype of the Problem that was packed
    Packed q, k, v, bias, d_o, dlse;
    Args call{};
};

/// An LSE of zeros: [batch, heads_q, len_q] or [heads_q, total_q].
Packed packed_lse(const Problem& problem);

PackedCall<ForwardArgs> pack(const Problem& problem, const ForwardArgs& args);
PackedCall<BackwardArgs> pack(const Problem& problem, const BackwardArgs& args);

/// True if one of the tensors has a dimension of stride 0.
bool has_copies(std::initializer_list<const Packed*> tensors);

/// Fills magnitude and score of both (magnitudes.cc). o.value must be filled in.
void add_magnitudes(const PackedCall<ForwardArgs>& packed, TensorGold& o, TensorGold& lse);

/// The gradients' golds; dbias and dsinks may be null.
struct Gradients {
    TensorGold* dq;
    TensorGold* dk;
    TensorGold* dv;
    TensorGold* dbias;
    TensorGold* dsinks;
};
/// `with_residual`: kernels may compute delta from O and its residual.
void add_magnitudes(const PackedCall<BackwardArgs>& packed, const Gradients& gradients, bool with_residual);

}  // namespace tessera::check
