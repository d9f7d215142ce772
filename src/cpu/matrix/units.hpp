// SPDX-License-Identifier: Apache-2.0
//
// The tables that the units' files define for unit.cc, and the pairs of parts they multiply. x86-64 only.
#pragma once

#include <iterator>

#include "cpu/matrix/primitives.hpp"

namespace tessera::cpu::matrix {

/// A part of the left operand times one of the right.
struct PairOfParts {
    int a;
    int b;
};

/// The pairs of parts whose products sum to the product of two numbers. With three parts each, the omitted pairs (1,
/// 2), (2, 1) and (2, 2) are under 2^-24 of the whole. The order changes one part at a time if possible, so that the
/// other stays loaded. The largest product comes last.
template <int kParts>
inline constexpr PairOfParts kPairs[1] = {{0, 0}};
template <>
inline constexpr PairOfParts kPairs<3>[6] = {{0, 2}, {0, 1}, {1, 1}, {1, 0}, {2, 0}, {0, 0}};

/// The pairs for B^T A^T, in the order that gives the bits of A B.
template <int kParts>
constexpr PairOfParts mirrored_pair(std::size_t i) {
    return {kPairs<kParts>[i].b, kPairs<kParts>[i].a};
}

extern const RowPrimitives kDotRowPrimitives;
extern const Primitives kDotPrimitives;
extern const Primitives kAmxPrimitives;

}  // namespace tessera::cpu::matrix
