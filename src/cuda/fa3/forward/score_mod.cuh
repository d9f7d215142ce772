// SPDX-License-Identifier: Apache-2.0
//
// What happens to scores and weights besides scale, mask and softmax: softcap, ALiBi, dropout. Nothing in the plain
// shapes.
#pragma once

#include "cuda/fa3/forward/kept_weights.cuh"
#include "cuda/fa3/forward/softmax.cuh"
#include "cuda/fa3/forward/tile_scheduler.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/softcap.cuh"

namespace tessera::cuda::fa3 {

template <class T, int kBlockKv, Scores kScores>
struct Extras {
    __device__ __forceinline__ Extras(const Launch&, const WorkTile&, int, int) {}
    template <int kCount>
    __device__ __forceinline__ void transform(float (&)[kCount], int) const {}
    __device__ __forceinline__ void draw(int) const {}
    __device__ __forceinline__ std::uint32_t drop(std::uint32_t weights, int) const { return weights; }
};

/// Softcap. Near 0, where scores that are small beside the cap lie, a polynomial: seven operations, none of them on the
/// nonfinite-function unit, which the exponentials keep busy. Where one of a few scores is not there, both ways are
/// worked out for all of them. A score becomes the same whatever its neighbours are.
template <class T, int kBlockKv>
struct Extras<T, kBlockKv, Scores::capped> {
    const Cap& cap;

    __device__ __forceinline__ Extras(const Launch& launch, const WorkTile&, int, int) : cap(launch.cap) {}

    template <int kCount>
    __device__ __forceinline__ void transform(float (&scores)[kCount], int) const {
#pragma unroll
        for (int first = 0; first < kCount; first += kTogether) {
            float largest = 0;
#pragma unroll
            for (int i = first; i < first + kTogether; ++i) largest = fmaxf(largest, fabsf(scores[i]));
            if (__any_sync(kAllLanes, largest >= cap.near)) {
#pragma unroll
                for (int i = first; i < first + kTogether; ++i) {
                    const float of_near = near(scores[i]);
                    const float of_far = far(scores[i]);
                    scores[i] = fabsf(scores[i]) < cap.near ? of_near : of_far;
                }
            } else {
#pragma unroll
                for (int i = first; i < first + kTogether; ++i) scores[i] = near(scores[i]);
            }
        }
    }
    __device__ __forceinline__ void draw(int) const {}
    __device__ __forceinline__ std::uint32_t drop(std::uint32_t weights, int) const { return weights; }

 private:
    /// Scores of a thread. Not all, or ptxas would begin so many at once that registers are spilled.
    static constexpr int kTogether = 32;

    __device__ __forceinline__ float near(float x) const {
        const float u = __fmul_rn(x, x);
        return __fmul_rn(x, fmaf(tanh_near(u, cap.coefficients), u, 1.0F));
    }
    __device__ __forceinline__ float far(float x) const {
        const float e = ptx::exp2_approx(__fmul_rn(x, cap.exponent));
        return fmaf(ptx::reciprocal_approx(e + 1.0F), -cap.swing, cap.most);
    }
};

/// ALiBi: the score of a pair becomes scale * score - slope * |distance|.
template <class T, int kBlockKv>
struct Extras<T, kBlockKv, Scores::alibi> {
    float scale;
    float slope;
    int apart;  ///< from key 0 to the thread's first query and column, counted along the diagonal

    __device__ __forceinline__ Extras(const Launch& launch, const WorkTile& tile, int row, int lane)
        : scale(launch.params.scale), slope(ScoreInputs(launch.params, tile.batch, tile.head).slope) {
        const Sequence sequence = sequence_of(launch.params, tile.batch);
        apart = tile.q_begin + row + sequence.len_kv - sequence.len_q - 2 * (lane % 4);
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
    __device__ __forceinline__ void draw(int) const {}
    __device__ __forceinline__ std::uint32_t drop(std::uint32_t weights, int) const { return weights; }
};

/// Dropout: the mask of a block of keys is drawn under the products of the block.
template <class T, int kBlockKv>
struct Extras<T, kBlockKv, Scores::dropout> {
    const Launch& launch;
    const WorkTile& tile;
    KeptWeights<kBlockKv> kept;
    int row;  ///< the thread's first one, in the tile

    __device__ __forceinline__ Extras(const Launch& launch, const WorkTile& tile, int own_row, int)
        : launch(launch), tile(tile), row(own_row) {}

    template <int kCount>
    __device__ __forceinline__ void transform(float (&)[kCount], int) const {}
    __device__ __forceinline__ void draw(int first_key) {
        const int lane = static_cast<int>(threadIdx.x) % 32;  // made anew, so that no register is kept for it
        kept = draw_kept<kBlockKv>(launch, tile, tile.q_begin + row, first_key, lane);
    }
    __device__ __forceinline__ std::uint32_t drop(std::uint32_t weights, int i) const {
        return drop_weights(kept, weights, i);
    }
};

template <class T, int kBlockKv>
struct Extras<T, kBlockKv, Scores::general> {
    const Launch& launch;
    const WorkTile& tile;
    HeadScores<T> head;
    KeptWeights<kBlockKv> kept;
    int query;  ///< of the thread's first row
    int lane;

    __device__ __forceinline__ Extras(const Launch& launch, const WorkTile& tile, int row, int own_lane)
        : launch(launch),
          tile(tile),
          head(launch.params, sequence_of(launch.params, tile.batch), tile.batch, tile.head, inputs_of(launch, tile)),
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

    __device__ __forceinline__ void draw(int first_key) {
        kept = {};
        if (head.drops()) kept = draw_kept<kBlockKv>(launch, tile, query, first_key, lane);
    }
    __device__ __forceinline__ std::uint32_t drop(std::uint32_t weights, int i) const {
        return drop_weights(kept, weights, i);
    }
};

}  // namespace tessera::cuda::fa3
