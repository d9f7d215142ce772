// SPDX-License-Identifier: Apache-2.0
//
// Adds the parts of C++20's library that Debian's emscripten (3.1.6) lacks. It is included before every file of the
// page's core, and compiles nothing if the library has them.
#pragma once

#include <bit>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string>
#include <version>

namespace std {

#ifndef __cpp_lib_bit_cast
template <class To, class From>
constexpr To bit_cast(const From& from) noexcept {
    static_assert(sizeof(To) == sizeof(From));
    return __builtin_bit_cast(To, from);
}
#endif

#ifndef __cpp_lib_to_chars
/// Parses by strtod(), which rounds correctly in this C library. It first rejects blanks, plus signs and hexadecimal
/// digits, which strtod() accepts and from_chars() does not.
inline from_chars_result from_chars(const char* first, const char* last, double& value) {
    const char* digits = first != last && *first == '-' ? first + 1 : first;
    const bool begins =
        digits != last && *digits != '+' && *digits != '-' && !isspace(static_cast<unsigned char>(*digits));
    const bool hexadecimal = last - digits > 1 && digits[0] == '0' && (digits[1] | 0x20) == 'x';
    if (!begins) return {first, errc::invalid_argument};
    const string text(first, hexadecimal ? digits + 1 : last);
    char* end = nullptr;
    const double read = strtod(text.c_str(), &end);
    if (end == text.c_str()) return {first, errc::invalid_argument};
    value = read;
    return {first + (end - text.c_str()), errc{}};
}
#endif

}  // namespace std
