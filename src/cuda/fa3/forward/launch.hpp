// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/fa3/host/forward_config.h"
#include "cuda/fa3/host/pack_gqa.hpp"
#include "cuda/fa3/host/softcap.hpp"
#include "cuda/fa3/host/tile_order.hpp"
#include "cuda/tile/params.hpp"

namespace tessera::cuda::fa3 {

/// What the kernel is launched with.
struct Launch {
    ForwardParams params;
    CUtensorMap q, k, v, o;  ///< q and o: of heads (tensor_map_of_heads)
    float scale_log2;   ///< of Q K^T to scores in units of log2; with ALiBi and in general shapes, of scores to that
    float unscale;      ///< 1 / scale_log2
    Cap cap;            ///< in shapes with a softcap
    bool store_by_tma;  ///< O has a tensor map
    HeadStack stack;    ///< of a tile
    TileOrder order;    ///< of tiles; of a ragged call, of those of all sequences
    Divider stacks, group;     ///< stacks of heads of a sequence; query heads of a head of K and V
    int low, high;             ///< of a dense call: the band of its mask
    Rows o_residual;           ///< what rounding took off O, a byte an element; null: not wanted
    bool residual_by_vectors;  ///< 8 bytes at a time
    unsigned* next_tile;       ///< counter, set to 0 by start_reset: whoever is free takes the next; null: in turn
};

/// Sets the counter of tiles to 0, in a kernel beside which the forward may start: a memset in front of it costs 5 to 8
/// microseconds.
cudaError_t start_reset(unsigned* next_tile, cudaStream_t stream);

/// Starts the kernel on `blocks` multiprocessors. One instance each in instances/.
template <class T, class Shape>
cudaError_t start_forward(const Launch& launch, int blocks, cudaStream_t stream);

}  // namespace tessera::cuda::fa3
