// SPDX-License-Identifier: Apache-2.0
//
// New rows of K and V into a cache, and queries with the same rotary embedding: one warp for a head of a row. A row
// without norm and rotary embedding is copied; the others are computed in fp64 and rounded once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/append/launch.hpp"
#include "cuda/tile/fragment.cuh"

namespace tessera::cuda::append_rows {

__device__ __forceinline__ double as_double(float x) { return x; }
__device__ __forceinline__ double as_double(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ double as_double(__half x) { return __half2float(x); }
__device__ __forceinline__ void round_to(float& to, double x) { to = __double2float_rn(x); }
__device__ __forceinline__ void round_to(__nv_bfloat16& to, double x) { to = __double2bfloat16(x); }
__device__ __forceinline__ void round_to(__half& to, double x) { to = __double2half(x); }

__device__ __forceinline__ std::int64_t read(const Integers& from, std::int64_t index, std::int64_t row = 0) {
    const std::int64_t at = row * from.row_step + index * from.step;
    return from.is_64 ? static_cast<const std::int64_t*>(from.data)[at]
                      : static_cast<const std::int32_t*>(from.data)[at];
}

template <class T>
__device__ __forceinline__ double read(const Numbers& from, std::int64_t row, std::int64_t index) {
    const std::int64_t at = row * from.row_step + index * from.step;
    return from.fp32 ? static_cast<const float*>(from.data)[at] : as_double(static_cast<const T*>(from.data)[at]);
}

/// One head of one row.
template <class T>
struct HeadRow {
    T* data;
    std::int64_t column;

    __device__ __forceinline__ T& at(std::int64_t c) const { return data[c * column]; }
};

template <class T>
__device__ __forceinline__ HeadRow<T> head_row(const Rows& rows, std::int64_t batch, std::int64_t row, int head) {
    return {reinterpret_cast<T*>(rows.data) + batch * rows.batch + row * rows.row + head * rows.head, rows.column};
}
/// Row `row`, counted over all sequences.
template <class T>
__device__ __forceinline__ HeadRow<T> head_row(const Rows& rows, std::int64_t row, int head) {
    return head_row<T>(rows, row / rows.len, row % rows.len, head);
}

/// The row of the cache that a new row of K and V is written to: row `row` of a slot or page. Slot -1: none.
struct CacheRow {
    std::int64_t slot = -1;
    std::int64_t row = 0;
    std::int64_t position = 0;  ///< of the rotary embedding
};

/// The last sequence that begins at this row or before; -1 for rows past the last offset, and without sequences.
__device__ __forceinline__ std::int64_t sequence_of_row(const Launch& launch, std::int64_t row) {
    if (launch.sequences == 0 || row >= read(launch.cu_seqlens_k, launch.sequences)) return -1;
    std::int64_t low = 0, high = launch.sequences - 1;
    while (low < high) {
        const std::int64_t middle = (low + high + 1) / 2;
        if (read(launch.cu_seqlens_k, middle) <= row) low = middle;
        else high = middle - 1;
    }
    return low;
}

__device__ __forceinline__ CacheRow cache_row_of(const Launch& launch, std::int64_t row) {
    const std::int64_t rows = launch.k_cache.len;
    CacheRow to;
    if (launch.slot_mapping.data != nullptr) {
        const std::int64_t slot = read(launch.slot_mapping, row);
        if (rows > 0 && slot >= 0 && slot / rows < launch.slots) to.slot = slot / rows, to.row = slot % rows;
    } else {
        std::int64_t sequence = row / launch.k.len, index = row % launch.k.len;
        if (launch.cu_seqlens_k.data != nullptr) {
            sequence = sequence_of_row(launch, row);
            if (sequence < 0) return to;
            index = row - read(launch.cu_seqlens_k, sequence);
        }
        const std::int64_t position = read(launch.kv_lengths, sequence) + index;
        to.position = position;
        if (position >= 0 && rows > 0 && launch.page_table.data != nullptr) {
            const bool in_table = position / rows < launch.page_table.count;
            const std::int64_t page = in_table ? read(launch.page_table, position / rows, sequence) : -1;
            if (page >= 0 && page < launch.slots) to.slot = page, to.row = position % rows;
        } else if (position >= 0 && position < rows) {
            const bool has_index = launch.cache_batch_index.data != nullptr;
            const std::int64_t slot = has_index ? read(launch.cache_batch_index, sequence) : sequence;
            if (slot >= 0 && slot < launch.slots) to.slot = slot, to.row = position;
        }
    }
    if (launch.positions.data != nullptr) to.position = read(launch.positions, row);
    return to;
}

template <class T>
__device__ __forceinline__ void copy_row(const HeadRow<T>& from, const HeadRow<T>& to, int dim, int lane) {
    for (int c = lane; c < dim; c += 32) to.at(c) = from.at(c);
}

/// The changes of a head's row: its dims, the pairs of the rotary embedding and which they are, the norm.
struct Change {
    int dim;
    int pairs;
    bool interleaved;
    bool norms;
    double norm_eps;
};

/// Norm and rotary embedding of a row of K or Q. `from` and `to` may be one row. weight(c): that of the norm for dim c.
/// rotary(n): cosine and sine of pair n.
template <class T, class Weight, class Rotary>
__device__ __forceinline__ void transform(const HeadRow<T>& from, const HeadRow<T>& to, const Change& change,
                                          const Weight& weight, const Rotary& rotary, int lane) {
    const int dim = change.dim;
    double factor = 1;
    if (change.norms) {
        double squares = 0;
        for (int c = lane; c < dim; c += 32) {
            const double x = as_double(from.at(c));
            squares += x * x;
        }
        factor = 1 / sqrt(warp_sum(squares) / dim + change.norm_eps);
        __syncwarp();
    }
    const auto element = [&](int c) {
        const double x = as_double(from.at(c));
        return change.norms ? x * (factor * weight(c)) : x;
    };
    for (int n = lane; n < change.pairs; n += 32) {
        const int a = change.interleaved ? 2 * n : n, b = a + (change.interleaved ? 1 : change.pairs);
        const double2 of_pair = rotary(n);
        const double first = element(a), second = element(b);
        round_to(to.at(a), __dsub_rn(__dmul_rn(first, of_pair.x), __dmul_rn(second, of_pair.y)));
        round_to(to.at(b), __dadd_rn(__dmul_rn(first, of_pair.y), __dmul_rn(second, of_pair.x)));
    }
    for (int c = 2 * change.pairs + lane; c < dim; c += 32) round_to(to.at(c), element(c));
}

/// The row of the rotary embedding's tables for a position.
__device__ __forceinline__ std::int64_t rotary_row(const Launch& launch, std::int64_t position) {
    const std::int64_t last = max(launch.rotary_positions - 1, std::int64_t{0});
    return min(max(position, std::int64_t{0}), last);
}

template <class T>
__device__ __forceinline__ void write_row(const HeadRow<T>& from, const HeadRow<T>& to, const Launch& launch,
                                          const Numbers& norm, std::int64_t position, int lane) {
    if (norm.data == nullptr && launch.pairs == 0) copy_row(from, to, launch.head_dim, lane);
    else {
        const std::int64_t row = rotary_row(launch, position);
        transform(
            from, to, Change{launch.head_dim, launch.pairs, launch.interleaved, norm.data != nullptr, launch.norm_eps},
            [&](int c) { return read<T>(norm, 0, c); },
            [&](int n) {
                return double2{read<T>(launch.cos, row, n), read<T>(launch.sin, row, n)};
            },
            lane);
    }
}

template <class T>
__global__ void append_kernel(const __grid_constant__ Launch launch) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    std::int64_t task = std::int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
    const std::int64_t of_keys = launch.k.count * launch.k.heads;
    if (task < of_keys) {
        const std::int64_t row = task / launch.k.heads;
        const int head = static_cast<int>(task % launch.k.heads);
        const CacheRow to = cache_row_of(launch, row);
        if (to.slot < 0) return;
        write_row(head_row<T>(launch.k, row, head), head_row<T>(launch.k_cache, to.slot, to.row, head), launch,
                  launch.k_norm, to.position, lane);
        copy_row(head_row<T>(launch.v, row, head), head_row<T>(launch.v_cache, to.slot, to.row, head),
                 launch.head_dim_v, lane);
        return;
    }
    task -= of_keys;
    if (task >= launch.q.count * launch.q.heads) return;
    const std::int64_t row = task / launch.q.heads;
    const int head = static_cast<int>(task % launch.q.heads);
    std::int64_t position = 0;
    if (launch.q_positions.data != nullptr) position = read(launch.q_positions, row);
    else if (launch.pairs > 0) position = cache_row_of(launch, row).position;
    write_row(head_row<T>(launch.q, row, head), head_row<T>(launch.q_out, row, head), launch, launch.q_norm, position,
              lane);
}

template <class T>
cudaError_t start_append(const Launch& launch, cudaStream_t stream) {
    constexpr int kThreads = 256;
    const std::int64_t tasks = launch.k.count * launch.k.heads + launch.q.count * launch.q.heads;
    const std::int64_t blocks = (tasks + kThreads / 32 - 1) / (kThreads / 32);
    if (blocks == 0) return cudaSuccess;
    append_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(launch);
    return cudaGetLastError();
}

}  // namespace tessera::cuda::append_rows
