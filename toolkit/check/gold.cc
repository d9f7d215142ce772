// SPDX-License-Identifier: Apache-2.0
#include "check/gold.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "check/tolerances.hpp"
#include "core/arguments.hpp"

namespace tessera::check {
namespace {

template <class Args>
PackedCall<Args> pack_inputs(const Problem& problem, const Args& args) {
    PackedCall<Args> packed;
    packed.problem = problem;
    packed.dtype = problem.dtype;
    packed.problem.dtype = DType::fp64;
    packed.q = packed_copy(args.q);
    packed.k = packed_copy(args.k);
    packed.v = packed_copy(args.v);
    packed.bias = packed_copy(args.bias);
    packed.call = inputs_of<Args>(inputs_of<ForwardArgs>(args));  // the inputs of both passes
    packed.call.q = packed.q.view;
    packed.call.k = packed.k.view;
    packed.call.v = packed.v.view;
    packed.call.bias = packed.bias.view;
    return packed;
}

}  // namespace

RoundingsByValue::RoundingsByValue(DType dtype) {
    if (dtype != DType::bf16 && dtype != DType::fp16) return;
    const auto positions = static_cast<std::size_t>(2 / unit_roundoff(dtype));  // quarter steps from 1 to 2
    squares_.resize(positions);
    sums_.resize(positions);
    outward_.resize(positions);
}

void RoundingsByValue::add(double value, double squares, double sum, double outward) {
    if (squares_.empty() || value == 0 || !std::isfinite(squares)) return;
    const std::size_t at = position_of(value);
    squares_[at] += squares;
    sums_[at] += sum;
    outward_[at] += outward;
}

std::size_t RoundingsByValue::position_of(double value) const {
    int exponent = 0;
    const double mantissa = 2 * std::frexp(std::abs(value), &exponent) - 1;  // mantissa in 1 .. 2, less 1
    const double noise = 1e-9;  // fp64 noise: values that are equal on paper get one position
    const auto count = static_cast<double>(squares_.size());
    return static_cast<std::size_t>((mantissa + noise) * count) % squares_.size();
}

void RoundingsByValue::add_largest(std::size_t draw, double weight, double sum, double outward) {
    if (squares_.empty() || weight == 0 || !std::isfinite(sum)) return;
    largest_.push_back({draw, position_of(weight), sum, outward});
}

double RoundingsByValue::largest_squared(bool outward, bool has_copies) const {
    std::map<std::size_t, double> of_draws, of_values;
    for (const Largest& largest : largest_) {
        const double added = outward ? largest.outward : largest.sum;
        of_draws[largest.draw] += added;
        if (has_copies) of_values[largest.position] += added;
    }
    const auto squares = [](const std::map<std::size_t, double>& sums) {
        return std::accumulate(sums.begin(), sums.end(), 0.0,
                               [](double total, const auto& entry) { return total + entry.second * entry.second; });
    };
    return std::max(squares(of_draws), squares(of_values));
}

std::vector<std::size_t> TensorGold::blocks() const {
    const TensorView& v = value.view;
    const auto rank = static_cast<std::size_t>(std::max<std::int64_t>(v.rank, 1));
    const std::size_t back = positions == Positions::before_heads ? 3 : 2;
    const std::size_t at = rank > back ? rank - back : 0;
    std::size_t inner = 1;
    for (std::size_t d = at + 1; d + 1 < rank; ++d) inner *= static_cast<std::size_t>(v.shape[d]);
    const auto length = static_cast<std::size_t>(v.shape[at]);
    const std::size_t blocks = (length + kBlockRows - 1) / kBlockRows;
    std::vector<std::size_t> of_rows(value.data.size() / static_cast<std::size_t>(row_size()));
    for (std::size_t row = 0; row < of_rows.size(); ++row) {
        const std::size_t position = row / inner % length;
        of_rows[row] = (row / inner / length * blocks + position / kBlockRows) * inner + row % inner;
    }
    return of_rows;
}

bool has_copies(std::initializer_list<const Packed*> tensors) {
    return std::any_of(tensors.begin(), tensors.end(), [](const Packed* tensor) {
        const TensorView& v = tensor->view;
        for (std::size_t d = 0; d < static_cast<std::size_t>(v.rank); ++d) {
            if (v.shape[d] > 1 && v.strides[d] == 0) return true;
        }
        return false;
    });
}

Packed packed_lse(const Problem& p) {
    return packed_zeros(p.ragged ? dense_view(nullptr, DType::fp64, {p.heads_q, p.total_q})
                                 : dense_view(nullptr, DType::fp64, {p.batch, p.heads_q, p.len_q}));
}

PackedCall<ForwardArgs> pack(const Problem& problem, const ForwardArgs& args) { return pack_inputs(problem, args); }

PackedCall<BackwardArgs> pack(const Problem& problem, const BackwardArgs& args) {
    PackedCall<BackwardArgs> packed = pack_inputs(problem, args);
    packed.d_o = packed_copy(args.d_o);
    packed.dlse = packed_copy(args.dlse);
    packed.call.d_o = packed.d_o.view;
    packed.call.dlse = packed.dlse.view;
    return packed;
}

}  // namespace tessera::check
