// SPDX-License-Identifier: Apache-2.0
//
// The main kernels of tessera's backward that add up dQ in a fixed order (cuda/backward/host/dq_order.hpp). A key block
// goes through the query tiles from its start to the last one, then from the first one, and adds to each after the key
// block before it. Blocks of a head with few queries and many keys wait for each other. The launch order is the
// kernel's: fa3's by its own functions, fa2's as in cuda/gradient/start.cc.
#include "model/dq_order.hpp"

#include <algorithm>
#include <numeric>
#include <queue>

#include "cuda/backward/host/head_split.hpp"
#include "cuda/fa3/host/backward_dispatch.hpp"
#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/fa3/host/key_block_list.hpp"
#include "cuda/gradient/host/config.h"
#include "cuda/gradient/host/dq_order.hpp"
#include "cuda/host/work_list.hpp"
#include "model/stage.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {
namespace {

namespace fa3 = cuda::fa3::backward;

/// A key block's path through the query tiles; ascending: end - 1 ... begin, with all heads of the group at each.
struct KeyBlockPath : cuda::QueryVisits {
    Range uncut{};
};

struct KeyBlockPaths {
    bool ascending = false;
    bool segmented = false;  ///< the longest key blocks of all heads start first
    std::vector<KeyBlockPath> of_block{};
    std::int64_t splits = 1;           ///< head splits of a group, each with its own CTAs
    std::int64_t heads_per_split = 1;  ///< query heads of a split
};

/// Returns ask(schedule) for a sequence of fa3's backward with query blocks of this size.
template <class Ask>
auto ask_fa3_schedule(const Problem& p, std::int64_t block_q, std::int64_t len_q, std::int64_t len_kv, const Ask& ask) {
    const auto of = [&](auto schedule) {
        schedule.set(p.mask, static_cast<int>(len_q), static_cast<int>(len_kv), static_cast<int>(p.group()));
        return ask(schedule);
    };
    constexpr std::int64_t kLong = 128;
    return block_q == kLong ? of(fa3::BlockSchedule<128, 128>{}) : of(fa3::BlockSchedule<64, 128>{});
}

KeyBlockPaths paths_of_fa3(const Stage& s, std::int64_t len_q, std::int64_t len_kv) {
    return ask_fa3_schedule(s.problem, s.tile.block_q, len_q, len_kv, [](const auto& schedule) {
        KeyBlockPaths paths{schedule.ascending, schedule.segmented, {}, schedule.head_splits, schedule.heads_per_split};
        for (int n = 0; n < schedule.count_kv; ++n) paths.of_block.push_back({schedule.visits_of(n)});
        return paths;
    });
}

KeyBlockPaths paths_of_fa2(const Stage& s, const schedule::Grid& grid, std::int64_t len_q, std::int64_t len_kv) {
    using cuda::HeadSplit;
    KeyBlockPaths paths;
    const auto group = static_cast<int>(s.problem.group());
    const Band band = s.problem.mask.bind(len_q, len_kv);
    const int heads = group > 1 ? HeadSplit::heads_per_split(band, group) : 1;
    paths.heads_per_split = heads;
    paths.splits = group > 1 ? HeadSplit::num_splits(heads, group) : 1;
    paths.segmented =
        cuda::is_causal_square(band) && cuda::gradient::may_use_segments(group, paths.splits * grid.columns());
    for (std::int64_t n = 0; n < grid.columns(); ++n) {
        const Range queries = grid.rows_of(n);
        const cuda::Span seen{static_cast<int>(queries.begin), static_cast<int>(queries.end)};
        paths.of_block.push_back({cuda::QueryVisits(seen, static_cast<int>(n * s.tile.block_kv / s.tile.block_q))});
    }
    return paths;
}

KeyBlockPaths paths_of(const Stage& s, std::int64_t len_q, std::int64_t len_kv) {
    const schedule::Grid grid{s.problem.mask.bind(len_q, len_kv), s.tile, false};
    KeyBlockPaths paths = s.fa3_dq_order ? paths_of_fa3(s, len_q, len_kv) : paths_of_fa2(s, grid, len_q, len_kv);
    for (std::size_t n = 0; n < paths.of_block.size(); ++n)
        paths.of_block[n].uncut = grid.uncut_rows(static_cast<std::int64_t>(n));
    return paths;
}

/// A head split of a kv head, with the time at which each query tile of each query head and accumulator is free for the
/// next addition.
class Head {
 public:
    Head(const Stage& stage, std::int64_t tiles, std::int64_t query_heads)
        : s_(&stage),
          tiles_(tiles),
          query_heads_(query_heads),
          free_(static_cast<std::size_t>(2 * tiles * query_heads)) {}

    /// Returns when block n is done, if it starts at `now`.
    double run(const KeyBlockPaths& paths, int n, double now) {
        const KeyBlockPath& path = paths.of_block[static_cast<std::size_t>(n)];
        now_ = now + s_->ends / 2, added_ = 0;
        const auto heads = static_cast<int>(query_heads_);
        if (paths.ascending) {
            for (int m = path.end - 1; m >= path.begin; --m) {
                for (int head = 0; head < heads; ++head) add_to_tile(path, m, head, 0);
            }
        } else {
            for (int head = 0; head < heads; ++head) {
                for (int i = 0; i < path.count(); ++i)
                    add_to_tile(path, path.query_block_of(i), head, path.accumulator_of(i));
            }
        }
        return std::max(now_, added_) + s_->ends / 2;
    }

 private:
    void add_to_tile(const KeyBlockPath& path, int m, int head, int accumulator) {
        const bool cut = m < path.uncut.begin || m >= path.uncut.end;
        double& free = free_[static_cast<std::size_t>((head * 2 + accumulator) * tiles_ + m)];
        now_ =
            std::max(now_ + s_->step + (cut ? s_->mask : 0), added_);  // shared memory holds one dQ until it is added
        added_ = std::max(now_, free);
        free = added_ + s_->dq_add;
    }

    const Stage* s_;
    std::int64_t tiles_;
    std::int64_t query_heads_;
    std::vector<double> free_;
    double now_ = 0, added_ = 0;
};

/// A sequence of the batch: the paths of its key blocks, and its heads.
struct Sequence {
    KeyBlockPaths paths;
    std::vector<Head> heads;
    int count = 0;  // key blocks of a head
};

Sequence sequence_of(const Stage& s, const std::pair<std::int64_t, std::int64_t>& lengths) {
    Sequence sequence{paths_of(s, lengths.first, lengths.second), {}};
    const auto tiles = schedule::ceil_div(lengths.first, s.tile.block_q);
    const KeyBlockPaths& paths = sequence.paths;
    for (std::int64_t i = 0; i < s.heads() * paths.splits; ++i) {
        const std::int64_t left = s.heads_of_block() - i % paths.splits * paths.heads_per_split;
        sequence.heads.emplace_back(s, tiles, std::min(left, paths.heads_per_split));
    }
    sequence.count = static_cast<int>(paths.of_block.size());
    return sequence;
}

/// Sequences in the order of a ragged call's list (cuda/host/work_list.hpp).
std::vector<std::size_t> listed_order(std::span<const std::pair<std::int64_t, std::int64_t>> lengths) {
    std::vector<std::size_t> order(lengths.size());
    std::iota(order.begin(), order.end(), 0);
    const auto class_of = [&](std::size_t sequence) {
        return cuda::length_class(static_cast<int>(lengths[sequence].first),
                                  static_cast<int>(lengths[sequence].second));
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return class_of(a) > class_of(b); });
    return order;
}

/// The launch order of a ragged call of fa2's backward. `start` is called for each key block.
template <class Start>
void for_each_listed_start_of_fa2(std::span<const std::pair<std::int64_t, std::int64_t>> lengths,
                                  std::vector<Sequence>& sequences, const Start& start) {
    for (const std::size_t index : listed_order(lengths)) {
        Sequence& sequence = sequences[index];
        const auto heads = static_cast<int>(sequence.heads.size());
        const int count = sequence.count;
        for (int number = 0; number < heads * count; ++number) {
            const cuda::PlacedKeyBlock own =
                sequence.paths.segmented
                    ? cuda::place_in_segments(number, heads, count, cuda::segment_size(count, cuda::kSegments))
                    : cuda::place_in_rounds(number, heads, count, 1, false);
            start(sequence, static_cast<std::size_t>(own.head), own.n);
        }
    }
}

/// The launch order of fa2's backward (cuda/gradient/start.cc, main/cta_work.cuh): segment by segment, of all heads.
/// `start` is called for each key block.
template <class Start>
void for_each_start_of_fa2(const Problem& p, std::vector<Sequence>& sequences, const Start& start) {
    std::int64_t most = 0;
    for (const Sequence& sequence : sequences)
        most = std::max(most, sequence.paths.splits * static_cast<std::int64_t>(sequence.count));
    const int segments = cuda::gradient::most_segments(p.mask, static_cast<int>(p.group()), most);
    for (int segment = 0; segment < segments; ++segment) {
        for (Sequence& sequence : sequences) {
            const int size = cuda::gradient::segment_size(segments, sequence.count);
            const int begin = cuda::gradient::first_block_of_segment(segment, segments, size, sequence.paths.segmented);
            for (std::size_t head = 0; head < sequence.heads.size(); ++head) {
                for (int n = begin + size - 1; n >= begin; --n) {
                    if (n < sequence.count) start(sequence, head, n);
                }
            }
        }
    }
}

/// The launch order of a ragged call of fa3 (cuda/fa3/host/key_block_list.hpp).
std::vector<KeyBlockStart> listed_starts(const Problem& p,
                                         std::span<const std::pair<std::int64_t, std::int64_t>> lengths) {
    const fa3::Config& config = fa3::config_of(p);
    std::vector<KeyBlockStart> starts;
    for (const std::size_t index_of : listed_order(lengths)) {
        const auto sequence = static_cast<int>(index_of);
        const auto& [len_q, len_kv] = lengths[index_of];
        ask_fa3_schedule(p, config.block_q, len_q, len_kv, [&](const auto& schedule) {
            const auto heads_kv = static_cast<int>(p.heads_kv);
            for (int index = 0; index < fa3::items_of(schedule) * heads_kv; ++index) {
                const cuda::PlacedKeyBlock own = fa3::place_key_block(schedule, heads_kv * schedule.head_splits, index,
                                                                      !p.mask.trivial(), config.splits_dv_dk());
                starts.push_back({sequence, own.head / schedule.head_splits, own.head % schedule.head_splits, own.n});
            }
        });
    }
    return starts;
}

}  // namespace

std::vector<KeyBlockStart> key_block_starts(const Problem& p,
                                            std::span<const std::pair<std::int64_t, std::int64_t>> lengths) {
    if (p.ragged) return listed_starts(p, lengths);
    Problem of_lengths = p;
    of_lengths.batch = static_cast<std::int64_t>(lengths.size());
    const fa3::KeyBlockNumbering numbering = fa3::key_block_numbering(of_lengths);
    std::vector<KeyBlockStart> starts;
    for (unsigned number = 0; number < numbering.count; ++number) {
        const fa3::KeyBlockNumber own = numbering.decode(number);
        const auto& [len_q, len_kv] = lengths[static_cast<std::size_t>(own.batch)];
        ask_fa3_schedule(p, fa3::config_of(p).block_q, len_q, len_kv, [&](const auto& schedule) {
            const int n = schedule.key_block(own.segment, own.index, numbering.segments, numbering.segment_size);
            if (n < schedule.count_kv && own.split < schedule.head_splits)
                starts.push_back({own.batch, own.kv_head, own.split, n});
        });
    }
    return starts;
}

std::int64_t accumulator_rows(const Problem& p, std::span<const std::pair<std::int64_t, std::int64_t>> lengths) {
    const int block_q = fa3::config_of(p).block_q;
    std::int64_t blocks = 0;
    for (const auto& [len_q, len_kv] : lengths) {
        ask_fa3_schedule(p, block_q, len_q, len_kv, [&](const auto& schedule) {
            for (int m = 0; m < schedule.count_q; ++m)
                for (const int accumulator : {0, 1}) blocks += schedule.has_contributions(accumulator, m) ? 1 : 0;
        });
    }
    return blocks * block_q;
}

double clocks_in_dq_order(const Stage& s, int multiprocessors) {
    const auto lengths = s.lengths();
    std::vector<Sequence> sequences;
    for (const auto& of_sequence : lengths) sequences.push_back(sequence_of(s, of_sequence));
    std::priority_queue<double, std::vector<double>, std::greater<>> idle_from;
    for (int i = 0; i < multiprocessors; ++i) idle_from.push(0);
    double last = 0;
    const auto start = [&](Sequence& sequence, std::size_t head, int n) {
        const double done = sequence.heads[head].run(sequence.paths, n, idle_from.top());
        idle_from.pop();
        idle_from.push(done);
        last = std::max(last, done);
    };
    if (!s.fa3_dq_order) {
        if (s.problem.ragged) for_each_listed_start_of_fa2(lengths, sequences, start);
        else for_each_start_of_fa2(s.problem, sequences, start);
        return last;
    }
    for (const KeyBlockStart& own : key_block_starts(s.problem, lengths)) {
        Sequence& sequence = sequences[static_cast<std::size_t>(own.sequence)];
        start(sequence, static_cast<std::size_t>(own.kv_head * sequence.paths.splits + own.split), own.n);
    }
    return last;
}

}  // namespace tessera::model
