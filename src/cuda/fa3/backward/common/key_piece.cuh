// SPDX-License-Identifier: Apache-2.0
//
// The work of a CTA or a warp that goes through keys 64 at a time.
#pragma once

#include "cuda/backward/ragged_keys.cuh"
#include "cuda/fa3/backward/launch.hpp"

namespace tessera::cuda::fa3::backward {

inline constexpr int kPieceKeys = 64;

/// 64 keys of a kv head of a sequence.
struct KeyPiece {
    int batch, kv_head;
    int first;  ///< the first key, in the sequence; ragged: may be past its end
};

/// Pieces of all heads.
template <Config kConfig>
__host__ __device__ __forceinline__ std::int64_t key_piece_count(const Launch& launch) {
    const ForwardParams& p = launch.params.forward;
    const std::int64_t of_head = p.cu_seqlens_kv != nullptr
                                     ? std::int64_t{launch.blocks_kv} * (kConfig.block_kv / kPieceKeys)
                                     : std::int64_t{p.batch} * ((p.len_kv + kPieceKeys - 1) / kPieceKeys);
    return p.heads_kv * of_head;
}

/// The piece of a number in [0, key_piece_count()): head by head in each sequence; ragged: the key blocks of all
/// sequences of a head (first_block_kv) after those of another.
template <Config kConfig>
__device__ __forceinline__ KeyPiece key_piece_at(const Launch& launch, int number) {
    const ForwardParams& p = launch.params.forward;
    if (p.cu_seqlens_kv != nullptr) {
        constexpr int kPieces = kConfig.block_kv / kPieceKeys;
        const int block = number / kPieces;
        const int kv_head = block / launch.blocks_kv;
        const cuda::QueryTile of = ragged_key_tile(p, block - kv_head * launch.blocks_kv, kConfig.block_kv);
        return {of.batch, kv_head, of.block * kConfig.block_kv + number % kPieces * kPieceKeys};
    }
    const int count = (p.len_kv + kPieceKeys - 1) / kPieceKeys;
    const int head = number / count;
    const int batch = head / p.heads_kv;
    return {batch, head - batch * p.heads_kv, (number - head * count) * kPieceKeys};
}

}  // namespace tessera::cuda::fa3::backward
