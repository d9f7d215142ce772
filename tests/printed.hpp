// SPDX-License-Identifier: Apache-2.0
//
// Has GoogleTest print the parameters of tests as text, not as bytes.
#pragma once

#include <ostream>

#include "check/case.hpp"
#include "check/feature_cases.hpp"
#include "cpu/matrix/primitives.hpp"
#include "tessera/tensor.hpp"

namespace tessera {
inline void PrintTo(DType dtype, std::ostream* out) { *out << name_of(dtype); }
inline void PrintTo(DeviceType type, std::ostream* out) { *out << (type == DeviceType::cuda ? "cuda" : "cpu"); }
}  // namespace tessera

namespace tessera::cpu::matrix {
inline void PrintTo(Unit unit, std::ostream* out) { *out << (unit == Unit::none ? "no matrix unit" : name_of(unit)); }
}  // namespace tessera::cpu::matrix

namespace tessera::check {
inline void PrintTo(Feature feature, std::ostream* out) { *out << name_of(feature); }
/// The Problem and all else that makes the case, in one line.
inline void PrintTo(const Case& which, std::ostream* out) {
    *out << "case " << which.id << " of seed " << which.seed << ": " << which.describe();
}
}  // namespace tessera::check
