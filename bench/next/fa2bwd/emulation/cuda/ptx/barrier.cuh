// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "cuda/ptx/address.cuh"
namespace tessera::cuda::ptx {
inline void named_barrier_sync(int id, int n) { emu::barrier(id, n, 0, true); }
inline void named_barrier_arrive(int id, int n) { emu::barrier(id, n, 0, false); }
}  // namespace tessera::cuda::ptx
