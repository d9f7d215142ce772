// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/fa3/host/forward_config.h"
#include "cuda/fa3/host/pack_gqa.hpp"
#include "cuda/fa3/host/softcap.hpp"
#include "cuda/fa3/host/tile_order.hpp"
#include "cuda/host/work_list.hpp"
#include "cuda/tile/cache.hpp"
#include "cuda/tile/params.hpp"

namespace tessera::cuda::fa3 {

/// State of the dynamic tile scheduler, in the workspace.
struct TileQueue {
    unsigned taken;  ///< tiles that were handed out, besides the first one of each thread block (FlashAttention-3's
                     ///< tile_count_semaphore)
    int items;       ///< with a list: its length
};

/// The kernel's argument.
struct Launch {
    ForwardParams params;
    CUtensorMap q, k, v, o;  ///< q and o: tensor_map_of_heads
    float scale_log2;        ///< from Q K^T to log2 units; with ALiBi and in general shapes, from scores to log2 units
    float unscale;           ///< 1 / scale_log2
    Softcap softcap;         ///< in the capped shapes
    bool store_by_tma;       ///< O has a tensor map
    PackGqa pack;            ///< query heads in a tile
    TileOrder order;         ///< tiles in launch order; those of all sequences of a varlen call
    Divider packed_heads;    ///< heads of a sequence, as `order` counts them: divided by those in a tile
    Divider group;           ///< query heads per K/V head
    int low, high;           ///< the mask's band, in a dense call
    Rows o_residual;         ///< low-order bits that rounding takes off O, one byte an element; null: not wanted
    bool residual_by_vectors;  ///< 8 bytes at a time
    TileQueue* queue;          ///< of the dynamic tile scheduler (start_queue); null: static
    ListedSequence* list;      ///< the tiles of a head in a ragged call, [order.q_blocks()]; null: found by a search
    Divider tile_queries;      ///< queries of a tile
    Cache cache;               ///< in the cached shapes: where K and V are
    bool bias_by_pairs;        ///< takes_bias_pairs
    int page_rows;             ///< with pages: rows of a TMA box, which divide a page and a block of keys
};

/// Sets up the queue, and makes the list if there is one, in a kernel beside which the forward may start: a memset in
/// front of it costs 5 to 8 microseconds (H200).
cudaError_t start_queue(const Launch& launch, cudaStream_t stream);

/// Starts the kernel with `blocks` thread blocks. One instance each in instances/.
template <class T, class Shape>
cudaError_t start_forward(const Launch& launch, int blocks, cudaStream_t stream);

}  // namespace tessera::cuda::fa3
