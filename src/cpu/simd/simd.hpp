// SPDX-License-Identifier: Apache-2.0
#pragma once

// Accumulators stay in registers only when the loops over them are unrolled completely; GCC 12 does that for the inner
// loop by itself, but copies the accumulators to the stack around it unless it is told to.
#if defined(__clang__)
#define TESSERA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TESSERA_UNROLL _Pragma("GCC unroll 16")
#endif
