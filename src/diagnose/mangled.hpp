// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace tessera::diagnose {

/// What a name that is mangled by the Itanium C++ ABI says, also when it is cut off and no demangler takes it: names in
/// their nesting, template arguments that are numbers or bools. Types that are built in and references back are left
/// out, so arguments may be missing between those that are told.
///
///     "_ZN13pytorch_flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsILi128ELb1" ->
///     "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128,true"
std::string read_mangled(std::string_view mangled);

}  // namespace tessera::diagnose
