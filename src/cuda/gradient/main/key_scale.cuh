// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/gradient/main/fragments.cuh"

namespace tessera::cuda::gradient {

/// The fp16 scales of a warp's accumulators whose rows are keys. dV has the fixed scale of P. dK has a scale for each
/// key, since all dS of a key may be far smaller than the largest of the head. It follows the largest |dS| of the key
/// so far as the online softmax follows a maximum: dS of a step is multiplied by the new scale, dK is rescaled to it.
/// bf16 needs no scales.
template <class T, int kKeyTiles>
struct KeyScale {
    static constexpr bool kFp16 = std::is_same_v<T, __half>;
    int exponent[kKeyTiles][2];  // exponents of the scales; in each tile of 16 keys, of two rows 8 apart

    KeyScale() = default;
    __device__ __forceinline__ explicit KeyScale(bool of_dv) {
#pragma unroll
        for (auto& of_keys : exponent) {
            of_keys[0] = of_keys[1] = !kFp16 ? 0 : of_dv ? kFp16PExponent : Fp16DsScaleOfRows::kMax;
        }
    }

    /// Brings `ds`, [16 keys][8 queries][4], from the scale of its head, `head_scale`, to the scale of its key, and
    /// `sums` from the old scale of the key to the new one.
    template <int kTiles, int kColumns>
    __device__ __forceinline__ void rescale(float (&ds)[kKeyTiles][kTiles][4], float (&sums)[kKeyTiles][kColumns][4],
                                            float head_scale) {
        const int head_exponent = biased_exponent(head_scale) - 127;
        bool changes = false;
        int before[kKeyTiles][2];
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int& current = exponent[m][r];
                before[m][r] = current;
                const int largest = biased_exponent(largest_of(ds[m], r));
                if (largest > 0) current = Fp16DsScaleOfRows::exponent(largest - head_exponent, current);
                changes |= current != before[m][r];
                const float factor = power_of_two(current - head_exponent);
#pragma unroll
                for (int j = 0; j < kTiles; ++j) {
                    ds[m][j][2 * r] *= factor;
                    ds[m][j][2 * r + 1] *= factor;
                }
            }
        }
        if (!any_lane(changes)) return;
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

    /// `factor` divided by the scale of each row: the factors of the accumulators in the epilogue.
    __device__ __forceinline__ void factors(float (&out)[kKeyTiles][2], float factor) const {
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) out[m][r] = kFp16 ? factor * power_of_two(-exponent[m][r]) : factor;
        }
    }

 private:
    /// The largest |dS| of row half r, which a quad of lanes holds. NaN is ignored.
    template <int kTiles>
    __device__ static __forceinline__ float largest_of(const float (&ds)[kTiles][4], int r) {
        float largest = 0;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            largest = fmaxf(largest, fmaxf(fabsf(ds[j][2 * r]), fabsf(ds[j][2 * r + 1])));
        }
        return quad_max(largest);
    }
};

}  // namespace tessera::cuda::gradient
