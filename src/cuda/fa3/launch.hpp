// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/fa3/cap.hpp"
#include "cuda/fa3/config.h"
#include "cuda/tile/params.hpp"

namespace tessera::cuda::fa3 {

/// What the kernel is launched with.
struct Launch {
    ForwardParams params;
    CUtensorMap q, k, v, o;
    float scale_log2;           ///< of Q K^T to scores in units of log2; in general shapes, of scores to that
    float unscale;              ///< 1 / scale_log2
    Cap cap;                    ///< in shapes with a softcap
    bool store_by_copy_engine;  ///< O has a tensor map
    int q_blocks;               ///< tiles of queries of one head; ragged: of all members
    int heads_together;         ///< (batch, head) pairs, ragged: heads, whose tiles are mixed: their K and V stay in L2
    int tiles;                  ///< over all batch members and heads
    Rows o_rest;                ///< what rounding took off O, a byte an element; null: not wanted
    bool rest_by_vectors;       ///< 8 bytes at a time
    unsigned* next_tile;        ///< counter, 0 before the launch: whoever is free takes the next; null: in turn
};

/// Starts the kernel on `blocks` multiprocessors. One instance each in instances/.
template <class T, class Shape>
cudaError_t start_forward(const Launch& launch, int blocks, cudaStream_t stream);

}  // namespace tessera::cuda::fa3
