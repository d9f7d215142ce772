// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/fa2/host/config.h"
#include "cuda/tile/softmax.cuh"

namespace tessera::cuda::fa2 {

/// Which rows and columns a thread has to do with. Worked out where it is needed: in the loop registers are few.
struct Position {
    int first_row;  // of the warp in its tile of queries
    int lane;

    template <Config kConfig>
    __device__ static __forceinline__ Position of_thread() {
        const auto thread = static_cast<unsigned>(ptx::opaque(static_cast<int>(threadIdx.x)));
        return {static_cast<int>(thread / 32) * kConfig.rows_per_warp(), static_cast<int>(thread % 32)};
    }
    __device__ __forceinline__ int row() const { return first_row + lane / 4; }  // the thread's first
    __device__ __forceinline__ int column() const { return lane % 4 * 2; }       // of accumulators
};

/// One thread's share of O, m and l of its warp's rows. m and l are read and written once for a tile of keys, so that
/// they can be in shared memory meanwhile.
template <class T, Config kConfig>
class Accumulators {
 public:
    static constexpr int kRowTiles = kConfig.row_tiles;
    static constexpr int kDimTiles = kConfig.head_dim / 8;
    float o[kRowTiles][kDimTiles][4];  // [16 rows][8 dims][4]

    /// `shared`: of the block.
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
        if constexpr (kConfig.rows_in_shared) return *place(m);
        else return held_[m];
    }
    __device__ __forceinline__ void set_rows(int m, const OnlineSoftmax<T>& rows) {
        if constexpr (kConfig.rows_in_shared) *place(m) = rows;
        else held_[m] = rows;
    }

    __device__ __forceinline__ void rescale(int m, const Rescaling& rescaling) {
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) o[m][n][e] *= rescaling.rescale[e / 2];
        }
    }

    /// Did Inf or NaN come in through V? One row of the thread is enough to know: a weight of 0 makes NaN of them.
    __device__ __forceinline__ bool poisoned() const {
        float probe = 0;  // x * 0 is NaN unless x is finite
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) probe = fmaf(o[0][n][0], 0.0F, fmaf(o[0][n][1], 0.0F, probe));
        return probe != probe;
    }

 private:
    __device__ __forceinline__ OnlineSoftmax<T>* place(int m) const {
        const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
        return reinterpret_cast<OnlineSoftmax<T>*>(shared_ + kConfig.rows_offset()) + m * kConfig.threads() + thread;
    }

    char* shared_;
    OnlineSoftmax<T> held_[kConfig.rows_in_shared ? 1 : kRowTiles];
};

}  // namespace tessera::cuda::fa2
