// SPDX-License-Identifier: Apache-2.0
//
// tessera's backward adds up dQ in a fixed order (cuda/fa3/host/dq_order.hpp, cuda/gradient/host/dq_order.hpp): a block
// of keys goes through the tiles of queries from its own place to the last one, then from the first one, and adds to
// each after the block that lies one behind it. Where a head has few queries and many keys, blocks wait for each other.
// Under a causal mask long blocks begin first, in parts (cuda/gradient/host/dq_order.hpp; fa3's with one head a group).
#include <algorithm>
#include <queue>

#include "cuda/fa3/host/backward_dispatch.hpp"
#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/gradient/host/config.h"
#include "cuda/gradient/host/dq_order.hpp"
#include "cuda/gradient/host/head_split.hpp"
#include "model/stage.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {
namespace {

/// A block of keys' way through the tiles of queries: start ... end - 1 to the first sum, begin ... start - 1 to the
/// second; rising: end - 1 ... begin, all heads of the group at each.
struct Way {
    int begin = 0, end = 0, start = 0;
    Range uncut;
};

struct Ways {
    bool rising = false;
    bool parted = false;  ///< the longest blocks of all heads begin first
    std::vector<Way> of_block{};
    std::int64_t shares = 1;       ///< of a group's query heads: each has blocks of its own ...
    std::int64_t share_heads = 1;  ///< ... with so many of them
};

template <int kBlockQ>
Ways ways_of_fa3(const Stage& s, std::int64_t len_q, std::int64_t len_kv) {
    constexpr int kBlockKv = 128;
    cuda::fa3::backward::Blocks<kBlockQ, kBlockKv> blocks{};
    blocks.set(s.problem.mask, static_cast<int>(len_q), static_cast<int>(len_kv), static_cast<int>(s.problem.group()),
               static_cast<int>(s.problem.heads_kv));
    Ways ways{blocks.rising, blocks.parted, {}, blocks.shares, blocks.share_heads};
    for (int n = 0; n < blocks.count_kv; ++n) {
        const auto queries = blocks.queries_of(n);
        const int start = std::min(std::max(blocks.start_of(n), queries.begin), queries.end);
        ways.of_block.push_back({queries.begin, queries.end, start, {}});
    }
    return ways;
}

Ways ways_of_fa2(const Stage& s, const schedule::Grid& grid, std::int64_t len_q, std::int64_t len_kv) {
    using cuda::gradient::HeadSplit;
    Ways ways;
    const auto group = static_cast<int>(s.problem.group());
    const Band band = s.problem.mask.bind(len_q, len_kv);
    const int heads = group > 1 ? HeadSplit::heads_per_split(band, static_cast<int>(s.problem.heads_kv), group) : 1;
    ways.share_heads = heads;
    ways.shares = group > 1 ? HeadSplit::num_splits(heads, group) : 1;
    ways.parted = cuda::gradient::is_triangle(band) &&
                  s.problem.heads_kv * ways.shares * grid.columns() >= cuda::gradient::kSegmentedBlocks;
    for (std::int64_t n = 0; n < grid.columns(); ++n) {
        const Range queries = grid.rows_of(n);
        const std::int64_t own = n * s.tile.block_kv / s.tile.block_q;
        const auto start = queries.empty() ? 0 : std::clamp(own, queries.begin, queries.end);
        ways.of_block.push_back(
            {static_cast<int>(queries.begin), static_cast<int>(queries.end), static_cast<int>(start), {}});
    }
    return ways;
}

Ways ways_of(const Stage& s, std::int64_t len_q, std::int64_t len_kv) {
    const schedule::Grid grid{s.problem.mask.bind(len_q, len_kv), s.tile, false};
    constexpr std::int64_t kLong = 128;
    Ways ways = !s.turns_of_fa3           ? ways_of_fa2(s, grid, len_q, len_kv)
                : s.tile.block_q == kLong ? ways_of_fa3<128>(s, len_q, len_kv)
                                          : ways_of_fa3<64>(s, len_q, len_kv);
    for (std::size_t n = 0; n < ways.of_block.size(); ++n)
        ways.of_block[n].uncut = grid.uncut_rows(static_cast<std::int64_t>(n));
    return ways;
}

/// A head of keys, or a share of its query heads: when the next block may add to which tile of queries, of which head
/// and sum.
class Head {
 public:
    Head(const Stage& stage, std::int64_t tiles, std::int64_t query_heads)
        : s_(&stage),
          tiles_(tiles),
          query_heads_(query_heads),
          free_(static_cast<std::size_t>(2 * tiles * query_heads)) {}

    /// When block n is done that begins at `now`.
    double run(const Ways& ways, int n, double now) {
        const Way& way = ways.of_block[static_cast<std::size_t>(n)];
        now_ = now + s_->ends / 2, added_ = 0;
        const auto heads = static_cast<int>(query_heads_);
        if (ways.rising) {
            for (int m = way.end - 1; m >= way.begin; --m) {
                for (int head = 0; head < heads; ++head) stop(way, m, head, 0);
            }
        } else {
            for (int head = 0; head < heads; ++head) {
                for (int m = way.start; m < way.end; ++m) stop(way, m, head, 0);
                for (int m = way.begin; m < way.start; ++m) stop(way, m, head, 1);
            }
        }
        return std::max(now_, added_) + s_->ends / 2;
    }

 private:
    void stop(const Way& way, int m, int head, int sum) {
        const bool cut = m < way.uncut.begin || m >= way.uncut.end;
        double& free = free_[static_cast<std::size_t>((head * 2 + sum) * tiles_ + m)];
        now_ = std::max(now_ + s_->step + (cut ? s_->mask : 0), added_);  // dQ has one place until it is added
        added_ = std::max(now_, free);
        free = added_ + s_->turn;
    }

    const Stage* s_;
    std::int64_t tiles_;
    std::int64_t query_heads_;
    std::vector<double> free_;
    double now_ = 0, added_ = 0;
};

}  // namespace

namespace {

/// A sequence of the batch: how its blocks go, and its heads.
struct Sequence {
    Ways ways;
    std::vector<Head> heads;
    int count = 0;  // blocks of a head
};

Sequence sequence_of(const Stage& s, const std::pair<std::int64_t, std::int64_t>& lengths) {
    Sequence sequence{ways_of(s, lengths.first, lengths.second), {}};
    const auto tiles = schedule::ceil_div(lengths.first, s.tile.block_q);
    const Ways& ways = sequence.ways;
    for (std::int64_t i = 0; i < s.heads() * ways.shares; ++i) {
        const std::int64_t left = s.heads_of_block() - i % ways.shares * ways.share_heads;
        sequence.heads.emplace_back(s, tiles, std::min(left, ways.share_heads));
    }
    sequence.count = static_cast<int>(ways.of_block.size());
    return sequence;
}

/// How blocks of keys begin: `heads` of the call take turns, by parts of theirs.
struct Rounds {
    int parts = 1;
    std::size_t heads = 1;
};

/// cuda/fa3/backward_kernels.cc.
Rounds rounds_of_fa3(const Problem& p, std::size_t all) {
    namespace fa3 = cuda::fa3::backward;
    constexpr std::int64_t kBytes = std::int64_t{24} << 20, kBlocksAtOnce = 512, kMostInRounds = 32, kBlockKv = 128;
    const std::int64_t most = std::max<std::int64_t>(schedule::ceil_div(p.len_kv, kBlockKv), 1);
    const std::int64_t dims = p.head_dim + p.head_dim_v;
    const std::int64_t of_head = p.len_q * (4 * p.head_dim + 2 * dims) + p.len_kv * 4 * dims;
    const std::int64_t cached = std::max<std::int64_t>(kBytes / std::max<std::int64_t>(of_head, 1), 1);
    const auto rounds = [&](std::int64_t parts, std::int64_t heads) {
        return Rounds{static_cast<int>(parts), std::min(static_cast<std::size_t>(heads), all)};
    };
    if (fa3::goes_by_length(p)) return rounds(most, heads_by_length(most, static_cast<std::int64_t>(all), false));
    if (fa3::starts_in_parts(p))
        return rounds(fa3::kParts,
                      most > kMostInRounds ? static_cast<std::int64_t>(all) : std::max(cached, kBlocksAtOnce / most));
    if (!p.ragged && p.mask.trivial() && p.group() == 1 && most <= fa3::kMostStraight) return rounds(most, cached);
    return rounds(1, static_cast<std::int64_t>(all));
}

/// cuda/gradient/start.cc, main/cta_work.cuh.
Rounds rounds_of_fa2(const Problem& p, const std::vector<Sequence>& sequences, std::size_t all) {
    std::int64_t most = 0;
    for (const Sequence& sequence : sequences)
        most = std::max(most, p.heads_kv * sequence.ways.shares * static_cast<std::int64_t>(sequence.count));
    return {cuda::gradient::most_segments(p.mask, most), all};
}

}  // namespace

std::int64_t heads_by_length(std::int64_t blocks, std::int64_t heads, bool roles) {
    if (!roles && heads * blocks <= cuda::fa3::backward::kFewestToShare) return heads;
    const std::int64_t few = roles ? 4 : std::clamp<std::int64_t>(1024 / blocks, 4, 8);
    return std::max(few, 128 / blocks);
}

static_assert(cuda::gradient::kSegments == cuda::fa3::backward::kParts);

double in_turn(const Stage& s, int multiprocessors) {
    std::vector<Sequence> sequences;
    for (const auto& lengths : s.lengths()) sequences.push_back(sequence_of(s, lengths));
    std::vector<std::pair<Sequence*, std::size_t>> heads;
    for (Sequence& sequence : sequences) {
        for (std::size_t head = 0; head < sequence.heads.size(); ++head) heads.emplace_back(&sequence, head);
    }
    const Rounds rounds =
        s.turns_of_fa3 ? rounds_of_fa3(s.problem, heads.size()) : rounds_of_fa2(s.problem, sequences, heads.size());
    std::priority_queue<double, std::vector<double>, std::greater<>> idle_from;
    for (int i = 0; i < multiprocessors; ++i) idle_from.push(0);
    double last = 0;
    const auto start = [&](Sequence& sequence, std::size_t head, int n) {
        const double done = sequence.heads[head].run(sequence.ways, n, idle_from.top());
        idle_from.pop();
        idle_from.push(done);
        last = std::max(last, done);
    };
    const std::size_t at_once = std::max<std::size_t>(rounds.heads, 1);
    for (std::size_t first = 0; first < heads.size(); first += at_once) {
        for (int part = 0; part < rounds.parts; ++part) {
            for (std::size_t i = first; i < std::min(first + at_once, heads.size()); ++i) {
                const auto& [sequence, head] = heads[i];
                const Ways& ways = sequence->ways;
                const int size = (sequence->count + rounds.parts - 1) / rounds.parts;
                const int begin = (ways.rising || ways.parted ? part : rounds.parts - 1 - part) * size;
                for (int k = 0; k < size; ++k) {
                    const int n = begin + (ways.rising ? k : size - 1 - k);
                    if (n < sequence->count) start(*sequence, head, n);
                }
            }
        }
    }
    return last;
}

}  // namespace tessera::model
