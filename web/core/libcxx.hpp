// SPDX-License-Identifier: Apache-2.0
//
// What Debian's emscripten (3.1.6) lacks of C++20's library, put before every file of the page's core. Nothing here is
// compiled where the library has it.
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
/// By strtod(), which rounds correctly in this C library; blanks, signs of plus and hexadecimal digits, which that
/// takes and from_chars() does not, are refused first.
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
