// SPDX-License-Identifier: Apache-2.0
//
// Elements of S that a CPU kernel computes: those that a mask leaves, filled up at the edges to what is computed at a
// time (cpu/README.md).
#include "model/cpu.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {
namespace {

constexpr std::int64_t kStrip = 32;  // keys

std::int64_t filled(std::int64_t n, std::int64_t to) { return schedule::ceil_div(n, to) * to; }

/// Of a head in lanes: a tile that a mask cuts takes as long as a whole one up to the last key that is seen.
std::int64_t in_lanes(const schedule::Grid& grid) {
    std::int64_t sum = 0;
    schedule::for_each_run_of_rows(grid, [&](std::int64_t i, std::int64_t alike) {
        const Range columns = grid.columns_of(i);
        if (columns.empty()) return;
        const std::int64_t end = grid.computed(i, columns.end - 1).end;
        sum += alike * filled(grid.queries(i).size(), kLanes) * (end - columns.begin * grid.block.block_kv);
    });
    return sum;
}

/// Of a head on a matrix unit: panels of queries, each against the strips of keys that it sees some of.
std::int64_t in_panels(const Band& band) {
    const schedule::Grid panels{band, {kMatrixPanel, kStrip}};
    std::int64_t sum = 0;
    schedule::for_each_run_of_rows(panels, [&](std::int64_t i, std::int64_t alike) {
        sum += alike * filled(panels.queries(i).size(), kLanes) * panels.columns_of(i).size() * kStrip;
    });
    return sum;
}

/// The same in the backward: strips of keys, each against the queries that see some of it.
std::int64_t in_strips(const Band& band) {
    const schedule::Grid strips{band, {kStrip, kStrip}, false};
    std::int64_t blocks = 0;
    schedule::for_each_run_of_columns(
        strips, [&](std::int64_t j, std::int64_t alike) { blocks += alike * strips.rows_of(j).size(); });
    return blocks * kStrip * kStrip;
}

}  // namespace

std::int64_t computed_elements(const schedule::Workload& w, bool on_matrix_unit) {
    const bool forward = w.pass == Pass::forward;
    std::int64_t sum = 0;
    for (const auto& [lengths, times] : schedule::distinct_members(w)) {
        const Band band = w.problem.mask.bind(lengths.first, lengths.second);
        const std::int64_t of_head = !on_matrix_unit ? in_lanes({band, w.tile, forward})
                                     : forward       ? in_panels(band)
                                                     : in_strips(band);
        sum += times * w.problem.heads_q * of_head;
    }
    return sum;
}

}  // namespace tessera::model
