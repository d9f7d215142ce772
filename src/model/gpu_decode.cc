// SPDX-License-Identifier: Apache-2.0
//
// The predicted time of cuda.decode.forward: thread blocks that go through splits of the keys, at the rate of memory,
// and a second kernel that combines the splits of a row.
#include <algorithm>
#include <utility>
#include <vector>

#include "core/arena.hpp"
#include "cuda/decode/host/dispatch.hpp"
#include "model/gpu.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {

using cuda::Band32;
using cuda::decode::Config;
using cuda::decode::Items;
using cuda::decode::RowSplits;
using cuda::decode::Splits;

/// The splits of a call, by thread block.
struct DecodeWork {
    struct Block {
        std::int64_t splits = 0, tiles = 0;
    };

    std::int64_t splits = 0;         ///< of all rows
    std::int64_t tiles = 0;          ///< tiles of keys of all splits
    std::int64_t most_of_a_row = 0;  ///< splits of the row that has the most
    std::vector<Block> blocks;       ///< all thread blocks; or one that stands for all, if there are too many splits

    /// The thread block that is done last, if a tile and the end of a split take so many clocks.
    Block last(double tile, double end) const {
        const auto clocks = [&](const Block& b) {
            return static_cast<double>(b.tiles) * tile + static_cast<double>(b.splits) * end;
        };
        const auto found = std::max_element(blocks.begin(), blocks.end(),
                                            [&](const Block& a, const Block& b) { return clocks(a) < clocks(b); });
        return found == blocks.end() ? Block{} : *found;
    }
};

namespace {

/// The tiles of keys of a tile of rows, for each of its splits (cuda/decode/work.cuh).
std::vector<std::int64_t> tiles_of_splits(const RowSplits& rows) {
    std::vector<std::int64_t> tiles;
    const auto add = [&](const Splits& splits) {
        for (int i = splits.first; i < splits.first + splits.count; ++i) {
            const int begin = std::max(i << splits.shift, rows.visible.begin);
            const int end = std::min((i + 1) << splits.shift, rows.visible.end);
            tiles.push_back(schedule::ceil_div(end, Config::kKeys) - begin / Config::kKeys);
        }
    };
    add(rows.small);
    if (!rows.alike()) add(rows.large);
    return tiles;
}

/// A kv head of a sequence: for each tile of rows the tiles of its splits.
using HeadWork = std::vector<std::vector<std::int64_t>>;

HeadWork work_of_head(const Problem& p, std::int64_t len_q, std::int64_t len_kv, std::int64_t rows_of_tile) {
    const Band32 band(p.mask.bind(len_q, len_kv));
    const std::int64_t group = p.group(), rows = len_q * group;
    HeadWork work;
    for (std::int64_t first = 0; first < rows; first += rows_of_tile) {
        const std::int64_t last = std::min(first + rows_of_tile, rows) - 1;
        work.push_back(tiles_of_splits({band, static_cast<int>(first / group), static_cast<int>(last / group)}));
    }
    return work;
}

/// Calls visit(tiles) for each split of a sequence, in the order of SplitWork::find(): neighbouring thread blocks have
/// the tiles of rows of the same keys, then the kv heads. A tile of rows may have fewer splits than another: 0 tiles.
template <class Visit>
void for_each_split(const HeadWork& head, std::int64_t heads_kv, std::int64_t splits, const Visit& visit) {
    for (std::int64_t split = 0; split < splits; ++split) {
        for (std::int64_t h = 0; h < heads_kv; ++h) {
            for (const auto& tiles : head)
                visit(split < static_cast<std::int64_t>(tiles.size()) ? tiles[static_cast<std::size_t>(split)] : 0);
        }
    }
}

/// The work of a Problem whose heads of a group are not packed.
DecodeWork work_of(const Question& q, const Config& config, std::int64_t blocks) {
    constexpr std::int64_t kMostVisited = 1 << 20;  // beyond this an equal share is close enough
    const Problem& p = q.problem;
    std::vector<std::pair<std::int64_t, std::int64_t>> lengths = q.options.sequences;
    if (lengths.empty()) lengths.assign(static_cast<std::size_t>(p.batch), {p.len_q, p.len_kv});
    DecodeWork work;
    work.blocks.resize(static_cast<std::size_t>(blocks));
    std::vector<HeadWork> heads;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        const bool as_before = i > 0 && lengths[i] == lengths[i - 1];
        heads.push_back(as_before ? heads.back() : work_of_head(p, lengths[i].first, lengths[i].second, config.rows));
        for (const auto& tiles : heads.back()) {
            const auto splits = static_cast<std::int64_t>(tiles.size());
            work.splits += splits * p.heads_kv;
            work.most_of_a_row = std::max(work.most_of_a_row, splits);
            for (const std::int64_t n : tiles) work.tiles += n * p.heads_kv;
        }
    }
    if (work.splits > kMostVisited) {
        work.blocks = {{schedule::ceil_div(work.splits, blocks), schedule::ceil_div(work.tiles, blocks)}};
        return work;
    }
    std::size_t next = 0;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        const auto [len_q, len_kv] = lengths[i];
        const Items items(Band32(p.mask.bind(len_q, len_kv)), {0, static_cast<int>(len_q)}, static_cast<int>(len_kv),
                          static_cast<int>(p.group()), config.rows);
        for_each_split(heads[i], p.heads_kv, items.splits, [&](std::int64_t tiles) {
            DecodeWork::Block& block = work.blocks[next];
            next = (next + 1) % work.blocks.size();
            if (tiles == 0) return;
            ++block.splits;
            block.tiles += tiles;
        });
    }
    return work;
}

}  // namespace

std::int64_t decode_workspace(const Problem& p) {
    Arena arena;
    const int splits = cuda::decode::max_splits(p);
    const std::int64_t queries = cuda::decode::queries_at_once(p);
    arena.take<float>(queries, p.heads_q, splits, cuda::decode::config_of(p).head_dim);
    arena.take<std::pair<float, float>>(queries, p.heads_q, splits);
    return static_cast<std::int64_t>(arena.used());
}

void Gpu::decode(const Question& asked) {
    const Config& config = cuda::decode::config_of(asked.problem);
    const auto blocks = static_cast<std::int64_t>(sms) * config.ctas;
    const DecodeWork work = work_of(asked, config, blocks);
    const DecodeWork::Block last = work.last(t.step, c.end_cycles);
    const auto tiles = static_cast<double>(last.tiles), splits = static_cast<double>(last.splits);
    account.note("thread blocks", "{:.0f} * {} = {}", sms, config.ctas, blocks);
    account.note("splits of the keys", "{} of {} tiles in all, dealt to them in turn", work.splits, work.tiles);
    account.note("last thread block", "{} splits of {} tiles", last.splits, last.tiles);
    const double clocks = tiles * t.step + splits * c.end_cycles;
    const double per_ms = set_clock(static_cast<double>(work.tiles), clocks);
    account.part("tiles of keys", tiles * t.step / per_ms, "{} * {:.6g} clk / {:.4f} GHz", last.tiles, t.step,
                 out.clock_ghz);
    account.part("ends of splits", splits * c.end_cycles / per_ms, "{} * {:.6g} clk / {:.4f} GHz", last.splits,
                 c.end_cycles, out.clock_ghz);
    account.note("main kernel", "({0} * {1:.6g} + {2} * {3:.6g}) clk / {4:.4f} GHz = {5:.4g} ms", last.tiles, t.step,
                 last.splits, c.end_cycles, out.clock_ghz, clocks / per_ms);
    note_dram();
    add_stream(clocks / per_ms);
    if (q.page_size > 0)
        account.part("page numbers", splits * c.page_us * 1e-3, "waited for at each split: {} * {:.3g} us", last.splits,
                     c.page_us);
    splits_ = work.most_of_a_row;
    add_combine();
    add_cold_start();
    add_launches(c.launches);
}

}  // namespace tessera::model
