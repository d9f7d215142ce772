// SPDX-License-Identifier: Apache-2.0
#include "check/case_cache.hpp"

#include <cmath>

#include "check/packed.hpp"
#include "core/numeric.hpp"

namespace tessera::check {
namespace {

/// Pages of a sequence; a slot counts as one.
std::int64_t pages_of(const Problem& p) { return p.page_size > 0 ? p.len_kv / p.page_size : 1; }

}  // namespace

GuardedTensor cache_integers(const Case& c, const std::vector<std::int64_t>& values, std::uint64_t layout_seed) {
    GuardedTensor result(DType::int32, {c.problem.batch}, c.layout, layout_seed);
    for (std::int64_t b = 0; b < c.problem.batch; ++b)
        *result.view().at<std::int32_t>(b) = static_cast<std::int32_t>(values[static_cast<std::size_t>(b)]);
    return result;
}

GuardedTensor cache_page_table(const Case& c, std::uint64_t layout_seed) {
    const Problem& p = c.problem;
    const std::int64_t pages = pages_of(p);
    GuardedTensor result(DType::int32, {p.batch, pages}, c.layout, layout_seed);
    for (std::int64_t b = 0; b < p.batch; ++b) {
        for (std::int64_t n = 0; n < pages; ++n) {
            const bool has_keys = n * p.page_size < c.lengths_kv[static_cast<std::size_t>(b)];
            const std::int64_t page = has_keys ? p.batch * pages - 1 - (b * pages + n) : -1;
            *result.view().at<std::int32_t>(b, n) = static_cast<std::int32_t>(page);
        }
    }
    return result;
}

void poison_unused_rows(const Case& c, const TensorView& t) {
    const std::int64_t rows = t.shape[1];
    for_each_element(t, [&](std::int64_t flat, std::byte* element) {
        const std::int64_t row = flat / (t.shape[2] * t.shape[3]);
        const std::int64_t place = c.problem.page_size > 0 ? t.shape[0] - 1 - row / rows : row / rows;
        const auto b = static_cast<std::size_t>(place / pages_of(c.problem));
        const std::int64_t key = place % pages_of(c.problem) * rows + row % rows;
        const bool used = key < c.lengths_kv[b] && (c.padding.empty() || key >= c.padding[b]);
        if (!used) store_from_double(element, t.dtype, std::nan(""));
    });
}

}  // namespace tessera::check
