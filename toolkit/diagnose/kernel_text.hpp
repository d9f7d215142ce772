// SPDX-License-Identifier: Apache-2.0
//
// Brings a kernel's name to one spelling, whichever tool wrote it, and searches it for the readers of names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::diagnose {

/// Longer names are cut at this length. No kernel needs more, and a trace may hold any text.
inline constexpr std::size_t kLongestName = 16384;

/// Brings a name to one spelling. It demangles, also if the mangled name is cut off. It drops "void", casts, needless
/// spaces and "(anonymous namespace)::"; `(bool)1` becomes `true`, `8u` becomes `8`.
///
///     "void f<(int)128, (bool)1>(T1)" -> "f<128,true>(T1)"
std::string normalised(std::string_view name);

/// True if a tool cut the name: it ends in dots or before its brackets close.
bool looks_cut(std::string_view normalised_name);

/// True if a name that is cut off ends in a beginning of `word`, as "...::FlashAttnFwdCombi..." does for
/// FlashAttnFwdCombine. Beginnings shorter than `least` do not count, because other words share them.
bool cut_inside(std::string_view normalised_name, std::string_view word, std::size_t least);

/// The arguments of the template `name` in `text`, split at its own commas: for "f" in "g<f<1,h<2,3>>>" they are "1"
/// and "h<2,3>". In a cut name, only arguments that end in a comma are returned. None if there is no such template.
std::optional<std::vector<std::string>> template_arguments(std::string_view text, std::string_view name);

/// Parses an unsigned integer; none if the text is another or the number does not fit.
std::optional<int> number(std::string_view text);

/// The number after the first `prefix` in `text` that a number follows: 90 in "..._sm90_x" for "_sm".
std::optional<int> number_after(std::string_view text, std::string_view prefix);

/// "64x128" after `prefix`, as two numbers.
struct Pair {
    int first = 0;
    int second = 0;
};
std::optional<Pair> pair_after(std::string_view text, std::string_view prefix);

/// Parses "true" or "false", which Nsight Compute writes as "1" and "0"; none for anything else.
std::optional<bool> boolean(std::string_view argument);

/// The bools among `arguments`, from index `first`; other arguments are left out.
std::vector<bool> bools_from(const std::vector<std::string>& arguments, std::size_t first);

bool contains(std::string_view text, std::string_view part);
/// True if the text contains one of the pieces.
bool contains_any(std::string_view text, std::initializer_list<std::string_view> parts);
/// True if one of the pieces begins an identifier: "f_kernel" does in "a::f_kernel<1>", but not in "my_f_kernel".
bool begins_any(std::string_view text, std::initializer_list<std::string_view> parts);
std::string lower_case(std::string_view text);

}  // namespace tessera::diagnose
