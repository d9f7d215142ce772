// SPDX-License-Identifier: Apache-2.0
//
// The elements of S that a CPU kernel computes: the visible ones, padded at the edges to the step of the computation
// (cpu/README.md).
#include "model/cpu.hpp"
#include "model/cpu_tasks.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {
namespace {

constexpr std::int64_t kStrip = 32;  // keys
constexpr std::int64_t kKeysOfBlock = 512,
                       kQueriesOfBlock = 128;  // forward: keys of a step; backward: queries of a block

std::int64_t filled(std::int64_t n, std::int64_t to) { return schedule::ceil_div(n, to) * to; }

/// Computed elements of a head on the SIMD path. A tile that a mask cuts counts whole, up to the last visible key.
std::int64_t on_simd_path(const schedule::Grid& grid) {
    std::int64_t sum = 0;
    schedule::for_each_run_of_rows(grid, [&](std::int64_t i, std::int64_t repeats) {
        const Range columns = grid.columns_of(i);
        if (columns.empty()) return;
        const std::int64_t end = grid.computed(i, columns.end - 1).end;
        sum += repeats * filled(grid.queries(i).size(), kLanes) * (end - columns.begin * grid.block.block_kv);
    });
    return sum;
}

/// Computed elements of a head on a matrix unit: panels of queries, each with every strip of keys that has a key
/// visible to it.
std::int64_t in_panels(const Band& band) {
    const schedule::Grid panels{band, {kMatrixPanel, kStrip}};
    std::int64_t sum = 0;
    schedule::for_each_run_of_rows(panels, [&](std::int64_t i, std::int64_t repeats) {
        sum += repeats * filled(panels.queries(i).size(), kLanes) * panels.columns_of(i).size() * kStrip;
    });
    return sum;
}

/// Computed elements of a head in the backward: strips of keys, each with the queries that see a key of it.
std::int64_t in_strips(const Band& band) {
    const schedule::Grid strips{band, {kStrip, kStrip}, false};
    std::int64_t blocks = 0;
    schedule::for_each_run_of_columns(
        strips, [&](std::int64_t j, std::int64_t repeats) { blocks += repeats * strips.rows_of(j).size(); });
    return blocks * kStrip * kStrip;
}

/// Masked elements of a head on a matrix unit: blocks of 512 keys that a panel of queries doesn't see all of, or whose
/// last strip is partial (`plain` in cpu/fa2/matrix/forward.cc).
std::int64_t masked_in_panels(const Band& band) {
    const schedule::Grid blocks{band, {kMatrixPanel, kKeysOfBlock}};
    std::int64_t sum = 0;
    schedule::for_each_run_of_rows(blocks, [&](std::int64_t i, std::int64_t repeats) {
        const Range all = blocks.columns_of(i), uncut = overlap(blocks.uncut_columns(i, false), all);
        const Range seen = blocks.seen_by(i);
        const auto keys_of = [&](std::int64_t j) {
            return Range{std::max(blocks.keys(j).begin, seen.begin) / kStrip * kStrip, blocks.computed(i, j).end};
        };
        const auto add = [&](std::int64_t j) {
            sum += repeats * filled(blocks.queries(i).size(), kLanes) * filled(keys_of(j).size(), kStrip);
        };
        for (std::int64_t j = all.begin; j < (uncut.empty() ? all.end : uncut.begin); ++j) add(j);
        if (uncut.empty()) return;
        if (keys_of(uncut.end - 1).size() % kStrip != 0) add(uncut.end - 1);
        for (std::int64_t j = uncut.end; j < all.end; ++j) add(j);
    });
    return sum;
}

/// Masked elements of a head in the backward: blocks of 128 queries that don't all see a strip of keys, or end within
/// 32.
std::int64_t masked_in_strips(const Band& band) {
    const schedule::Grid blocks{band, {kQueriesOfBlock, kStrip}, false};
    std::int64_t sum = 0;
    schedule::for_each_run_of_columns(blocks, [&](std::int64_t j, std::int64_t repeats) {
        const Range all = blocks.rows_of(j), uncut = overlap(blocks.uncut_rows(j, false), all);
        const Range keys = blocks.keys(j), seen = band.q_range(keys.begin, keys.end);
        const auto queries_of = [&](std::int64_t i) { return overlap(blocks.queries(i), seen); };
        const auto add = [&](std::int64_t i) {
            const Range q = queries_of(i);
            sum += repeats * kStrip * (filled(q.end, kStrip) - q.begin / kStrip * kStrip);
        };
        for (std::int64_t i = all.begin; i < (uncut.empty() ? all.end : uncut.begin); ++i) add(i);
        if (uncut.empty()) return;
        if (queries_of(uncut.end - 1).end % kStrip != 0) add(uncut.end - 1);
        for (std::int64_t i = uncut.end; i < all.end; ++i) add(i);
    });
    return sum;
}

}  // namespace

std::int64_t masked_elements(const schedule::Workload& w) {
    std::int64_t sum = 0;
    for (const auto& [lengths, times] : schedule::distinct_sequences(w)) {
        const Band band = w.problem.mask.bind(lengths.first, lengths.second);
        sum += times * w.problem.heads_q * (w.pass == Pass::forward ? masked_in_panels(band) : masked_in_strips(band));
    }
    return sum;
}

std::int64_t elements_of_few_queries(const Problem& p, const schedule::Workload& w) {
    std::int64_t sum = 0;
    for (const auto& [lengths, times] : schedule::distinct_sequences(w)) {
        const Band band = p.mask.bind(lengths.first, lengths.second);
        sum += times * p.heads_q * lengths.first * band.kv_range(0, lengths.first).size();
    }
    return sum;
}

std::int64_t computed_elements(const schedule::Workload& w, bool on_matrix_unit) {
    const bool forward = w.pass == Pass::forward;
    std::int64_t sum = 0;
    for (const auto& [lengths, times] : schedule::distinct_sequences(w)) {
        const Band band = w.problem.mask.bind(lengths.first, lengths.second);
        const std::int64_t of_head = !on_matrix_unit ? on_simd_path({band, w.tile, forward})
                                     : forward       ? in_panels(band)
                                                     : in_strips(band);
        sum += times * w.problem.heads_q * of_head;
    }
    return sum;
}

}  // namespace tessera::model
