// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/decode/host/config.h"
#include "cuda/host/divider.hpp"
#include "cuda/tile/cache.hpp"
#include "cuda/tile/params.hpp"

namespace tessera::cuda::decode {

/// K or V.
struct Loaded {
    Rows rows;
    int dim;
    bool vector;  ///< read 16 bytes at a time
};

/// Arguments of both kernels. A row of the results is a query of a query head. Queries count over all sequences; a
/// launch has the queries first_query ... end_query - 1.
struct Launch {
    ForwardParams params;
    Cache cache;
    float* o = nullptr;    ///< [rows, max_splits, head_dim]: sums of P V of a split
    float2* ml = nullptr;  ///< [rows, max_splits]: its largest score and its sum of P
    int max_splits = 0;
    std::int64_t first_query = 0;
    std::int64_t end_query = 0;
    Divider groups;                    ///< of up to kMostSequences sequences, which CTAs take in turn
    Divider items_per_sequence;        ///< splits of a sequence, unless they have own_lengths()
    Items items{{}, {0, 0}, 0, 1, 1};  ///< of a kv head of every sequence, unless they have own_lengths()
    Divider group;                     ///< query heads per kv head
    Divider heads_kv;
    int left = 0;  ///< the window of the mask, at most 2^30; causal bottom-right is a window without a right side
    int right = 0;
    bool top_left = false;  ///< causal from the first query and key on
    bool vector_q = false;
    Loaded loaded[2];        ///< K and V, by the number of the producer warp
    bool read_once = false;  ///< one tile of rows reads each key: it need not stay in the L2
    bool natural = false;    ///< scores are scaled before the softmax: they have a softcap or ALiBi
    bool overlaps = false;   ///< the second kernel may start beside the first (compute capability 9.0)

    /// Have sequences lengths that the host does not know?
    TESSERA_HOST_DEVICE bool own_lengths() const { return cache.lengths != nullptr || params.cu_seqlens_q != nullptr; }
    /// The index of a row's split in `ml`.
    TESSERA_HOST_DEVICE std::int64_t partial(std::int64_t query, int head, int split) const {
        return ((query - first_query) * params.heads_q + head) * max_splits + split;
    }
};

/// Starts `blocks` CTAs for the splits, and others that combine them. instances/ has one instance of each shape and
/// dtype.
template <class T, class Shape>
cudaError_t start_decode(const Launch& launch, std::int64_t blocks, cudaStream_t stream);

}  // namespace tessera::cuda::decode
