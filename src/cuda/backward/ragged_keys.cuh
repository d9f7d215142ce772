// SPDX-License-Identifier: Apache-2.0
//
// The keys of a varlen call, cut into tiles that are numbered over all sequences (cuda/host/query_tiles.hpp).
#pragma once

#include "cuda/tile/sequence.cuh"

namespace tessera::cuda {

/// The tile of keys at `index` of a head of all sequences.
__device__ __forceinline__ QueryTile ragged_key_tile(const ForwardParams& p, int index, int block_kv) {
    return ragged_tile(static_cast<int>(p.batch), index, block_kv, [&](int sequence) {
        return cu_seqlens_at(p.cu_seqlens_kv, sequence * p.cu_stride_kv, p.cu_kv_is_64, p.total_kv);
    });
}

}  // namespace tessera::cuda
