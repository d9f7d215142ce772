// SPDX-License-Identifier: Apache-2.0
#include "schedule/step.hpp"

#include "schedule/emit.hpp"

namespace tessera {

Work& Work::operator+=(const Work& other) {
    bytes.dram += other.bytes.dram;
    bytes.l2 += other.bytes.l2;
    bytes.shared += other.bytes.shared;
    flop += other.flop;
    exps += other.exps;
    return *this;
}

Work operator*(std::int64_t times, const Work& work) {
    return {.bytes = {times * work.bytes.dram, times * work.bytes.l2, times * work.bytes.shared},
            .flop = times * work.flop,
            .exps = times * work.exps};
}

Cost& Cost::operator+=(const Cost& other) {
    work += other.work;
    full += other.full;
    partial += other.partial;
    skipped += other.skipped;
    elements += other.elements;
    pairs += other.pairs;
    return *this;
}

Cost operator*(std::int64_t times, const Cost& cost) {
    return {times * cost.work,    times * cost.full,     times * cost.partial,
            times * cost.skipped, times * cost.elements, times * cost.pairs};
}

}  // namespace tessera

namespace tessera::schedule {

const char* name_of(Operation operation) {
    constexpr const char* kNames[] = {
        "load Q",       "load K",       "load V",        "S = Q K^T",    "softmax",     "O += P V",   "store O",
        "init O, m, l", "load O, m, l", "store O, m, l", "store S",      "load S",      "store P",    "load P",
        "D = dO . O",   "load dO",      "P again",       "dV += P^T dO", "dP = dO V^T", "dQ += dS K", "dK += dS^T Q",
        "add dQ",       "store dS",     "load dS",       "store dK, dV", "store dQ"};
    return kNames[static_cast<std::size_t>(operation)];
}

Cost tile_counts(const Grid& grid) {
    Cost counts;
    for_each_run_of_rows(grid, [&](std::int64_t i, std::int64_t times) {
        const Range columns = grid.columns_of(i);
        const std::int64_t full = full_tiles(grid, i);
        const std::int64_t begin = columns.begin * grid.block.block_kv;
        const std::int64_t end =
            grid.trimmed ? grid.seen_by(i).end : std::min(columns.end * grid.block.block_kv, grid.band.len_kv);
        counts.full += times * full;
        counts.partial += times * (columns.size() - full);
        counts.skipped += times * (grid.columns() - columns.size());
        counts.elements += columns.empty() ? 0 : times * grid.queries(i).size() * (end - begin);
    });
    counts.pairs = visible_pairs(grid.band);
    return counts;
}

std::int64_t first_reads_of_keys(const Workload& w, const Grid& grid) {
    const std::int64_t all = std::max<std::int64_t>(grid.rows(), 1);
    const std::int64_t at_once = w.residency.keys ? all : std::min(w.residency.tiles_at_once, all);
    const Grid together{grid.band, {grid.block.block_q * at_once, grid.block.block_kv}};
    std::int64_t keys = 0;
    for_each_run_of_rows(together, [&](std::int64_t i, std::int64_t times) {
        keys += times * Grid::extent(together.columns_of(i), grid.block.block_kv, grid.band.len_kv);
    });
    return (w.residency.keys ? 1 : w.problem.group()) * keys;
}

RowOfTiles row_of_tiles(const Workload& w, const Grid& grid, std::int64_t i) {
    const std::int64_t size = grid.block.block_kv;
    const Range queries = grid.queries(i);
    const Range columns = grid.columns_of(i);
    RowOfTiles row{.rows = queries.size(), .readers = readers(w, queries), .tiles = columns.size()};
    if (columns.empty()) return row;
    const std::int64_t end = grid.trimmed ? grid.seen_by(i).end : std::min(columns.end * size, grid.band.len_kv);
    row.loaded = Grid::extent(columns, size, grid.band.len_kv);
    row.computed = end - columns.begin * size;
    // All tiles but the last one are whole.
    const std::int64_t rows = order_of(w.schedule).rows_per_reader;
    row.key_readers = (row.tiles - 1) * ceil_div(size, rows) + ceil_div(end - (columns.end - 1) * size, rows);
    return row;
}

}  // namespace tessera::schedule
