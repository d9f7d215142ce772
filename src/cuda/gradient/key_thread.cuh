// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/gradient/key_inputs.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/warp_product.cuh"

namespace tessera::cuda::gradient {

/// P is held this many times its value where it is multiplied with dO: fp16 has no small numbers.
template <class T>
inline constexpr float kWeightUnit = std::is_same_v<T, __half> ? 0x1p15F : 1.0F;
template <class T>
inline constexpr float kWeightExponent = std::is_same_v<T, __half> ? 15.0F : 0.0F;

/// A thread of a block of keys: where it stands, and what all parts of its work need.
template <class T, Config kConfig>
struct KeyThread {
    static constexpr int kHeadDim = kConfig.head_dim;
    static constexpr int kKeyTiles = kConfig.key_tiles;
    static constexpr int kParts = 2;  // of a tile of queries: S and dP of one at a time are in registers
    static constexpr int kPartQueries = kBlockQ / kParts;
    static constexpr int kTiles = kPartQueries / 8;
    using Scores = float[kKeyTiles][kTiles][4];      // [16 keys][8 queries][4]
    using Sums = float[kKeyTiles][kHeadDim / 8][4];  // [16 keys][8 dims][4]: dV or dK

    const KeyInputs<T, kConfig> inputs;
    const KeyWork& work;

    // Unsigned: known to be positive, they and what follows from them are shifts and masks alone.
    __device__ static __forceinline__ unsigned number() {
        return static_cast<unsigned>(ptx::opaque(static_cast<int>(threadIdx.x)));
    }
    __device__ static __forceinline__ int warp() { return static_cast<int>(number() / 32); }
    __device__ static __forceinline__ int lane() { return static_cast<int>(number() % 32); }
    __device__ static __forceinline__ int pair() { return warp() % Config::kPairs; }
    __device__ static __forceinline__ bool makes_weights() { return warp() < Config::kPairs; }
    __device__ static __forceinline__ int first_row() { return pair() * kConfig.keys_per_pair(); }

    __device__ __forceinline__ Turns turns() const { return {inputs.launch, work}; }
    __device__ __forceinline__ bool sees(int query, int key) const {
        return query < work.sequence.len_q && work.visible.sees(query, key);
    }
    __device__ __forceinline__ float unit_of(int head) const {
        return gradient_unit<T>(inputs.launch, work.batch, head);
    }

    /// Four elements of a [keys][queries] tile of 16-bit numbers.
    __device__ static __forceinline__ void store_rounded(char* tile, const float (&x)[4], int row, int chunk) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            char* to = tile + chunk_offset<kBlockQ>(row + 8 * r, chunk) + lane() % 4 * 4;
            *reinterpret_cast<std::uint32_t*>(to) = ptx::pack<T>(x[2 * r], x[2 * r + 1]);
        }
    }

    __device__ static __forceinline__ float element(const char* tile, int row, int column) {
        const char* at = tile + chunk_offset<kBlockQ>(row, column / kChunk) + column % kChunk * 2;
        return static_cast<float>(*reinterpret_cast<const T*>(at));
    }
    /// Two neighbouring columns from `column` on, even.
    __device__ static __forceinline__ float2 elements(const char* tile, int row, int column) {
        const char* at = tile + chunk_offset<kHeadDim>(row, column / kChunk) + column % kChunk * 2;
        const auto packed = *reinterpret_cast<const std::uint32_t*>(at);
        return {ptx::unpack<T>(packed, 0), ptx::unpack<T>(packed, 1)};
    }

    /// Where the share's sum of dV or dK lies in the workspace, of a row of the block's keys.
    __device__ __forceinline__ float* share_row(bool dv, int row) const {
        const ForwardParams& p = inputs.launch.params.forward;
        const bool ragged = p.cu_seqlens_kv != nullptr;
        const std::int64_t first = ragged ? work.sequence.first_kv : work.batch * p.len_kv;
        return inputs.launch.shares.row(dv, work.share, work.kv_head, first + work.first_key + row);
    }
    /// Two numbers of it, of row half r.
    __device__ static __forceinline__ void put_two(float* to, const float (&sum)[4], int r, float factor) {
        const float2 x = {fmaf(sum[2 * r], factor, 0.0F), fmaf(sum[2 * r + 1], factor, 0.0F)};
        __stcg(reinterpret_cast<float2*>(to), x);
    }

    /// Adds factor * x to two elements, row half r, where x is Inf or NaN.
    __device__ static __forceinline__ void add_nonfinite(float (&sum)[4], int r, float factor, const float2& x) {
        if (!isfinite(x.x)) sum[2 * r] = fmaf(factor, x.x, sum[2 * r]);
        if (!isfinite(x.y)) sum[2 * r + 1] = fmaf(factor, x.y, sum[2 * r + 1]);
    }

    template <int kRows, int kColumns>
    __device__ static __forceinline__ void clear(float (&x)[kRows][kColumns][4]) {
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) x[m][n][e] = 0;
            }
        }
    }
    template <int kRows, int kColumns>
    __device__ static __forceinline__ bool poisoned(const float (&x)[kRows][kColumns][4]) {
        float probe = 0;  // x * 0 is NaN unless x is finite
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) probe = fmaf(x[m][n][e], 0.0F, probe);
            }
        }
        return probe != probe;
    }
};

}  // namespace tessera::cuda::gradient
