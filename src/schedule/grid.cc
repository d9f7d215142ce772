// SPDX-License-Identifier: Apache-2.0
#include "schedule/grid.hpp"

namespace tessera::schedule {
namespace {

/// Sum over q in [0, len_q) of clamp(q + offset, 0, len_kv).
std::int64_t ramp(std::int64_t offset, std::int64_t len_q, std::int64_t len_kv) {
    // Queries below `rise` give 0, those from `flat` on give len_kv, those between give q + offset.
    const std::int64_t rise = std::clamp<std::int64_t>(-offset, 0, len_q);
    const std::int64_t flat = std::clamp<std::int64_t>(len_kv - offset, rise, len_q);
    const std::int64_t n = flat - rise;
    return n * (rise + offset) + n * (n - 1) / 2 + (len_q - flat) * len_kv;
}

}  // namespace

std::int64_t visible_pairs(const Band& band) {
    if (band.low > band.high) return 0;
    return ramp(band.high + 1, band.len_q, band.len_kv) - ramp(band.low, band.len_q, band.len_kv);
}

std::int64_t full_tiles(const Grid& grid, std::int64_t i) {
    const Range q = grid.queries(i);
    const Range seen = grid.seen_by(i);
    const Range touched = grid.columns_of(i);
    if (touched.empty()) return 0;
    const std::int64_t size = grid.block.block_kv;
    // Keys that every query of the row sees: [last query + low, first query + high].
    const std::int64_t common_begin = std::max<std::int64_t>(q.end - 1 + grid.band.low, 0);
    const std::int64_t common_end = std::min(q.begin + grid.band.high + 1, grid.band.len_kv);
    if (common_end <= 0) return 0;
    const std::int64_t last = grid.trimmed ? seen.end : std::min(touched.end * size, grid.band.len_kv);
    const std::int64_t begin = std::max(touched.begin, ceil_div(common_begin, size));
    const std::int64_t end = last <= common_end ? touched.end : common_end / size;
    return std::max<std::int64_t>(0, end - begin);
}

}  // namespace tessera::schedule
