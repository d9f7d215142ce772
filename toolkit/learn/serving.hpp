// SPDX-License-Identifier: Apache-2.0
//
// Numbers that the exercises and pictures of lessons 17 to 22 share.
#pragma once

#include <cstdint>
#include <vector>

#include "walk/by_hand.hpp"

namespace tessera::learn {

/// The model whose cache the lessons count: the sizes of a Llama of 8 billion parameters, in bf16.
struct CacheSizes {
    std::int64_t layers = 32;
    std::int64_t heads_q = 32;
    std::int64_t heads_kv = 8;
    std::int64_t head_dim = 128;

    /// Bytes of K and V of one token, in all layers.
    double token_bytes() const { return static_cast<double>(2 * layers * heads_kv * head_dim * 2); }
};

/// The final m, l and O of one query whose scores and values over all keys are given; O is its first element. Base 2.
walk::HandRow row_over(const std::vector<std::int64_t>& scores, const std::vector<std::int64_t>& values);

/// The nearest number of the format e4m3 (OCP 8-bit floating point, section 5), ties to even. Positive numbers from
/// 2^-6 to 448 only.
double nearest_e4m3(double x);

/// Clocks that one multiprocessor takes for a tile of 128 queries x 128 keys, forward. Throws Error(invalid_argument)
/// naming "machine" for an unknown one.
struct TileClocks {
    double gemms = 0;
    double exponentials = 0;
};
TileClocks tile_clocks(const char* machine, int head_dim);

/// The attention block of one layer in a decode step of one sequence: its sizes, in bf16.
struct BlockSizes {
    std::int64_t hidden = 2048;
    std::int64_t heads_q = 32;
    std::int64_t heads_kv = 8;
    std::int64_t head_dim = 64;
    std::int64_t keys = 1024;

    double weight_bytes() const {
        return 2 * static_cast<double>(hidden * head_dim * (heads_q + 2 * heads_kv) + heads_q * head_dim * hidden);
    }
    double cache_bytes() const { return 2 * static_cast<double>(2 * keys * heads_kv * head_dim); }
};

/// Microseconds that the block of a 1B model (the sizes above) took on an H200: src/cuda/block/PERFORMANCE.md.
struct MeasuredBlock {
    double chain = 27.7;   ///< five kernels in a CUDA graph
    double launch = 19.6;  ///< one kernel in a CUDA graph
    double floor = 5.3;    ///< its bytes at the rate of a kernel that only reads
    /// Times from the first instruction at which the median thread block ends a piece of work, and at which the results
    /// of other thread blocks have come that the next piece needs.
    double qkv_written = 7.0, q_ready = 9.2, splits_written = 10.9, splits_ready = 14.6, o_written = 15.0,
           o_ready = 16.5, end = 18.4;

    double waiting() const { return (q_ready - qkv_written) + (splits_ready - splits_written) + (o_ready - o_written); }
};

}  // namespace tessera::learn
