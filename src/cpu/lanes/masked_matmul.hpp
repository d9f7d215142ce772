// SPDX-License-Identifier: Apache-2.0
//
// The product of a tile of weights, or of their gradient, with rows of keys or queries. In tiles that the mask cuts a
// hidden pair must not touch the result: its weight is 0, but 0 times a NaN or an infinity is not, and tiles with such
// rows take the slow twin.
#pragma once

#include "cpu/lanes/words.hpp"

namespace tessera::cpu::lanes {

/// K^T or V^T times [keys, lanes].
inline void matmul_over_keys(const Product& product, const Place& place, Coverage coverage) {
    if (coverage == Coverage::full) matmul(product);
    else if (all_finite(product.a, product.a_k, product.k, product.m)) matmul_visible_keys(product, place);
    else matmul_hidden_keys(product, place);
}

/// [keys, lanes] times Q or dO.
inline void matmul_over_queries(const Product& product, const Place& place, Coverage coverage) {
    if (coverage == Coverage::full) matmul(product);
    else if (all_finite(product.b, product.b_stride, product.k, product.n)) matmul_visible_queries(product, place);
    else matmul_hidden_queries(product, place);
}

/// K Q^T or V dO^T: a tile of scores, or of their gradient.
inline void matmul_scores(const Product& product, const Place& place, Coverage coverage) {
    if (coverage == Coverage::full) matmul(product);
    else matmul_visible_scores(product, place);
}

}  // namespace tessera::cpu::lanes
