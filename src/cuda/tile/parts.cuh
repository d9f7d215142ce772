// SPDX-License-Identifier: Apache-2.0
//
// fp32 on the tensor cores: a number is the sum of three bf16 numbers, x = x0 + x1 + x2, and a product of two numbers
// is the sum of six products of their parts. The three that are left out are under 2^-22 of the whole, 2^-26 in the
// mean (docs/decisions/fp32-in-parts.md). A tile in shared memory is three tiles of bf16, one for each part, in the
// layout of chunks.cuh.
//
// Tensor cores truncate what they add, so a sum of like terms comes out too small, the more so the longer it is. A
// chain of MMAs therefore adds up one to four steps of 16 from 0 on, small products before large ones. Its result is
// added to the accumulator by fp32 additions, which round to nearest.
#pragma once

#include <cuda_bf16.h>

#include <cmath>

#include "cuda/tile/fragment.cuh"
#include "cuda/tile/warp_gemms.cuh"

namespace tessera::cuda {

inline constexpr int kParts = 3;

/// Fragments of the three parts.
using PartFragments = std::uint32_t[kParts][4];

/// The upper half of an fp32 number: x0, truncated so that large numbers stay finite.
__device__ __forceinline__ float upper_half(float x) { return __uint_as_float(__float_as_uint(x) & 0xFFFF0000); }

/// Two numbers as three words of two parts each. Infinity and NaN have NaN as a second part.
__device__ __forceinline__ void split(float low, float high, std::uint32_t& part0, std::uint32_t& part1,
                                      std::uint32_t& part2) {
    part0 = ptx::permute_bytes<0x7632>(__float_as_uint(low), __float_as_uint(high));
    low -= upper_half(low);
    high -= upper_half(high);
    part1 = ptx::pack<__nv_bfloat16>(low, high);
    low -= __uint_as_float(part1 << 16);
    high -= __uint_as_float(part1 & 0xFFFF0000);
    part2 = ptx::pack<__nv_bfloat16>(low, high);
}

/// Accumulators of 16 rows x 16 columns, `left` and `right`, as A fragments of three parts.
__device__ __forceinline__ void split(PartFragments& a, const float (&left)[4], const float (&right)[4]) {
    split(left[0], left[1], a[0][0], a[1][0], a[2][0]);
    split(left[2], left[3], a[0][1], a[1][1], a[2][1]);
    split(right[0], right[1], a[0][2], a[1][2], a[2][2]);
    split(right[2], right[3], a[0][3], a[1][3], a[2][3]);
}

/// The smallest and the largest numbers of a tile. Parts hold neither Inf and NaN nor, from 2^-102 on down, all digits,
/// which matters beside huge numbers.
struct Extremes {
    std::uint32_t least = 0xFFFFFFFF;  // of |x|, the upper 16 bits minus 1: a thread's numbers in two halves
    std::uint32_t most = 0;            // of |x|, the upper 16 bits

    /// Adds two numbers by their first parts.
    __device__ __forceinline__ void add(std::uint32_t part0) {
        const std::uint32_t magnitude = part0 & 0x7FFF7FFF;
        least = __viaddmin_u16x2(magnitude, 0xFFFFFFFF, least);  // 0 becomes the largest
        most = __vimax3_u16x2(magnitude, magnitude, most);
    }
    __device__ __forceinline__ bool any_nonfinite() const { return holds(most, 0x7F80); }
    __device__ __forceinline__ bool any_huge() const { return holds(most, (127 + 64) << 7); }
    __device__ __forceinline__ bool any_tiny() const {
        constexpr unsigned kTiny = (127 - 102) << 7;
        return min(least & 0xFFFF, least >> 16) + 1 < kTiny;
    }

 private:
    __device__ static __forceinline__ bool holds(std::uint32_t halves, unsigned bound) {
        return max(halves & 0xFFFF, halves >> 16) >= bound;
    }
};

/// The extremes of a tile, over all threads.
struct TileExtremes {
    bool nonfinite, huge, tiny;

    TileExtremes() = default;
    /// A barrier of all threads.
    __device__ __forceinline__ explicit TileExtremes(const Extremes& of_thread) {
        nonfinite = __syncthreads_or(of_thread.any_nonfinite()) != 0;
        huge = __syncthreads_or(of_thread.any_huge()) != 0;
        tiny = __syncthreads_or(of_thread.any_tiny()) != 0;
    }

    /// Does a product of this tile with another one need a repair? `other`: the extremes of the thread's numbers of
    /// that tile.
    __device__ __forceinline__ bool fails_with(const Extremes& other) const {
        return nonfinite || other.any_nonfinite() || (huge && other.any_tiny()) || (tiny && other.any_huge());
    }
};

/// Rows of one head of one sequence in global memory, in fp32.
struct SourceFp32 {
    const float* data = nullptr;  // row 0
    std::int64_t row = 0;         // elements from one row to the next
    std::int64_t column = 0;
    int rows = 0;
    int dim = 0;
    bool vector = false;  // 16 bytes at a time

    /// `offset` bytes from the tensor's first element (head_offset()), `len` rows of `of_dim` elements.
    __device__ __forceinline__ SourceFp32(const Rows& of, std::int64_t offset, int len, int of_dim, bool by_vectors)
        : data(reinterpret_cast<const float*>(of.data + offset)),
          row(of.row),
          column(of.column),
          rows(len),
          dim(of_dim),
          vector(by_vectors) {}

    __device__ __forceinline__ bool has(int r, int c) const { return r < rows && c < dim; }
    __device__ __forceinline__ float at(int r, int c) const { return data[r * row + c * column]; }
    /// Four elements from column c on; zeros past the end.
    __device__ __forceinline__ float4 four(int r, int c) const {
        if (!has(r, c)) return {0, 0, 0, 0};
        if (vector) return __ldg(reinterpret_cast<const float4*>(data + r * row + c));
        return {at(r, c), has(r, c + 1) ? at(r, c + 1) : 0, has(r, c + 2) ? at(r, c + 2) : 0,
                has(r, c + 3) ? at(r, c + 3) : 0};
    }
};

/// kRows rows of kHeadDim fp32 numbers in shared memory, in three parts. kThreads threads load a tile together: thread
/// t has four columns of every kRowsAtOnce-th row.
template <int kRows, int kHeadDim, int kThreads>
struct PartTile {
    static constexpr int kPartBytes = kRows * kHeadDim * 2;
    static constexpr int kBytes = kParts * kPartBytes;
    static constexpr int kFours = kHeadDim / 4;
    static constexpr int kRowsAtOnce = kThreads / kFours;
    static constexpr int kPerThread = kRows / kRowsAtOnce;
    static_assert(kThreads % kFours == 0 && kRows % kRowsAtOnce == 0);

    /// The thread's columns, and its first row.
    struct Own {
        int row;
        int column;

        __device__ __forceinline__ Own() {
            const auto thread = static_cast<unsigned>(ptx::opaque(static_cast<int>(threadIdx.x)));
            row = static_cast<int>(thread / kFours);
            column = static_cast<int>(thread % kFours * 4);
        }
        /// Byte offset of the numbers of row `row` + i * kRowsAtOnce.
        __device__ __forceinline__ int offset(int i) const {
            const int next = i * kRowsAtOnce;  // rows 8 apart have the same swizzle
            const int at = chunk_offset<kHeadDim>(row + next % 8, column / kChunk) + next / 8 * 8 * kHeadDim * 2;
            return at + column % kChunk * 2;
        }
    };

    /// Stores `x`, the thread's i-th four numbers, in parts.
    __device__ static __forceinline__ void put(char* tile, const Own& own, int i, const float4& x, Extremes& extremes) {
        uint2 parts[kParts];
        split(x.x, x.y, parts[0].x, parts[1].x, parts[2].x);
        split(x.z, x.w, parts[0].y, parts[1].y, parts[2].y);
        extremes.add(parts[0].x);
        extremes.add(parts[0].y);
        char* const to = tile + own.offset(i);
#pragma unroll
        for (int part = 0; part < kParts; ++part) *reinterpret_cast<uint2*>(to + part * kPartBytes) = parts[part];
    }

    /// Loads rows [first_row, first_row + kRows); what is outside of the source becomes 0.
    __device__ static Extremes load(char* tile, const SourceFp32& source, int first_row) {
        constexpr int kAtOnce = kPerThread < 8 ? kPerThread : 8;  // loads that are under way together
        static_assert(kPerThread % kAtOnce == 0 && kAtOnce * kRowsAtOnce % 8 == 0);
        const Own own;
        Extremes extremes;
#pragma unroll 1
        for (int begin = 0; begin < kPerThread; begin += kAtOnce) {
            float4 x[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                x[i] = source.four(first_row + own.row + (begin + i) * kRowsAtOnce, own.column);
            char* const to = tile + begin * kRowsAtOnce * kHeadDim * 2;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) put(to, own, i, x[i], extremes);
        }
        return extremes;
    }

    /// Copies rows [first_row, first_row + kRows) in fp32 to where their parts will be, by cp.async where the source
    /// allows it. split_copy() has to follow.
    __device__ static __forceinline__ void start_copy(char* tile, const SourceFp32& source, int first_row) {
        float4* const to = copied(tile);
        const Own own;
        const int first = first_row + own.row;
        if (source.vector) {
            const float* from = source.data + first * source.row + own.column;
            const std::int64_t next = ptx::opaque(kRowsAtOnce * source.row);
            const int rows = own.column < source.dim ? source.rows - first : 0;
#pragma unroll
            for (int i = 0; i < kPerThread; ++i) {
                const bool valid = i * kRowsAtOnce < rows;
                ptx::cp_async_16(ptx::shared_address(to + i * kThreads), valid ? from : source.data, valid);
                from += next;
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < kPerThread; ++i) {
                to[i * kThreads] = source.four(first + i * kRowsAtOnce, own.column);
            }
        }
        ptx::cp_async_commit();
    }
    /// Splits what start_copy() has copied. A thread reads its own copy; after a barrier of all threads, which is in
    /// here, it writes the parts over the copies of others. `between` is called right after that barrier. A barrier has
    /// to follow before the parts are read.
    template <class Between>
    __device__ static __forceinline__ void split_copy(char* tile, Extremes& extremes, const Between& between) {
        float4 x[kPerThread];
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) x[i] = copied(tile)[i * kThreads];
        __syncthreads();
        between();
        const Own own;
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) put(tile, own, i, x[i], extremes);
    }

    /// Replaces Inf and NaN by 0, as a tile for products with 0. Call it between barriers.
    __device__ static void clean(char* tile) {
        for (int i = static_cast<int>(threadIdx.x); i < kPartBytes / 4; i += kThreads) {
            auto* const words = reinterpret_cast<std::uint32_t*>(tile) + i;
            // Infinity and NaN, and no other number, have NaN as their second part.
            const std::uint32_t found = nonfinite<__nv_bfloat16>(words[kPartBytes / 4]);
            const std::uint32_t mask = ~((found >> 15) * 0xFFFF);
#pragma unroll
            for (int part = 0; part < kParts; ++part) words[part * kPartBytes / 4] &= mask;
        }
    }

    /// The first of a thread's numbers of a copy in fp32; they are kThreads apart.
    __device__ static __forceinline__ float4* copied(char* tile) {
        return reinterpret_cast<float4*>(tile) + ptx::opaque(static_cast<int>(threadIdx.x));
    }

    using Address = MatrixAddress<kHeadDim>;
    /// A fragments of 16 rows and 16 columns, `address` being rows_first(); of the transposed tile, chunks_first().
    __device__ static __forceinline__ void read(PartFragments& to, const Address& address, int rows, int chunks) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            ptx::ldmatrix_x4(to[part], address.at(rows, chunks) + part * kPartBytes);
        }
    }
    __device__ static __forceinline__ void read_transposed(PartFragments& to, const Address& address, int rows,
                                                           int chunks) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            ptx::ldmatrix_x4_trans(to[part], address.at(rows, chunks) + part * kPartBytes);
        }
    }
};

/// left and right += A B over kSteps steps of 16, for two tiles of 8 columns. `read`(step, b): B fragments.
template <int kSteps, class Read>
__device__ __forceinline__ void add_products(float (&left)[4], float (&right)[4], const PartFragments (&a)[kSteps],
                                             const Read& read) {
    constexpr int kSmall[5][2] = {{2, 0}, {0, 2}, {1, 1}, {1, 0}, {0, 1}};
    float sums[2][4] = {};
    PartFragments b[kSteps];
    const auto multiply = [&](const std::uint32_t(&of_a)[4], const std::uint32_t(&of_b)[4]) {
        ptx::mma<__nv_bfloat16>(sums[0], of_a, of_b[0], of_b[1]);
        ptx::mma<__nv_bfloat16>(sums[1], of_a, of_b[2], of_b[3]);
    };
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        read(step, b[step]);
#pragma unroll
        for (const auto& parts : kSmall) multiply(a[step][parts[0]], b[step][parts[1]]);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) multiply(a[step][0], b[step][0]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        left[e] += sums[0][e];
        right[e] += sums[1][e];
    }
}

/// s = A B^T over all columns of both tiles, 16 rows of A by 8 kTiles rows of B; s: [8 rows of B][4]. kChain: steps of
/// 16 columns whose fragments of A are held together.
template <class TileA, class TileB, int kChain, int kTiles>
__device__ __forceinline__ void multiply_rows(float (&s)[kTiles][4], const typename TileA::Address& a,
                                              const typename TileB::Address& b) {
    constexpr int kSteps = TileA::kFours / 4;
#pragma unroll
    for (auto& tile : s) {
#pragma unroll
        for (float& x : tile) x = 0;
    }
#pragma unroll
    for (int begin = 0; begin < kSteps; begin += kChain) {
        PartFragments of_a[kChain];
#pragma unroll
        for (int i = 0; i < kChain; ++i) TileA::read(of_a[i], a, 0, 2 * (begin + i));
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            add_products(s[n], s[n + 1], of_a,
                         [&](int step, PartFragments& to) { TileB::read(to, b, 8 * n, 2 * (begin + step)); });
        }
    }
}

/// sum += A B, A being kSteps fragments of 16 rows, and B 16 kSteps rows of a tile, of which columns from 8 first_chunk
/// on are wanted; sum: [8 columns of B][4].
template <class TileB, int kSteps, int kTiles>
__device__ __forceinline__ void add_columns(float (&sum)[kTiles][4], const PartFragments (&a)[kSteps],
                                            const typename TileB::Address& b, int first_chunk = 0) {
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
        add_products(sum[n], sum[n + 1], a,
                     [&](int step, PartFragments& to) { TileB::read_transposed(to, b, 16 * step, first_chunk + n); });
    }
}

/// Adds to a warp's sums the Inf and NaN that clean() has removed. The thread's rows of `sum` are `first_row` and 8
/// below, its columns those of an accumulator from `first_column` on. `sees`(row, other): does the pair count, `other`
/// being one of the rows [begin, end) of `source`? An element is multiplied by `weight`: 1, or 0, which makes NaN of
/// it.
template <int kTiles, class Sees>
__device__ void add_nonfinite(float (&sum)[kTiles][4], const SourceFp32& source, int first_row, int first_column,
                              int begin, int end, float weight, const Sees& sees) {
#pragma unroll 1
    for (int other = begin; other < min(end, source.rows); ++other) {
        const bool counts[2] = {sees(first_row, other), sees(first_row + 8, other)};
#pragma unroll 1
        for (int i = 0; i < 4 * kTiles; ++i) {
            const int column = first_column + column_of(i);
            if (!(row_of(i) == 0 ? counts[0] : counts[1]) || column >= source.dim) continue;
            const float x = source.at(other, column);
            if (isfinite(x)) continue;
#pragma unroll
            for (int j = 0; j < 4 * kTiles; ++j)
                sum[j / 4][j % 4] += j == i ? x * weight : 0.0F;  // sums stay in registers
        }
    }
}

/// Computes again, by fp32 multiply-adds, the elements of s = A B^T whose operands parts do not hold, which depends on
/// the two rows alone, and those that are `wanted`(i). `row`(i), `other`(i): the rows of a and b of the thread's
/// element i.
template <int kTiles, class Row, class Other, class Wanted>
__device__ __forceinline__ void repair_products(float (&s)[kTiles][4], const SourceFp32& a, const SourceFp32& b,
                                                const Row& row, const Other& other, const Wanted& wanted) {
#pragma unroll 1
    for (int i = 0; i < 4 * kTiles; ++i) {
        if (row(i) >= a.rows || other(i) >= b.rows) continue;
        Extremes of_a;
        Extremes of_b;
        float sum = 0;
#pragma unroll 1
        for (int column = 0; column < a.dim; ++column) {
            const float x = a.at(row(i), column);
            const float y = b.at(other(i), column);
            of_a.add(__float_as_uint(x) >> 16);
            of_b.add(__float_as_uint(y) >> 16);
            sum = fmaf(x, y, sum);
        }
        const bool fails = wanted(i) || of_a.any_nonfinite() || of_b.any_nonfinite() ||
                           (of_a.any_huge() && of_b.any_tiny()) || (of_a.any_tiny() && of_b.any_huge());
#pragma unroll
        for (int j = 0; j < 4 * kTiles; ++j) s[j / 4][j % 4] = fails && j == i ? sum : s[j / 4][j % 4];
    }
}

}  // namespace tessera::cuda
