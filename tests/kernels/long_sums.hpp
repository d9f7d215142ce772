// SPDX-License-Identifier: Apache-2.0
//
// Problems whose backward has long sums. All terms of a sum are equal, so no sum cancels, and its roundings all go the
// same way.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/support.hpp"

namespace tessera::check {

inline constexpr std::int64_t kMillion = 1'000'003;

/// Every row becomes the first one, without its signs.
inline void make_rows_equal(Tensor& t) {
    const std::int64_t columns = t.view.shape[3];
    std::vector<double> first;
    for (std::int64_t c = 0; c < columns; ++c) first.push_back(std::abs(t.get(0, 0, 0, c)));
    for_each_element(t.view, [&](std::int64_t flat, std::byte* element) {
        store_from_double(element, t.view.dtype, first[static_cast<std::size_t>(flat % columns)]);
    });
}

/// dK and dV are sums over a million queries.
inline Attention many_queries(DType dtype) {
    Attention a(make_problem(1, kMillion, 3, 1, 1, 8, dtype));
    make_rows_equal(a.q);
    make_rows_equal(a.d_o);
    return a;
}

/// O and dQ are sums over so many keys.
inline Attention many_keys(DType dtype, std::int64_t head_dim = 8, std::int64_t keys = kMillion) {
    Attention a(make_problem(1, 3, keys, 1, 1, head_dim, dtype));
    make_rows_equal(a.k);
    make_rows_equal(a.v);
    a.dlse = a.lse;
    a.dlse.fill_value(1);  // without it dS of a row sums to 0, and dQ to almost 0
    return a;
}

}  // namespace tessera::check
