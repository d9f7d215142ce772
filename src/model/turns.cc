// SPDX-License-Identifier: Apache-2.0
//
// tessera's backward adds up dQ in a fixed order (cuda/fa3/backward/order.hpp, cuda/gradient/place.cuh): a block of
// keys goes through the tiles of queries from its own place to the last one, then from the first one, and adds to each
// after the block that lies one behind it. Where a head has few queries and many keys, blocks wait for each other.
// Under a causal mask long blocks begin first, in parts (cuda/gradient/launch.hpp; fa3's with one head a group).
#include <algorithm>
#include <queue>

#include "cuda/fa3/backward/order.hpp"
#include "cuda/gradient/config.h"
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
    std::vector<Way> of_block;
};

template <int kBlockQ>
Ways ways_of_fa3(const Stage& s, std::int64_t len_q, std::int64_t len_kv) {
    constexpr int kBlockKv = 128;
    cuda::fa3::backward::Blocks<kBlockQ, kBlockKv> blocks{};
    blocks.set(s.problem.mask, static_cast<int>(len_q), static_cast<int>(len_kv), static_cast<int>(s.problem.group()),
               static_cast<int>(s.problem.heads_kv));
    Ways ways{blocks.rising, blocks.parted, {}};
    for (int n = 0; n < blocks.count_kv; ++n) {
        const auto queries = blocks.queries_of(n);
        const int start = std::min(std::max(blocks.start_of(n), queries.begin), queries.end);
        ways.of_block.push_back({queries.begin, queries.end, start, {}});
    }
    return ways;
}

Ways ways_of_fa2(const Stage& s, const schedule::Grid& grid) {
    Ways ways;
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
    Ways ways = !s.turns_of_fa3           ? ways_of_fa2(s, grid)
                : s.tile.block_q == kLong ? ways_of_fa3<128>(s, len_q, len_kv)
                                          : ways_of_fa3<64>(s, len_q, len_kv);
    for (std::size_t n = 0; n < ways.of_block.size(); ++n)
        ways.of_block[n].uncut = grid.uncut_rows(static_cast<std::int64_t>(n));
    return ways;
}

/// A head of keys: when the next block may add to which tile of queries, of which head and sum.
class Head {
 public:
    Head(const Stage& stage, std::int64_t tiles)
        : s_(&stage), tiles_(tiles), free_(static_cast<std::size_t>(2 * tiles * stage.heads_of_block())) {}

    /// When block n is done that begins at `now`.
    double run(const Ways& ways, int n, double now) {
        const Way& way = ways.of_block[static_cast<std::size_t>(n)];
        now_ = now + s_->ends / 2, added_ = 0;
        const auto heads = static_cast<int>(s_->heads_of_block());
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
    std::vector<double> free_;
    double now_ = 0, added_ = 0;
};

}  // namespace

namespace {

/// A member of the batch: how its blocks go, and its heads.
struct Member {
    Ways ways;
    std::vector<Head> heads;
    int count = 0;  // blocks of a head
    bool parted = false;
};

Member member_of(const Stage& s, const std::pair<std::int64_t, std::int64_t>& lengths) {
    Member member{ways_of(s, lengths.first, lengths.second), {}};
    const auto tiles = schedule::ceil_div(lengths.first, s.tile.block_q);
    member.heads.assign(static_cast<std::size_t>(s.heads()), Head(s, tiles));
    member.count = static_cast<int>(member.ways.of_block.size());
    const Band band = s.problem.mask.bind(lengths.first, lengths.second);
    const bool square = lengths.first == lengths.second && band.high == 0 && band.low <= 1 - lengths.first;
    member.parted =
        s.turns_of_fa3 ? member.ways.parted : square && s.heads() * member.count >= cuda::gradient::kFewestInParts;
    return member;
}

}  // namespace

static_assert(cuda::gradient::kParts == cuda::fa3::backward::kParts);

double in_turn(const Stage& s, int multiprocessors) {
    std::priority_queue<double, std::vector<double>, std::greater<>> idle_from;
    for (int i = 0; i < multiprocessors; ++i) idle_from.push(0);
    double last = 0;
    const auto start = [&](Member& member, Head& head, int n) {
        const double done = head.run(member.ways, n, idle_from.top());
        idle_from.pop();
        idle_from.push(done);
        last = std::max(last, done);
    };
    std::vector<Member> parted;
    for (const auto& lengths : s.lengths()) {
        Member member = member_of(s, lengths);
        if (member.parted) {
            parted.push_back(std::move(member));
            continue;
        }
        for (Head& head : member.heads) {
            for (int started = 0; started < member.count; ++started)
                start(member, head, member.ways.rising ? started : member.count - 1 - started);
        }
    }
    for (int part = 0; part < cuda::gradient::kParts; ++part) {
        for (Member& member : parted) {
            const int size = (member.count + cuda::gradient::kParts - 1) / cuda::gradient::kParts;
            for (Head& head : member.heads) {
                for (int n = std::min((part + 1) * size, member.count) - 1; n >= part * size; --n)
                    start(member, head, n);
            }
        }
    }
    return last;
}

}  // namespace tessera::model
