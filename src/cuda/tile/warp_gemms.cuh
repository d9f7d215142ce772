// SPDX-License-Identifier: Apache-2.0
//
// The two GEMMs of attention in one warp by mma.sync, S = Q K^T and O += P V, from tiles in shared memory.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/tile/chunks.cuh"

namespace tessera::cuda {

/// Address of a lane's row of the four 8 x 8 matrices of an ldmatrix. Further rows and chunks are compile-time offsets,
/// since the swizzle depends on row % 8 only and is an exclusive or.
template <int kHeadDim>
struct MatrixAddress {
    std::uint32_t base;

    __device__ __forceinline__ MatrixAddress(const char* tile, int row, int chunk)
        : base(ptx::shared_address(tile) + chunk_offset<kHeadDim>(row, chunk)) {}
    __device__ __forceinline__ std::uint32_t at(int rows, int chunks) const {
        return (base ^ (chunks * 16 % 128)) + chunks * 16 / 128 * 128 + rows * kHeadDim * 2;
    }
    __device__ __forceinline__ void move(int bytes) { base += bytes; }
    /// The address of chunk c ^ `chunks` (less than 8) where this one has chunk c.
    __device__ __forceinline__ MatrixAddress swapped(int chunks) const {
        MatrixAddress other = *this;
        other.base ^= chunks * 16;
        return other;
    }

    /// Matrices (rows 0-7, chunk 0), (rows 8-15, chunk 0), (rows 0-7, chunk 1), (rows 8-15, chunk 1): Q, and V
    /// transposed.
    __device__ static __forceinline__ MatrixAddress rows_first(const char* tile, int row, int lane) {
        return {tile, row + lane % 16, lane / 16};
    }
    /// Matrices (rows 0-7, chunk 0), (rows 0-7, chunk 1), (rows 8-15, chunk 0), (rows 8-15, chunk 1): K.
    __device__ static __forceinline__ MatrixAddress chunks_first(const char* tile, int lane) {
        return {tile, lane / 16 * 8 + lane % 8, lane / 8 % 2};
    }
};

/// The rows of Q of one warp, 16 * kRowTiles: in registers, or read again for every tile of keys.
template <int kHeadDim, int kRowTiles, bool kInRegisters>
struct Queries {
    static constexpr int kSteps = kHeadDim / 16;
    static constexpr int kHeld = kInRegisters ? kSteps : 1;
    MatrixAddress<kHeadDim> address;
    std::uint32_t held[kHeld][kRowTiles][4];  // A fragments: [step of 16 dims][16 rows][4]

    __device__ __forceinline__ Queries(const char* tile, int first_row, int lane)
        : address(MatrixAddress<kHeadDim>::rows_first(tile, first_row, lane)) {}
    __device__ __forceinline__ void read(int step) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) ptx::ldmatrix_x4(held[step % kHeld][m], address.at(16 * m, 2 * step));
    }
    __device__ __forceinline__ void read_all() {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) read(step);
    }
};

/// No work between the MMAs.
struct NothingBetween {
    __device__ __forceinline__ void operator()(int) const {}
};

/// S = Q K^T over one tile of keys; s: [16 rows][8 keys][4]. `between`(i) is called in step i of the kHeadDim / 16.
template <class T, int kHeadDim, int kRowTiles, bool kInRegisters, int kTiles, class Between = NothingBetween>
__device__ __forceinline__ void multiply_qk(float (&s)[kRowTiles][kTiles][4],
                                            Queries<kHeadDim, kRowTiles, kInRegisters>& queries,
                                            const MatrixAddress<kHeadDim>& k, const Between& between = {}) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[m][n][e] = 0;
        }
    }
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        if constexpr (!kInRegisters) queries.read(step);
        const auto& q = queries.held[step % Queries<kHeadDim, kRowTiles, kInRegisters>::kHeld];  // [16 rows][4]
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            std::uint32_t b[4];  // B fragments of 16 keys x 16 dims
            ptx::ldmatrix_x4(b, k.at(8 * n, 2 * step));
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                ptx::mma<T>(s[m][n], q[m], b[0], b[1]);
                ptx::mma<T>(s[m][n + 1], q[m], b[2], b[3]);
            }
        }
        between(step);
    }
}

/// O += (16 columns of P, as A fragments) (16 rows of V); o: [16 rows][8 dims][4].
template <class T, int kHeadDim, int kRowTiles>
__device__ __forceinline__ void add_rows_of_v(float (&o)[kRowTiles][kHeadDim / 8][4],
                                              const std::uint32_t (&a)[kRowTiles][4], const MatrixAddress<kHeadDim>& v,
                                              int step) {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; n += 2) {
        std::uint32_t b[4];  // B fragments of 16 keys x 16 dims
        ptx::ldmatrix_x4_trans(b, v.at(16 * step, n));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            ptx::mma<T>(o[m][n], a[m], b[0], b[1]);
            ptx::mma<T>(o[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

/// O += P V over one tile of keys, P a tile [rows][kKeys] in shared memory like V; o: [16 rows][8 dims][4].
template <class T, int kHeadDim, int kKeys, int kRowTiles>
__device__ __forceinline__ void multiply_stored_pv(float (&o)[kRowTiles][kHeadDim / 8][4],
                                                   const MatrixAddress<kKeys>& p, const MatrixAddress<kHeadDim>& v) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
        std::uint32_t a[kRowTiles][4];  // A fragments: 16 rows x 16 keys
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) ptx::ldmatrix_x4(a[m], p.at(16 * m, 2 * step));
        add_rows_of_v<T, kHeadDim>(o, a, v, step);
    }
}

/// O += P V over one tile of keys; p: [16 rows][8 keys][4], o: [16 rows][8 dims][4]. `prepare`(i) is called before
/// columns 8 * i ... of P are used, so that work on them overlaps the MMAs of earlier columns.
template <class T, int kHeadDim, int kRowTiles, int kTiles, class Prepare = NothingBetween>
__device__ __forceinline__ void multiply_pv(float (&o)[kRowTiles][kHeadDim / 8][4],
                                            const float (&p)[kRowTiles][kTiles][4], const MatrixAddress<kHeadDim>& v,
                                            const Prepare& prepare = {}) {
#pragma unroll
    for (int step = 0; step < kTiles / 2; ++step) {
        prepare(2 * step);
        prepare(2 * step + 1);
        std::uint32_t a[kRowTiles][4];  // A fragments: 16 rows x 16 keys
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            a[m][0] = ptx::pack<T>(p[m][2 * step][0], p[m][2 * step][1]);
            a[m][1] = ptx::pack<T>(p[m][2 * step][2], p[m][2 * step][3]);
            a[m][2] = ptx::pack<T>(p[m][2 * step + 1][0], p[m][2 * step + 1][1]);
            a[m][3] = ptx::pack<T>(p[m][2 * step + 1][2], p[m][2 * step + 1][3]);
        }
        add_rows_of_v<T, kHeadDim>(o, a, v, step);
    }
}

}  // namespace tessera::cuda
