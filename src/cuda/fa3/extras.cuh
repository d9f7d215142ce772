// SPDX-License-Identifier: Apache-2.0
//
// What happens to scores and weights besides scale, mask and softmax: softcap, ALiBi, dropout. Nothing in the plain
// shapes.
#pragma once

#include "cuda/fa3/work.cuh"
#include "cuda/tile/member.cuh"
#include "cuda/tile/score.cuh"

namespace tessera::cuda::fa3 {

template <class T, bool kGeneral>
struct Extras {
    __device__ __forceinline__ Extras(const ForwardParams&, const Tile&, int, int) {}
    template <int kCount>
    __device__ __forceinline__ void transform(float (&)[kCount], int) const {}
    template <int kBegin, int kChunk, int kCount>
    __device__ __forceinline__ void drop(float (&)[kCount], int) const {}
};

template <class T>
struct Extras<T, true> {
    HeadScores<T> head;
    int query;  ///< of the thread's first row
    int lane;

    __device__ __forceinline__ Extras(const ForwardParams& p, const Tile& tile, int row, int own_lane)
        : head(p, member_of(p, tile.batch), tile.batch, tile.head), query(tile.q_begin + row), lane(own_lane) {}

    /// Products of Q and K, [2 rows][kCount / 2 columns] from `first_key` on, become scores in units of the natural
    /// logarithm.
    template <int kCount>
    __device__ __forceinline__ void transform(float (&scores)[kCount], int first_key) const {
        auto& fragments = reinterpret_cast<float(&)[kCount / 4][4]>(scores);
        head.template transform<false>(fragments, Visible(Band{}), query, first_key + lane % 4 * 2);
    }

    /// Dropped ones of the weights [kBegin, kBegin + kChunk) become 0.
    template <int kBegin, int kChunk, int kCount>
    __device__ __forceinline__ void drop(float (&weights)[kCount], int first_key) const {
        if (!head.drops()) return;
        auto& fragments = reinterpret_cast<float(&)[kChunk / 4][4]>(weights[kBegin]);
        head.drop(fragments, query, first_key + 2 * kBegin + lane % 4 * 2, lane);
    }
};

}  // namespace tessera::cuda::fa3
