// SPDX-License-Identifier: Apache-2.0
//
// Conversions between a field of a C struct and the member of the C++ struct, for each kind of field that
// core/problem_fields.hpp and core/decode_block_fields.hpp name.
#pragma once

#include <cstdint>
#include <optional>

#include "c_api.hpp"

namespace tessera {

/// `first` is the C constant of the first enumerator; `what` says which field of `name` it is.
template <class Enum>
Enum enum_value(const char* name, std::int32_t value, Enum last, int first = 0, const char* what = "") {
    const int highest = static_cast<int>(last) + first;
    if (value < first || value > highest)
        invalid(name, fmt::format("expected {}{}..{}, got {}", what, first, highest, value));
    return static_cast<Enum>(value - first);
}

inline DType read_dtype(const char* name, std::int32_t value) { return enum_value(name, value, DType::int8); }
inline Causal read_causal(const char* name, std::int32_t value) { return enum_value(name, value, Causal::top_left); }
inline bool read_flag(const char* name, std::int32_t value) {
    if (value != 0 && value != 1) invalid(name, fmt::format("expected 0 or 1, got {}", value));
    return value == 1;
}
inline std::int64_t read_size(const char*, std::int64_t value) { return value; }
inline double read_number(const char*, double value) { return value; }
inline std::uint64_t read_seed(const char*, std::uint64_t value) { return value; }
inline std::optional<double> read_scale(const char*, double value) {
    return value == TESSERA_DEFAULT_SCALE ? std::nullopt : std::optional(value);
}

inline std::int32_t write_dtype(DType value) { return static_cast<std::int32_t>(value); }
inline std::int32_t write_causal(Causal value) { return static_cast<std::int32_t>(value); }
inline std::int32_t write_flag(bool value) { return value ? 1 : 0; }
inline std::int64_t write_size(std::int64_t value) { return value; }
inline double write_number(double value) { return value; }
inline std::uint64_t write_seed(std::uint64_t value) { return value; }
inline double write_scale(const std::optional<double>& value) { return value.value_or(TESSERA_DEFAULT_SCALE); }

}  // namespace tessera
