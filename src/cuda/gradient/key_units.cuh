// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/gradient/key_thread.cuh"

namespace tessera::cuda::gradient {

/// Powers of two that the sums of a pair's keys are held times, in 16 bits: fp16 has neither large numbers nor small
/// ones. Those of dV are fixed, for P is at most 1. Those of dK belong to a key each, whose dS may all be far under
/// the largest of the head, and follow the largest |dS| that the key has met, as a maximum follows scores in the
/// forward: dS of a step are held times it, the sums before rescaled. bf16 needs none.
template <class T, int kKeyTiles>
struct KeyUnits {
    static constexpr bool kHeld = std::is_same_v<T, __half>;
    static constexpr int kMost = 60;
    int exponent[kKeyTiles][2];  // of rows 8 apart of 16 keys

    KeyUnits() = default;
    __device__ __forceinline__ explicit KeyUnits(bool of_weights) {
#pragma unroll
        for (auto& of_keys : exponent) {
            of_keys[0] = of_keys[1] = !kHeld ? 0 : of_weights ? static_cast<int>(kWeightExponent<T>) : kMost;
        }
    }

    /// `ds`, [16 keys][8 queries][4], come times `unit` of their head, and leave times that of their key; so do sums.
    template <int kTiles, int kColumns>
    __device__ __forceinline__ void hold(float (&ds)[kKeyTiles][kTiles][4], float (&sums)[kKeyTiles][kColumns][4],
                                         float unit) {
        const int come = exponent_of(unit) - 127;
        bool changes = false;
        int before[kKeyTiles][2];
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int& held = exponent[m][r];
                before[m][r] = held;
                const int largest = exponent_of(largest_of(ds[m], r));
                if (largest > 0) held = min(held, max(14 + 127 - largest + come, -kMost));
                changes |= held != before[m][r];
                const float factor = power_of_two(held - come);
#pragma unroll
                for (int j = 0; j < kTiles; ++j) {
                    ds[m][j][2 * r] *= factor;
                    ds[m][j][2 * r + 1] *= factor;
                }
            }
        }
        if (!__any_sync(0xFFFFFFFF, changes)) return;
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
            const float factor[2] = {power_of_two(exponent[m][0] - before[m][0]),
                                     power_of_two(exponent[m][1] - before[m][1])};
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[m][n][e] *= factor[e / 2];
            }
        }
    }

    /// What sums are to be multiplied by in the end.
    __device__ __forceinline__ void factors(float (&out)[kKeyTiles][2], float factor) const {
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) out[m][r] = kHeld ? factor * power_of_two(-exponent[m][r]) : factor;
        }
    }

 private:
    __device__ static __forceinline__ int exponent_of(float x) { return __float_as_int(x) >> 23; }  // x >= 0
    __device__ static __forceinline__ float power_of_two(int exponent) {
        return __int_as_float((127 + exponent) << 23);
    }

    /// Over the row's queries, which a quad of lanes has. What is not a number counts as nothing.
    template <int kTiles>
    __device__ static __forceinline__ float largest_of(const float (&ds)[kTiles][4], int r) {
        float largest = 0;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            largest = fmaxf(largest, fmaxf(fabsf(ds[j][2 * r]), fabsf(ds[j][2 * r + 1])));
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
        return fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
    }
};

}  // namespace tessera::cuda::gradient
