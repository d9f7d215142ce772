// SPDX-License-Identifier: Apache-2.0
#include "check/case_cache.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "check/packed.hpp"
#include "core/numeric.hpp"

namespace tessera::check {
namespace {

/// Pages of a sequence; a slot counts as one.
std::int64_t pages_of(const Problem& p) { return p.page_size > 0 ? p.len_kv / p.page_size : 1; }

/// The rows of a sequence in the cache, counted from its first page, that some query sees.
Range seen_rows(const Case& c, std::int64_t sequence) {
    const Problem& p = c.problem;
    const auto b = static_cast<std::size_t>(sequence);
    const std::int64_t end = std::clamp<std::int64_t>(c.lengths_kv[b], 0, p.len_kv);
    const std::int64_t first = c.padding.empty() ? 0 : std::clamp<std::int64_t>(c.padding[b], 0, end);
    const std::int64_t queries = p.ragged ? c.lengths_q[b] : p.len_q;
    const Range keys = p.mask.bind(queries, end - first).kv_range(0, queries);
    return {first + keys.begin, first + keys.end};
}

}  // namespace

CacheStrides strides_of(CacheLayout cache_layout, std::int64_t count, std::int64_t rows, std::int64_t heads,
                        std::int64_t dim, std::int64_t dim_v) {
    const std::int64_t of_k = rows * heads * dim, of_v = rows * heads * dim_v, both = of_k + of_v;
    CacheStrides s{.first_v = count * of_k, .elements = count * both};
    switch (cache_layout) {
        case CacheLayout::separate:
            s.k = {of_k, heads * dim, dim, 1};
            s.v = {of_v, heads * dim_v, dim_v, 1};
            break;
        case CacheLayout::side_by_side:
            s.k = s.v = {both, heads * (dim + dim_v), dim + dim_v, 1};
            s.first_v = dim;
            break;
        case CacheLayout::heads_first:
            s.k = {of_k, dim, rows * dim, 1};
            s.v = {of_v, dim_v, rows * dim_v, 1};
            break;
        case CacheLayout::layers:
            s.k = {3 * both, heads * dim, dim, 1};
            s.v = {3 * both, heads * dim_v, dim_v, 1};
            s.first_k = both;
            s.first_v = both + of_k;
            s.elements = 3 * count * both;
            break;
        case CacheLayout::interleaved_pages:
            s.k = {both, heads * dim, dim, 1};
            s.v = {both, heads * dim_v, dim_v, 1};
            s.first_v = of_k;
            break;
    }
    return s;
}

std::int64_t cache_count(const Problem& p) { return p.batch * pages_of(p) + (p.page_size > 0 ? 1 : 0); }

std::array<GuardedTensor, 2> cache_in_one_memory(const Case& c, std::uint64_t layout_seed) {
    const Problem& p = c.problem;
    const std::int64_t count = cache_count(p), rows = p.page_size > 0 ? p.page_size : p.len_kv;
    const CacheStrides s = strides_of(c.cache_layout, count, rows, p.heads_kv, p.head_dim, p.head_dim_v);
    const Random random(layout_seed, 0xCAC4E);
    std::uint64_t drawn = 0;
    const auto view = [&](std::int64_t columns, std::array<std::int64_t, 4> strides) {
        TensorView t = dense_view(nullptr, p.dtype, {count, rows, p.heads_kv, columns});
        for (std::size_t d = 0; d < 3; ++d)
            if (t.shape[d] == 1) strides[d] = static_cast<std::int64_t>(random.bits(drawn++) % 3) * 1'234'567;
        std::copy(strides.begin(), strides.end(), t.strides.begin());
        return t;
    };
    GuardedTensor k(view(p.head_dim, s.k), s.first_k, s.elements);
    GuardedTensor v = k.beside(view(p.head_dim_v, s.v), s.first_v);
    return {std::move(k), std::move(v)};
}

GuardedTensor cache_integers(const Case& c, const std::vector<std::int64_t>& values, std::uint64_t layout_seed) {
    GuardedTensor result(DType::int32, {c.problem.batch}, c.layout, layout_seed);
    for (std::int64_t b = 0; b < c.problem.batch; ++b)
        *result.view().at<std::int32_t>(b) = static_cast<std::int32_t>(values[static_cast<std::size_t>(b)]);
    return result;
}

GuardedTensor cache_page_table(const Case& c, std::uint64_t layout_seed) {
    constexpr std::int32_t kJunk[] = {-1, 0, 1'000'000, std::numeric_limits<std::int32_t>::min()};
    const Problem& p = c.problem;
    const std::int64_t pages = pages_of(p);
    const Random random(layout_seed, 0x7AB1E);
    GuardedTensor result(DType::int32, {p.batch, pages}, c.layout, layout_seed);
    for (std::int64_t b = 0; b < p.batch; ++b) {
        const Range seen = seen_rows(c, b);
        for (std::int64_t n = 0; n < pages; ++n) {
            const std::int64_t index = b * pages + n, first = n * p.page_size;
            const bool needed = !seen.empty() && first < seen.end && first + p.page_size > seen.begin;
            *result.view().at<std::int32_t>(b, n) = needed ? static_cast<std::int32_t>(p.batch * pages - index)
                                                           : kJunk[random.bits(static_cast<std::uint64_t>(index)) % 4];
        }
    }
    return result;
}

void poison_unused_rows(const Case& c, const TensorView& t, std::uint64_t seed) {
    constexpr double kPoisons[] = {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
                                   3e38};
    const double poison = kPoisons[Random(seed, 0x9015).bits(0) % 3];
    const Problem& p = c.problem;
    const std::int64_t rows = t.shape[1], pages = pages_of(p);
    std::vector<Range> seen;
    for (std::int64_t b = 0; b < p.batch; ++b) seen.push_back(seen_rows(c, b));
    for_each_element(t, [&](std::int64_t flat, std::byte* element) {
        const std::int64_t row = flat / (t.shape[2] * t.shape[3]);
        const std::int64_t place = p.page_size > 0 ? p.batch * pages - row / rows : row / rows;
        const std::int64_t b = place / pages, key = place % pages * rows + row % rows;
        const bool used = b < p.batch && key >= seen[static_cast<std::size_t>(b)].begin &&
                          key < seen[static_cast<std::size_t>(b)].end;
        if (!used) store_from_double(element, t.dtype, poison);
    });
}

}  // namespace tessera::check
