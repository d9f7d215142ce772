// SPDX-License-Identifier: Apache-2.0
//
// The score matrix of one head, cut into tiles: the key tiles that a query tile touches, and the reverse. All answers
// come from the Band, as in the kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "schedule/step.hpp"

namespace tessera::schedule {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

struct Grid {
    Band band;
    Tile block;
    /// Ends a row's last tile at the last key that its queries see. Forward kernels do so; backward ones, whose outer
    /// loop is over keys, do not.
    bool trimmed = true;

    std::int64_t rows() const { return ceil_div(band.len_q, block.block_q); }
    std::int64_t columns() const { return ceil_div(band.len_kv, block.block_kv); }

    Range queries(std::int64_t i) const { return {i * block.block_q, std::min(band.len_q, (i + 1) * block.block_q)}; }
    Range keys(std::int64_t j) const { return {j * block.block_kv, std::min(band.len_kv, (j + 1) * block.block_kv)}; }

    /// Tiles of keys that row i touches.
    Range columns_of(std::int64_t i) const { return tiles(seen_by(i), block.block_kv); }
    /// Tiles of queries that column j touches.
    Range rows_of(std::int64_t j) const {
        const Range k = keys(j);
        return tiles(band.q_range(k.begin, k.end), block.block_q);
    }

    /// Keys of tile (i, j) that are computed.
    Range computed(std::int64_t i, std::int64_t j) const {
        const Range k = keys(j);
        return {k.begin, trimmed ? std::min(k.end, seen_by(i).end) : k.end};
    }

    Coverage coverage(std::int64_t i, std::int64_t j) const {
        const Range q = queries(i);
        const Range k = computed(i, j);
        return band.coverage(q.begin, q.end, k.begin, k.end);
    }

    /// Key tiles of row i that hold visible pairs only; with `ends`, they also don't extend beyond the last key.
    Range uncut_columns(std::int64_t i, bool ends = true) const {
        const Range q = queries(i);
        return whole({q.end - 1 + band.low, q.begin + band.high + 1}, band.len_kv, block.block_kv, ends);
    }
    /// Query tiles of column j that hold visible pairs only; with `ends`, they also don't extend beyond the last query.
    Range uncut_rows(std::int64_t j, bool ends = true) const {
        const Range k{j * block.block_kv, (j + 1) * block.block_kv};
        if (ends && k.end > band.len_kv) return {};
        return whole({keys(j).end - 1 - band.high, k.begin - band.low + 1}, band.len_q, block.block_q, ends);
    }

    /// Visible pairs of tile (i, j), counted query by query.
    std::int64_t pairs(std::int64_t i, std::int64_t j) const {
        const Range k = keys(j);
        std::int64_t sum = 0;
        for (std::int64_t q = queries(i).begin; q < queries(i).end; ++q) {
            const Range seen = band.row(q);
            sum += Range{std::max(seen.begin, k.begin), std::min(seen.end, k.end)}.size();
        }
        return sum;
    }

    /// The number of equal rows from row i on: whole tiles whose queries all see every key, or all see none.
    std::int64_t equal_rows_from(std::int64_t i) const {
        return alike(i, block.block_q, band.len_q, band.len_kv, band.low, band.high);
    }
    /// The number of equal columns from column j on.
    std::int64_t equal_columns_from(std::int64_t j) const {
        return alike(j, block.block_kv, band.len_kv, band.len_q, -band.high, -band.low);
    }

    Range seen_by(std::int64_t i) const {
        const Range q = queries(i);
        return band.kv_range(q.begin, q.end);
    }

    /// Rows (keys or queries) of tiles `range`, cut at `length`.
    static std::int64_t extent(const Range& range, std::int64_t size, std::int64_t length) {
        return range.empty() ? 0 : std::min(range.end * size, length) - range.begin * size;
    }

 private:
    static Range tiles(const Range& seen, std::int64_t size) {
        return seen.empty() ? Range{} : Range{seen.begin / size, ceil_div(seen.end, size)};
    }

    /// Tiles that lie in `range`, a part of [0, length). Without `ends`, the last one may extend beyond the end.
    static Range whole(const Range& range, std::int64_t length, std::int64_t size, bool ends) {
        const std::int64_t begin = ceil_div(std::max<std::int64_t>(range.begin, 0), size);
        const bool to_the_end = range.end >= length && !ends;
        const std::int64_t end = to_the_end ? ceil_div(length, size) : std::min(range.end, length) / size;
        return range.end <= 0 || end <= begin ? Range{} : Range{begin, end};
    }

    /// The number of equal tiles from `tile` on, if index x of [0, length) sees x + low .. x + high of the `others`.
    static std::int64_t alike(std::int64_t tile, std::int64_t size, std::int64_t length, std::int64_t others,
                              std::int64_t low, std::int64_t high) {
        const Range whole[] = {{others - 1 - high, std::min(length, 1 - low)},  // sees all of them
                               {0, low > high ? length : std::min(length, -high)},
                               {others - low, length}};
        for (const Range& same : whole) {
            if (tile * size >= same.begin && (tile + 1) * size <= same.end) return same.end / size - tile;
        }
        return 1;
    }
};

/// Calls body(i, times) for every run of equal rows; i is its first. A sum over rows then takes as many steps as the
/// mask's edges cross rows, whatever the length.
template <class Body>
void for_each_run_of_rows(const Grid& grid, const Body& body) {
    for (std::int64_t i = 0, times = 0; i < grid.rows(); i += times) body(i, times = grid.equal_rows_from(i));
}
template <class Body>
void for_each_run_of_columns(const Grid& grid, const Body& body) {
    for (std::int64_t j = 0, times = 0; j < grid.columns(); j += times) body(j, times = grid.equal_columns_from(j));
}

/// The sum over all queries of the keys that they see. In closed form: ramp(high + 1) - ramp(low), with ramp(x) = sum
/// over q of clamp(q + x, 0, len_kv).
std::int64_t visible_pairs(const Band& band);

/// Tiles of row i that hold visible pairs only, in closed form. They run from the first tile that the last query of the
/// row sees whole to the last tile that the first query sees whole.
std::int64_t full_tiles(const Grid& grid, std::int64_t i);

/// Distinguishes first reads from repeated ones among neighbours that share reads. Ranges are in ascending order, so
/// the end of the last read is enough.
class FirstReads {
 public:
    /// `tiles_at_once` neighbours share a read; 0: all of them.
    explicit FirstReads(std::int64_t tiles_at_once) : tiles_at_once_(tiles_at_once) {}
    /// Begins neighbour `index` of the outer loop.
    void begin(std::int64_t index) {
        if (tiles_at_once_ > 0 && index % tiles_at_once_ == 0) end_ = 0;
    }
    /// Is tile `index` read for the first time?
    bool first(std::int64_t index) {
        if (index < end_) return false;
        end_ = index + 1;
        return true;
    }

 private:
    std::int64_t tiles_at_once_;
    std::int64_t end_ = 0;
};

}  // namespace tessera::schedule
