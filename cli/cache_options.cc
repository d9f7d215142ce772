// SPDX-License-Identifier: Apache-2.0
//
// The options --kv-lengths and --pages, which make K and V a cache.
#include <fmt/format.h>

#include <algorithm>

#include "options.hpp"
#include "parse.hpp"

namespace tessera::cli {

/// Makes K and V a cache, whose capacity is a multiple of the page size.
void ShapeOptions::set_cache(Problem& problem) const {
    problem.kv_lengths = true;
    problem.total_kv = 0;
    problem.page_size = pages.empty() ? 0 : parse_size("--pages", pages);
}

/// Returns the Problem of --kv-lengths.
std::vector<Problem> ShapeOptions::cache_shapes() const {
    if (!batch.empty() || !len.empty() || !ragged.empty()) {
        throw UsageError("--kv-lengths",
                         "gives the batch and the keys: expected none of --batch, --len, --ragged with it");
    }
    Problem problem = sized(0, 0);
    set_cache(problem);
    problem.batch = 0;
    for (const auto& [q, kv] : sequences()) {
        ++problem.batch;
        problem.len_q = q;
        problem.len_kv = std::max(problem.len_kv, kv);
    }
    const std::int64_t longest = problem.len_kv;
    if (!len_kv.empty()) {
        problem.len_kv = parse_size("--len-kv", len_kv);
        if (problem.len_kv < longest)
            unexpected("--len-kv", fmt::format("a capacity of at least {}, the longest of --kv-lengths", longest),
                       len_kv);
    } else if (problem.page_size > 0) {
        problem.len_kv += (problem.page_size - longest % problem.page_size) % problem.page_size;
    }
    return {problem};
}

}  // namespace tessera::cli
