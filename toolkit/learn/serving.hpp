// SPDX-License-Identifier: Apache-2.0
//
// Numbers that the exercises and pictures of lessons 17 to 21 share.
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

}  // namespace tessera::learn
