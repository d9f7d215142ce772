// SPDX-License-Identifier: Apache-2.0
//
// The tables that the units' files define, for packed.cc. x86-64 only.
#pragma once

#include "cpu/tile/packed.hpp"

namespace tessera::cpu::tile {

extern const PackedWords kDotWords;
extern const PackedWords kAmxWords;

}  // namespace tessera::cpu::tile
