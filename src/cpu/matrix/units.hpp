// SPDX-License-Identifier: Apache-2.0
//
// What the units' files share: the tables that they define for unit.cc, and which parts they multiply. x86-64 only.
#pragma once

#include <iterator>

#include "cpu/matrix/primitives.hpp"

namespace tessera::cpu::matrix {

/// A part of the left operand times one of the right.
struct PairOfParts {
    int a;
    int b;
};

/// The products whose sum is the product of two numbers in parts. Of three parts each, those left out are under 2^-24
/// of the whole: (1, 2), (2, 1) and (2, 2). The order changes one part at a time where it can, for the other stays
/// loaded; the largest product is the last.
template <int kParts>
inline constexpr PairOfParts kPairs[1] = {{0, 0}};
template <>
inline constexpr PairOfParts kPairs<3>[6] = {{0, 2}, {0, 1}, {1, 1}, {1, 0}, {2, 0}, {0, 0}};

/// The same for B^T A^T, which so has the bits of A B.
template <int kParts>
constexpr PairOfParts mirrored_pair(std::size_t i) {
    return {kPairs<kParts>[i].b, kPairs<kParts>[i].a};
}

extern const Primitives kDotPrimitives;
extern const Primitives kAmxPrimitives;

}  // namespace tessera::cpu::matrix
