// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/fa2/host/config.h"
#include "cuda/tile/softmax.cuh"

namespace tessera::cuda::fa2 {

/// The rows and columns of a thread. They are computed where they are used, since registers are few in the loop.
struct Position {
    int first_row;  // the warp's first row in its query tile
    int lane;

    template <Config kConfig>
    __device__ static __forceinline__ Position of_thread() {
        const auto thread = static_cast<unsigned>(ptx::opaque(static_cast<int>(threadIdx.x)));
        return {static_cast<int>(thread / 32) * kConfig.rows_per_warp(), static_cast<int>(thread % 32)};
    }
    __device__ __forceinline__ int row() const { return first_row + lane / 4; }  // the thread's first row
    __device__ __forceinline__ int column() const {
        return lane % 4 * 2;
    }  // the thread's first column of an accumulator
};

/// O, m and l of a thread. m and l are read and written once for a key tile, so shared memory can hold them between.
template <class T, Config kConfig>
class Accumulators {
 public:
    static constexpr int kRowTiles = kConfig.row_tiles;
    static constexpr int kDimTiles = kConfig.head_dim / 8;
    float o[kRowTiles][kDimTiles][4];  // [16 rows][8 dims][4]

    /// `shared`: of the CTA.
    __device__ __forceinline__ explicit Accumulators(char* shared) : shared_(shared) { clear(); }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            set_rows(m, OnlineSoftmax<T>{});
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) o[m][n][e] = 0;
            }
        }
    }

    __device__ __forceinline__ OnlineSoftmax<T> rows(int m) const {
        if constexpr (kConfig.rows_in_shared) return *slot(m);
        else return in_registers_[m];
    }
    __device__ __forceinline__ void set_rows(int m, const OnlineSoftmax<T>& rows) {
        if constexpr (kConfig.rows_in_shared) *slot(m) = rows;
        else in_registers_[m] = rows;
    }

    __device__ __forceinline__ void rescale(int m, const Rescaling& rescaling) {
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) o[m][n][e] *= rescaling.rescale[e / 2];
        }
    }

    /// True if Inf or NaN came in through V. One row of the thread is enough, since P = 0 times them is NaN.
    __device__ __forceinline__ bool has_nonfinite() const {
        float probe = 0;  // x * 0 is NaN unless x is finite
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) probe = fmaf(o[0][n][0], 0.0F, fmaf(o[0][n][1], 0.0F, probe));
        return probe != probe;
    }

 private:
    __device__ __forceinline__ OnlineSoftmax<T>* slot(int m) const {
        const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
        return reinterpret_cast<OnlineSoftmax<T>*>(shared_ + kConfig.rows_offset()) + m * kConfig.threads() + thread;
    }

    char* shared_;
    OnlineSoftmax<T> in_registers_[kConfig.rows_in_shared ? 1 : kRowTiles];
};

}  // namespace tessera::cuda::fa2
