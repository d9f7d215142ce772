// SPDX-License-Identifier: Apache-2.0
//
// ScoreMod: changes of scores and probabilities besides scale, mask and softmax (PyTorch's score_mod). There is one
// specialisation each for softcap, ALiBi, a bias, dropout and the general path, and an empty one for plain shapes. All
// have
//
//     transform(scores, first_key)    elements of Q K^T, [2 rows][kCount / 2 columns], before the softmax
//     draw(first_key)                 the dropout mask or the bias of a block, under a GEMM
//     drop(probabilities, i)          dropout on two 16-bit probabilities, elements i and i + 1
#pragma once

#include "cuda/fa3/forward/dropout.cuh"
#include "cuda/fa3/forward/softmax.cuh"
#include "cuda/fa3/forward/tile_scheduler.cuh"
#include "cuda/tile/head_bias.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/softcap.cuh"

namespace tessera::cuda::fa3 {

template <class T, int kBlockKv, Scores kScores>
struct ScoreMod {
    __device__ __forceinline__ ScoreMod(const Launch&, const WorkTile&, int, int) {}
    template <int kCount>
    __device__ __forceinline__ void transform(float (&)[kCount], int) const {}
    __device__ __forceinline__ void draw(int) const {}
    __device__ __forceinline__ std::uint32_t drop(std::uint32_t probabilities, int) const { return probabilities; }
};

/// Softcap. Scores that are small beside the cap take a polynomial of seven operations, none of them on the special
/// function unit, which the exponentials keep busy. If one of 32 scores is not small, both forms are computed for
/// all of them. A score's result does not depend on its neighbours.
template <class T, int kBlockKv>
struct ScoreMod<T, kBlockKv, Scores::capped> {
    const Softcap& softcap;

    __device__ __forceinline__ ScoreMod(const Launch& launch, const WorkTile&, int, int) : softcap(launch.softcap) {}

    template <int kCount>
    __device__ __forceinline__ void transform(float (&scores)[kCount], int) const {
#pragma unroll
        for (int first = 0; first < kCount; first += kTogether) {
            float largest = 0;
#pragma unroll
            for (int i = first; i < first + kTogether; ++i) largest = fmaxf(largest, fabsf(scores[i]));
            if (any_lane(largest >= softcap.near)) {
#pragma unroll
                for (int i = first; i < first + kTogether; ++i) {
                    const float of_near = near(scores[i]);
                    const float of_far = far(scores[i]);
                    scores[i] = fabsf(scores[i]) < softcap.near ? of_near : of_far;
                }
            } else {
#pragma unroll
                for (int i = first; i < first + kTogether; ++i) scores[i] = near(scores[i]);
            }
        }
    }
    __device__ __forceinline__ void draw(int) const {}
    __device__ __forceinline__ std::uint32_t drop(std::uint32_t probabilities, int) const { return probabilities; }

 private:
    /// Scores of a thread that are handled together. With all of them at once, ptxas spills registers.
    static constexpr int kTogether = 32;

    __device__ __forceinline__ float near(float x) const {
        const float u = __fmul_rn(x, x);
        return __fmul_rn(x, fmaf(tanh_near(u, softcap.coefficients), u, 1.0F));
    }
    __device__ __forceinline__ float far(float x) const {
        const float e = ptx::exp2_approx(__fmul_rn(x, softcap.exponent));
        return fmaf(ptx::reciprocal_approx(e + 1.0F), -softcap.twice_cap, softcap.cap);
    }
};

/// ALiBi: a score becomes scale * score - slope * |distance|.
template <class T, int kBlockKv>
struct ScoreMod<T, kBlockKv, Scores::alibi> {
    float scale;
    float slope;
    int diagonal;  ///< distance along the row from key 0 to the diagonal, for the thread's first row and column

    __device__ __forceinline__ ScoreMod(const Launch& launch, const WorkTile& tile, int row, int lane)
        : scale(launch.params.scale), slope(ScoreInputs(launch.params, tile.batch, tile.head).slope) {
        const Sequence sequence = sequence_of(launch.params, tile.batch);
        diagonal = tile.q_begin + row + sequence.len_kv - sequence.len_q - 2 * (lane % 4);
    }

    template <int kCount>
    __device__ __forceinline__ void transform(float (&scores)[kCount], int first_key) const {
        const float first[2] = {static_cast<float>(diagonal - first_key), static_cast<float>(diagonal + 8 - first_key)};
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float distance = fabsf(first[row_of(i)] - static_cast<float>(column_of(i)));  // exact up to 2^24
            scores[i] = fmaf(-slope, distance, __fmul_rn(scores[i], scale));
        }
    }
    __device__ __forceinline__ void draw(int) const {}
    __device__ __forceinline__ std::uint32_t drop(std::uint32_t probabilities, int) const { return probabilities; }
};

/// The bias of a block of keys in 16 bits, for a thread's two rows: pairs of neighbouring keys.
template <int kBlockKv>
using BiasPairs = std::uint32_t[2][kBlockKv / 8];

/// The addresses of the bias of a thread's two rows. Queries and keys past the end get the bias of others, since the
/// mask hides them.
struct BiasOfRows {
    const Launch& launch;
    const char* rows[2];  ///< at key 0
    int last_key;

    __device__ __forceinline__ BiasOfRows(const Launch& launch, const WorkTile& tile, int query)
        : launch(launch), last_key(tile.last_key) {
        for (int r = 0; r < 2; ++r) {
            rows[r] = bias_row(launch.params.bias, tile.batch, tile.head, min(query + 8 * r, tile.q_end - 1));
        }
    }
    template <int kCount>
    __device__ __forceinline__ void load(std::uint32_t (&pairs)[2][kCount], int first_key) const {
        const int key = first_key + static_cast<int>(threadIdx.x) % 4 * 2;
        if (launch.bias_by_pairs && first_key + 8 * kCount - 1 <= last_key) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const char* const row = rows[r] + 2 * std::int64_t{key};
#pragma unroll
                for (int j = 0; j < kCount; ++j) pairs[r][j] = bias_pair(row, 8 * j);
            }
        } else {
            const Bias& bias = launch.params.bias;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
#pragma unroll
                for (int j = 0; j < kCount; ++j) {
                    pairs[r][j] = bias_pair_of_elements(bias, rows[r], ptx::opaque(key) + 8 * j, last_key);
                }
            }
        }
    }
};

/// Scores become factor * score + bias.
template <class T, int kCount>
__device__ __forceinline__ void add_bias(float (&scores)[4 * kCount], const std::uint32_t (&pairs)[2][kCount],
                                         float factor) {
#pragma unroll
    for (int i = 0; i < 4 * kCount; i += 2) {
        const float2 bias = unpack_bias<T>(pairs[row_of(i)][i / 4]);
        scores[i] = fmaf(scores[i], factor, bias.x);
        scores[i + 1] = fmaf(scores[i + 1], factor, bias.y);
    }
}

/// An additive bias, which is loaded under the block's GEMMs.
template <class T, int kBlockKv>
struct ScoreMod<T, kBlockKv, Scores::bias> {
    BiasOfRows rows;
    BiasPairs<kBlockKv> pairs;

    __device__ __forceinline__ ScoreMod(const Launch& launch, const WorkTile& tile, int row, int)
        : rows(launch, tile, tile.q_begin + row) {}
    __device__ __forceinline__ void draw(int first_key) { rows.load(pairs, first_key); }
    template <int kCount>
    __device__ __forceinline__ void transform(float (&scores)[kCount], int) const {
        add_bias<T>(scores, pairs, rows.launch.params.scale);
    }
    __device__ __forceinline__ std::uint32_t drop(std::uint32_t probabilities, int) const { return probabilities; }
};

/// Dropout: the mask of a block is drawn under the block's GEMMs.
template <class T, int kBlockKv>
struct ScoreMod<T, kBlockKv, Scores::dropout> {
    const Launch& launch;
    const WorkTile& tile;
    DropoutMask<kBlockKv> kept;
    int row;  ///< the thread's first row in the tile

    __device__ __forceinline__ ScoreMod(const Launch& launch, const WorkTile& tile, int own_row, int)
        : launch(launch), tile(tile), row(own_row) {}

    template <int kCount>
    __device__ __forceinline__ void transform(float (&)[kCount], int) const {}
    __device__ __forceinline__ void draw(int first_key) {
        const int lane = static_cast<int>(threadIdx.x) % 32;  // recomputed, so that it takes no register over the loop
        kept = draw_dropout_mask<kBlockKv>(launch, tile, tile.q_begin + row, first_key, lane);
    }
    __device__ __forceinline__ std::uint32_t drop(std::uint32_t probabilities, int i) const {
        return drop_probabilities(kept, probabilities, i);
    }
};

/// The general path: any of these together, and scales of 0 and less.
template <class T, int kBlockKv>
struct ScoreMod<T, kBlockKv, Scores::general> {
    const Launch& launch;
    const WorkTile& tile;
    HeadScores<T> head;
    BiasPairs<kBlockKv> bias;  ///< one in 16 bits; head has one in fp32
    DropoutMask<kBlockKv> kept;
    int query;  ///< query of the thread's first row
    int lane;

    __device__ __forceinline__ ScoreMod(const Launch& launch, const WorkTile& tile, int row, int own_lane)
        : launch(launch),
          tile(tile),
          head(launch.params, sequence_of(launch.params, tile.batch), tile.batch, tile.head, inputs_of(launch, tile)),
          query(tile.q_begin + row),
          lane(own_lane) {}

    __device__ __forceinline__ static ScoreInputs inputs_of(const Launch& launch, const WorkTile& tile) {
        ScoreInputs inputs(launch.params, tile.batch, tile.head);
        if (!launch.params.bias.fp32) inputs.bias = nullptr;
        return inputs;
    }
    __device__ __forceinline__ bool loads_bias() const {
        return launch.params.bias.data != nullptr && !launch.params.bias.fp32;
    }

    /// The result is in units of the natural logarithm.
    template <int kCount>
    __device__ __forceinline__ void transform(float (&scores)[kCount], int first_key) const {
        auto& fragments = reinterpret_cast<float(&)[kCount / 4][4]>(scores);
        const int key = first_key + lane % 4 * 2;
        if (head.bias == nullptr) head.template transform<false>(fragments, Band32{}, query, key);
        else head.template transform<true>(fragments, tile.band(), query, key);  // hidden keys may have no bias
        if (loads_bias()) add_bias<T>(scores, bias, 1);
    }

    __device__ __forceinline__ void draw(int first_key) {
        if (loads_bias()) BiasOfRows(launch, tile, ptx::opaque(query)).load(bias, first_key);
        kept = {};
        if (head.drops()) kept = draw_dropout_mask<kBlockKv>(launch, tile, query, first_key, lane);
    }
    __device__ __forceinline__ std::uint32_t drop(std::uint32_t probabilities, int i) const {
        return drop_probabilities(kept, probabilities, i);
    }
};

}  // namespace tessera::cuda::fa3
