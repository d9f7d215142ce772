// SPDX-License-Identifier: Apache-2.0
#pragma once

// Unrolls a loop completely, which keeps accumulators in registers. GCC 12 unrolls only the inner loop by itself and
// would copy the accumulators to the stack around it. A build with sanitizers defines it as nothing for one file
// (src/CMakeLists.txt).
#if defined(TESSERA_UNROLL)
#elif defined(__clang__)
#define TESSERA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TESSERA_UNROLL _Pragma("GCC unroll 16")
#endif
