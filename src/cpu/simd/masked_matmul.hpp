// SPDX-License-Identifier: Apache-2.0
//
// GEMMs of a tile of weights, or of their gradient, with rows of keys or queries. In a tile that the mask cuts, a
// hidden pair must not reach the result. Its weight is 0, but 0 times NaN or infinity is NaN, so tiles with such rows
// take the slow variant.
#pragma once

#include <algorithm>

#include "cpu/simd/primitives.hpp"

namespace tessera::cpu::simd {

/// K^T or V^T times [keys, lanes].
inline void matmul_over_keys(const Product& product, const TilePosition& position, Coverage coverage) {
    if (coverage == Coverage::full) matmul(product);
    else if (all_finite(product.a, product.a_k, product.k, product.m)) matmul_visible_keys(product, position);
    else matmul_hidden_keys(product, position);
}

/// [keys, lanes] times Q or dO.
inline void matmul_over_queries(const Product& product, const TilePosition& position, Coverage coverage) {
    if (coverage == Coverage::full) matmul(product);
    else if (all_finite(product.b, product.b_stride, product.k, product.n)) matmul_visible_queries(product, position);
    else matmul_hidden_queries(product, position);
}

/// K Q^T or V dO^T: a tile of scores, or of their gradient. Long sums are cut after kLongestSum products: when all
/// products are alike, each addition rounds to the same side and the error grows linearly with the length.
inline void matmul_scores(const Product& product, const TilePosition& position, Coverage coverage) {
    constexpr std::int64_t kLongestSum = 64;
    Product part = product;
    for (std::int64_t done = 0; done < product.k; done += kLongestSum) {
        part.k = std::min(kLongestSum, product.k - done);
        part.a = product.a + done * product.a_k;
        part.b = product.b + done * product.b_stride;
        if (done > 0) part.into = Into::add;
        if (coverage == Coverage::full) matmul(part);
        else matmul_visible_scores(part, position);
    }
}

}  // namespace tessera::cpu::simd
