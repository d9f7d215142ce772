// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "emu.hpp"
namespace tessera::cuda::ptx {
inline int load_acquire(const int* p) { return *p; }
inline void store_release(int* p, int x) { *p = x; }
inline void reduce_add(float* to, const float (&x)[4]) {
    for (int i = 0; i < 4; ++i) to[i] += x[i];
}
}  // namespace tessera::cuda::ptx
