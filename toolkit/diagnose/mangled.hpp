// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::diagnose {

/// What a name that is mangled by the Itanium C++ ABI says, also when it is cut off and no demangler takes it: names in
/// their nesting, template arguments that are numbers or bools. Types that are built in and references back are left
/// out, so arguments may be missing between those that are told.
///
///     "_ZN13pytorch_flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsILi128ELb1" ->
///     "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128,true"
std::string read_mangled(std::string_view mangled);

/// About how many characters a demangler would write. References back can double a name with every few characters, so
/// that one of 500 bytes fills a memory: ask before.
double demangled_size(std::string_view mangled);

/// The lengths of the beginnings of the name that end behind a whole piece of it: a word, a literal, a bracket.
std::vector<std::size_t> mangled_ends(std::string_view mangled);

}  // namespace tessera::diagnose
