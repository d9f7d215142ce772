// SPDX-License-Identifier: Apache-2.0
#include "model/stage.hpp"

#include <algorithm>
#include <functional>

#include "schedule/grid.hpp"

namespace tessera::model {
namespace {

/// Clocks of each thread block of a sequence's head, in the order of the tiles of queries (backward: of keys).
std::vector<double> blocks_of_head(const Stage& s, std::int64_t len_q, std::int64_t len_kv) {
    const schedule::Grid grid{s.problem.mask.bind(len_q, len_kv), s.tile, s.rows_outer};
    const std::int64_t most = schedule::ceil_div(grid.columns(), s.splits);  // inner tiles of a split
    const std::int64_t heads = s.heads_of_block();
    std::vector<double> blocks;
    for (std::int64_t i = 0; i < (s.rows_outer ? grid.rows() : grid.columns()); ++i) {
        const std::int64_t inner = (s.rows_outer ? grid.columns_of(i) : grid.rows_of(i)).size();
        const std::int64_t uncut =
            (s.rows_outer ? grid.uncut_columns(i, s.ends_cut) : grid.uncut_rows(i, s.ends_cut)).size();
        if (s.splits == 1) blocks.push_back(s.clocks(heads * inner, heads * (inner - uncut)));
        for (std::int64_t split = 0; s.splits > 1 && split < s.splits; ++split)
            blocks.push_back(s.clocks(std::clamp<std::int64_t>(inner - split * most, 0, most), 0));
    }
    return blocks;
}

/// Clocks of each thread block of a head, if a block goes through many tiles.
std::vector<double> whole_head_blocks(const Stage& s, const std::vector<double>& tiles) {
    const auto blocks = static_cast<std::size_t>(s.blocks_per_head);
    const auto interleaved = static_cast<std::size_t>(s.interleaved);
    std::vector<double> clocks(blocks);
    for (std::size_t block = 0; block < blocks; ++block) {
        std::size_t count = 0;
        for (std::size_t i = block; i < tiles.size(); i += blocks, ++count) clocks[block] += tiles[i];
        if (count % interleaved != 0) clocks[block] += tiles[block + (count - 1) * blocks];
    }
    return clocks;
}

}  // namespace

std::vector<std::pair<std::int64_t, std::int64_t>> Stage::lengths() const {
    if (!sequences.empty()) return {sequences.begin(), sequences.end()};
    return {static_cast<std::size_t>(problem.batch), {problem.len_q, problem.len_kv}};
}

std::vector<double> blocks_in_order(const Stage& s) {
    std::vector<std::vector<double>> sequences;
    for (const auto& [len_q, len_kv] : s.lengths()) {
        const bool equal = !sequences.empty() && s.sequences.empty();
        sequences.push_back(equal ? sequences.front() : blocks_of_head(s, len_q, len_kv));
    }
    const std::int64_t heads = s.heads();
    std::vector<double> order;
    const auto add = [&](double clocks) { order.push_back(clocks); };
    if (s.whole_heads) {
        for (const auto& sequence : sequences) {
            const std::vector<double> blocks = whole_head_blocks(s, sequence);
            for (std::int64_t head = 0; head < heads; ++head) std::for_each(blocks.begin(), blocks.end(), add);
        }
        return order;
    }
    if (s.heads_longest_first > 0 && s.sequences.empty() && !sequences.empty()) {
        std::vector<double> blocks = sequences.front();
        if (s.rows_outer) std::reverse(blocks.begin(), blocks.end());
        const auto all = static_cast<std::int64_t>(sequences.size()) * heads;
        for (std::int64_t first = 0; first < all; first += s.heads_longest_first) {
            const auto count = static_cast<std::size_t>(std::min(s.heads_longest_first, all - first));
            for (const double clocks : blocks) order.insert(order.end(), count, clocks);
        }
        return order;
    }
    if (s.order == Order::descending || s.order == Order::ascending) {
        for (auto& sequence : sequences) {
            if (s.order == Order::descending) std::reverse(sequence.begin(), sequence.end());
            for (std::int64_t head = 0; head < heads; ++head) std::for_each(sequence.begin(), sequence.end(), add);
        }
        return order;
    }
    for (std::int64_t head = 0; head < heads; ++head) {
        for (const auto& sequence : sequences) std::for_each(sequence.begin(), sequence.end(), add);
    }
    if (s.order == Order::longest_first) std::stable_sort(order.begin(), order.end(), std::greater<>());
    return order;
}

}  // namespace tessera::model
