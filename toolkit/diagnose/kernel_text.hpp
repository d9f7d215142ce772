// SPDX-License-Identifier: Apache-2.0
//
// A kernel's name as tools write it, brought to one spelling, and what the readers of names look it up with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::diagnose {

/// Longer names are cut: no kernel needs more, and a trace may hold anything.
inline constexpr std::size_t kLongestName = 16384;

/// One spelling for all tools: demangled, also where the mangled name is cut off; without "void", casts, spaces that
/// carry nothing and "(anonymous namespace)::"; `(bool)1` is `true`, `8u` is `8`.
///
///     "void f<(int)128, (bool)1>(T1)" -> "f<128,true>(T1)"
std::string normalised(std::string_view name);

/// The name ends before its brackets close, or in dots: a tool cut it.
bool looks_cut(std::string_view normalised_name);

/// The last word of a name that is cut off is a beginning of `word`: "...::FlashAttnFwdCombi..." of
/// FlashAttnFwdCombine. No shorter beginning than `least` counts, which others share.
bool cut_inside(std::string_view normalised_name, std::string_view word, std::size_t least);

/// The arguments of the template `name` in `text`, split at the commas of its own level: those of "f" in
/// "g<f<1,h<2,3>>>" are "1" and "h<2,3>". Of a name that is cut, as many as stand before their comma. None when there
/// is no such template.
std::optional<std::vector<std::string>> template_arguments(std::string_view text, std::string_view name);

/// A whole number without a sign, that fits; none otherwise.
std::optional<int> number(std::string_view text);

/// The number after the first `prefix` in `text` that is followed by one: 90 in "..._sm90_x" for "_sm".
std::optional<int> number_after(std::string_view text, std::string_view prefix);

/// "64x128" after `prefix`, as two numbers.
struct Pair {
    int first = 0;
    int second = 0;
};
std::optional<Pair> pair_after(std::string_view text, std::string_view prefix);

/// "true", "false"; Nsight Compute writes "1" and "0". None for anything else.
std::optional<bool> boolean(std::string_view argument);

/// The bools among `arguments`, from `first` on; other arguments are left out.
std::vector<bool> bools_from(const std::vector<std::string>& arguments, std::size_t first);

bool contains(std::string_view text, std::string_view part);
/// Any of them.
bool contains_any(std::string_view text, std::initializer_list<std::string_view> parts);
/// Any of them where an identifier begins: "f_kernel" in "a::f_kernel<1>", not in "my_f_kernel", which is another's.
bool begins_any(std::string_view text, std::initializer_list<std::string_view> parts);
std::string lower_case(std::string_view text);

}  // namespace tessera::diagnose
