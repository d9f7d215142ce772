// SPDX-License-Identifier: Apache-2.0
//
// What happens to scores and weights besides scale, mask and softmax: softcap, ALiBi, dropout. Nothing in the plain
// shapes.
#pragma once

#include "cuda/fa3/softmax.cuh"
#include "cuda/fa3/tile_scheduler.cuh"
#include "cuda/tile/member.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/softcap.cuh"

namespace tessera::cuda::fa3 {

template <class T, Scores kScores>
struct Extras {
    __device__ __forceinline__ Extras(const Launch&, const WorkTile&, int, int) {}
    template <int kCount>
    __device__ __forceinline__ void transform(float (&)[kCount], int) const {}
    template <int kBegin, int kChunk, int kCount>
    __device__ __forceinline__ void drop(float (&)[kCount], int) const {}
};

/// Softcap. Near 0, where scores that are small beside the cap lie, a polynomial: seven operations, none of them on the
/// special-function unit, which the exponentials keep busy. A score becomes the same whatever its neighbours are.
template <class T>
struct Extras<T, Scores::capped> {
    const Cap& cap;

    __device__ __forceinline__ Extras(const Launch& launch, const WorkTile&, int, int) : cap(launch.cap) {}

    template <int kCount>
    __device__ __forceinline__ void transform(float (&scores)[kCount], int) const {
        constexpr int kChains = 4;
        float largest[kChains] = {};
#pragma unroll
        for (int i = 0; i < kCount; ++i) largest[i % kChains] = fmaxf(largest[i % kChains], fabsf(scores[i]));
        const float most = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
        if (__any_sync(kAllLanes, most >= cap.near)) {
#pragma unroll
            for (float& score : scores) score = fabsf(score) < cap.near ? near(score) : far(score);
        } else {
#pragma unroll
            for (float& score : scores) score = near(score);
        }
    }
    template <int kBegin, int kChunk, int kCount>
    __device__ __forceinline__ void drop(float (&)[kCount], int) const {}

 private:
    __device__ __forceinline__ float near(float x) const {
        const float u = __fmul_rn(x, x);
        return __fmul_rn(x, fmaf(tanh_near(u, cap.coefficients), u, 1.0F));
    }
    __device__ __forceinline__ float far(float x) const {
        return copysignf(__fmul_rn(tanh_far(__fmul_rn(fabsf(x), cap.exponent)), cap.most), x);
    }
};

/// ALiBi: the score of a pair becomes scale * score - slope * |distance|.
template <class T>
struct Extras<T, Scores::alibi> {
    float scale;
    float slope;
    int apart;  ///< from key 0 to the thread's first query and column, counted along the diagonal

    __device__ __forceinline__ Extras(const Launch& launch, const WorkTile& tile, int row, int lane)
        : scale(launch.params.scale), slope(ScoreInputs(launch.params, tile.batch, tile.head).slope) {
        const Member member = member_of(launch.params, tile.batch);
        apart = tile.q_begin + row + member.len_kv - member.len_q - 2 * (lane % 4);
    }

    template <int kCount>
    __device__ __forceinline__ void transform(float (&scores)[kCount], int first_key) const {
        const float first[2] = {static_cast<float>(apart - first_key), static_cast<float>(apart + 8 - first_key)};
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float distance = fabsf(first[row_of(i)] - static_cast<float>(column_of(i)));  // exact up to 2^24
            scores[i] = fmaf(-slope, distance, __fmul_rn(scores[i], scale));
        }
    }
    template <int kBegin, int kChunk, int kCount>
    __device__ __forceinline__ void drop(float (&)[kCount], int) const {}
};

template <class T>
struct Extras<T, Scores::general> {
    HeadScores<T> head;
    int query;  ///< of the thread's first row
    int lane;

    __device__ __forceinline__ Extras(const Launch& launch, const WorkTile& tile, int row, int own_lane)
        : head(launch.params, member_of(launch.params, tile.batch), tile.batch, tile.head, inputs_of(launch, tile)),
          query(tile.q_begin + row),
          lane(own_lane) {}

    /// Without a bias, which this kernel refuses: no code for it.
    __device__ __forceinline__ static ScoreInputs inputs_of(const Launch& launch, const WorkTile& tile) {
        ScoreInputs inputs(launch.params, tile.batch, tile.head);
        inputs.bias = nullptr;
        return inputs;
    }

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
