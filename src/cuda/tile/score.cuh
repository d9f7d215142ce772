// SPDX-License-Identifier: Apache-2.0
//
// Score modifications of the mma.sync kernels, on accumulators of mma.m16n8k16: scale, softcap, ALiBi, bias, mask,
// dropout. s[kTiles][4]: element e of tile j is row half e / 2 (8 rows apart), key 8 * j + e % 2.
// `query` and `key` are those of the thread's element 0.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cmath>

#include "cuda/host/band32.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/dropout_mask.cuh"
#include "cuda/tile/params.hpp"
#include "cuda/tile/softcap.cuh"

namespace tessera::cuda {

/// Scores of pairs that are not visible become -inf.
template <int kTiles>
__device__ __forceinline__ void apply_mask(float (&s)[kTiles][4], const Band32& band, int query, int key) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int first = band.first(query + 8 * r) - key;  // relative to `key`, columns are compile-time numbers
        const int last = band.last(query + 8 * r) - key;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (8 * j + e < first || 8 * j + e > last) s[j][2 * r + e] = -INFINITY;
            }
        }
    }
}

/// Per-head inputs of score modifications.
struct ScoreInputs {
    float slope = 0;             // ALiBi slope of the head; 0: none
    const char* bias = nullptr;  // at (query 0, key 0) of the head; null: none

    ScoreInputs() = default;
    __device__ ScoreInputs(const ForwardParams& p, std::int64_t batch, int head) {
        if (p.alibi_slopes) slope = p.alibi_slopes[batch * p.alibi_batch + head * p.alibi_head];
        if (p.bias.data) bias = p.bias.data + (batch * p.bias.batch + head * p.bias.head) * (p.bias.fp32 ? 4 : 2);
    }
};

/// The score modifications of one head. `params` refers to the kernel's parameter, from which values are read again for
/// each tile, without a register in between.
template <class T>
struct HeadScores {
    const ForwardParams& params;
    float slope = 0;
    int diagonal = 0;  // len_kv - len_q
    int last_query = 0;
    const char* bias = nullptr;
    std::uint32_t batch = 0;
    std::uint32_t head = 0;

    __device__ __forceinline__ HeadScores(const ForwardParams& p, const Sequence& sequence, std::int64_t batch_index,
                                          int head_index, const ScoreInputs& inputs)
        : params(p),
          slope(inputs.slope),
          diagonal(sequence.len_kv - sequence.len_q),
          last_query(sequence.len_q - 1),
          bias(inputs.bias),
          batch(static_cast<std::uint32_t>(batch_index)),
          head(static_cast<std::uint32_t>(head_index)) {}
    __device__ __forceinline__ HeadScores(const ForwardParams& p, const Sequence& sequence, std::int64_t batch_index,
                                          int head_index)
        : HeadScores(p, sequence, batch_index, head_index, ScoreInputs(p, batch_index, head_index)) {}

    /// From Q K^T to scores in units of the natural logarithm. kMasked: some pairs may be hidden; their scores become
    /// -inf, and their bias is not read.
    template <bool kMasked, int kTiles>
    __device__ __forceinline__ void transform(float (&s)[kTiles][4], const Band32& band, int query, int key) const {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[j][e] = __fmul_rn(s[j][e], params.scale);
        }
        if (params.softcap > 0) cap(s);
        if (slope != 0) add_alibi(s, query, key);
        if (bias) add_bias<kMasked>(s, band, query, key);
        if constexpr (kMasked) apply_mask(s, band, query, key);
    }

    __device__ __forceinline__ bool drops() const { return params.drops(); }

    /// Dropout mask of 16 rows x 64 keys; rows from a multiple of 16 on. All lanes of the warp take part.
    __device__ __forceinline__ DropoutBits draw(int query, int key, int lane) const {
        return DropoutBits::draw(params.keep, batch, head, query, key, lane);
    }
    /// Dropped probabilities of 8 keys become 0.
    __device__ __forceinline__ static void drop(float (&p)[4], const DropoutBits& kept, int tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (!kept(tile, e)) p[e] = 0;
        }
    }
    /// Dropped probabilities become 0. The first key is a multiple of the number of keys, which is a multiple of 16.
    template <int kTiles>
    __device__ __forceinline__ void drop(float (&p)[kTiles][4], int query, int key, int lane) const {
        static_assert(kTiles % 2 == 0);
        constexpr bool kAligned = kTiles % 8 == 0 || 8 % kTiles == 0;  // draws begin at j % 8 == 0 only
        DropoutBits kept;
#pragma unroll
        for (int j = 0; j < kTiles; j += 2) {
            const bool begins = j % 8 == 0 || (!kAligned && (key + 8 * j) % 64 < 16);
            if (begins) kept = draw(query, key + 8 * j, lane);
            drop(p[j], kept, 0);
            drop(p[j + 1], kept, 1);
            kept.bits >>= 1;  // the next 16 keys
        }
    }

 private:
    template <int kTiles>
    __device__ __forceinline__ void cap(float (&s)[kTiles][4]) const {
        if constexpr (std::is_same_v<T, float>) {
#pragma unroll
            for (int i = 0; i < 4 * kTiles; ++i) {
                s[i / 4][i % 4] = params.softcap * tanhf(s[i / 4][i % 4] / params.softcap);
            }
            return;
        }
        const float inverse = fminf(ptx::reciprocal_approx(params.softcap), FLT_MAX);  // inf if subnormal
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[j][e] = params.softcap * hyperbolic_tangent(s[j][e] * inverse);
        }
    }

    template <int kTiles>
    __device__ __forceinline__ void add_alibi(float (&s)[kTiles][4], int query, int key) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const auto first = static_cast<float>(query + 8 * r + diagonal - key);  // exact up to 2^24
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float distance = fabsf(first - static_cast<float>(8 * j + e));
                    s[j][2 * r + e] = fmaf(-slope, distance, s[j][2 * r + e]);
                }
            }
        }
    }

    template <bool kMasked, int kTiles>
    __device__ __forceinline__ void add_bias(float (&s)[kTiles][4], const Band32& band, int query, int key) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // Rows past the last query are computed and dropped, but the bias has no such rows.
            std::int64_t at = min(query + 8 * r, last_query) * params.bias.row + key * params.bias.column;
            const std::int64_t step = ptx::opaque(params.bias.column);  // opaque, or its multiples would take registers
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (kMasked && !band.sees(query + 8 * r, key + 8 * j + e)) continue;
                    s[j][2 * r + e] += bias_at(at + e * step);
                }
                at += 8 * step;
            }
        }
    }

    __device__ __forceinline__ float bias_at(std::int64_t index) const {
        if (params.bias.fp32) return reinterpret_cast<const float*>(bias)[index];
        return static_cast<float>(reinterpret_cast<const T*>(bias)[index]);
    }
};

}  // namespace tessera::cuda
