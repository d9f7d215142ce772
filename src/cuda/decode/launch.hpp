// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/decode/host/config.h"
#include "cuda/tile/params.hpp"

namespace tessera::cuda::decode {

/// Arguments of both kernels. A row is a query of a query head: number (batch * len_q + query) * heads_q + head.
struct Launch {
    ForwardParams params;
    float* o = nullptr;    ///< [rows, max_splits, head_dim]: sums of P V of a split
    float2* ml = nullptr;  ///< [rows, max_splits]: its largest score and its sum of P
    int max_splits = 0;
    int head_tiles = 1;  ///< CTAs that share the query heads of a group
    bool vector_q = false;
    bool vector_k = false;
    bool vector_v = false;
    bool overlaps = false;  ///< the second kernel may start beside the first (compute capability 9.0)

    TESSERA_HOST_DEVICE std::int64_t row(std::int64_t batch, int query, int head) const {
        return (batch * params.len_q + query) * params.heads_q + head;
    }
    TESSERA_HOST_DEVICE std::int64_t rows() const { return row(params.batch, 0, 0); }
    /// The place of a row's split in `ml`.
    TESSERA_HOST_DEVICE std::int64_t partial(std::int64_t row, int split) const { return row * max_splits + split; }
};

/// Starts a CTA for every split, then one for every row to combine them. instances/ has one instance of each shape and
/// dtype.
template <class T, class Shape>
cudaError_t start_decode(const Launch& launch, cudaStream_t stream);

}  // namespace tessera::cuda::decode
