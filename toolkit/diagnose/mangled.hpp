// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::diagnose {

/// Reads a name mangled by the Itanium C++ ABI, even if it is cut off and no demangler takes it. It returns nested
/// names and the template arguments that are numbers or bools. Built-in types and back references are left out, so
/// arguments may be missing.
///
///     "_ZN13pytorch_flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsILi128ELb1" ->
///     "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128,true"
std::string read_mangled(std::string_view mangled);

/// Estimates how many characters a demangler would write. Back references can double the length every few characters,
/// so that demangling a name of 500 bytes can fill the memory.
double demangled_size(std::string_view mangled);

/// The lengths of all prefixes of the name that end after a whole piece: a word, a literal, a bracket.
std::vector<std::size_t> mangled_ends(std::string_view mangled);

}  // namespace tessera::diagnose
