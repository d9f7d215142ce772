// SPDX-License-Identifier: Apache-2.0
#include "model/cpu_tasks.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <queue>

#include "model/cpu.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {
namespace {

using schedule::ceil_div;

constexpr std::int64_t kKeysOfChunk = 512;  // that a row's sum is cut into
constexpr double kMostTasks = 1 << 16;      // more are dealt evenly enough
// Scores of a step on a matrix unit, 32 queries by so many keys, fit the first-level cache; the softmax of more takes
// so much longer (bench/results/cpu/rounds_95001_xeon16.jsonl).
constexpr std::int64_t kKeysInCache = 384;
constexpr double kSpilled = 1.15;

constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) { return ceil_div(n, to) * to; }
constexpr Range overlap(const Range& a, const Range& b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

using Lengths = std::vector<std::pair<std::int64_t, std::int64_t>>;

Lengths members_of(const schedule::Workload& w) {
    if (!w.members.empty()) return {w.members.begin(), w.members.end()};
    return Lengths(static_cast<std::size_t>(w.problem.batch), {w.problem.len_q, w.problem.len_kv});
}

/// Time until the last of `threads` is done that take tasks one by one.
double dealt(const std::vector<double>& clocks, int threads) {
    std::priority_queue<double, std::vector<double>, std::greater<>> free;
    for (int i = 0; i < threads; ++i) free.push(0);
    double last = 0;
    for (const double task : clocks) {
        const double end = free.top() + task;
        free.pop();
        free.push(end);
        last = std::max(last, end);
    }
    return last;
}

/// The same of stripes: a thread takes the ready block of the stripe that has most left.
class StripesRun {
 public:
    StripesRun(const std::vector<std::vector<std::vector<Amounts>>>& stripes, const Cost& cost)
        : stripes_(stripes), cost_(cost) {
        for (const auto& head : stripes) next_.emplace_back(head.size(), 0), runs_.emplace_back(head.size(), false);
    }

    double done(int threads) {
        using Event = std::tuple<double, std::size_t, std::size_t>;
        std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
        double now = 0;
        for (int free = threads;; ++free) {
            for (; free > 0; --free) {
                const auto at = ready();
                if (!at) break;
                const auto [head, stripe] = *at;
                runs_[head][stripe] = true;
                events.emplace(now + cost_(stripes_[head][stripe][next_[head][stripe]]), head, stripe);
            }
            if (events.empty()) return now;
            const auto [end, head, stripe] = events.top();
            events.pop();
            now = end;
            runs_[head][stripe] = false;
            ++next_[head][stripe];
        }
    }

 private:
    std::optional<std::pair<std::size_t, std::size_t>> ready() const {
        std::optional<std::pair<std::size_t, std::size_t>> best;
        std::size_t most = 0;
        for (std::size_t head = 0; head < stripes_.size(); ++head) {
            for (std::size_t i = 0; i < stripes_[head].size(); ++i) {
                const std::size_t left = stripes_[head][i].size() - next_[head][i];
                const bool waits = i > 0 && next_[head][i - 1] <= next_[head][i];
                if (left > most && !runs_[head][i] && !waits) most = left, best = {head, i};
            }
        }
        return best;
    }

    const std::vector<std::vector<std::vector<Amounts>>>& stripes_;
    const Cost& cost_;
    std::vector<std::vector<std::size_t>> next_;
    std::vector<std::vector<bool>> runs_;
};

/// Of a head's forward: panels of queries against blocks of keys.
class ForwardTasks {
 public:
    ForwardTasks(const schedule::Workload& w, const CpuDeal& deal)
        : p_(w.problem), w_(w), deal_(deal), heads_(p_.batch * p_.heads_kv) {
        if (deal.on_matrix_unit) cut_for_matrix_unit();
        else cut_for_lanes();
    }

    double count() const {
        return static_cast<double>(heads_) * static_cast<double>(ceil_div(panels_, per_task_)) *
               static_cast<double>(split_ ? chunks_ : 1);
    }

    Loop loop() const {
        Loop loop;
        for (const auto& [len_q, len_kv] : members_of(w_)) {
            const std::vector<Amounts> own = tasks_of_head(len_q, len_kv);
            const auto n = static_cast<std::int64_t>(own.size());
            const auto heads = p_.heads_kv;
            if (p_.mask.trivial() || split_) {
                for (std::int64_t h = 0; h < heads; ++h) loop.tasks.insert(loop.tasks.end(), own.begin(), own.end());
            } else {  // the last panels first, of all heads
                for (std::int64_t i = n; i-- > 0;)
                    loop.tasks.insert(loop.tasks.end(), static_cast<std::size_t>(heads),
                                      own[static_cast<std::size_t>(i)]);
            }
        }
        return loop;
    }

 private:
    std::int64_t tasks(std::int64_t per_task) const {
        return heads_ * ceil_div(panels_, per_task) * (split_ ? chunks_ : 1);
    }

    /// cpu/fa2/matrix/memory.hpp
    void cut_for_matrix_unit() {
        constexpr std::int64_t kMostPanels = 8, kTasks = 3, kTasksOfShortRows = 2;
        block_q_ = kMatrixPanel;
        count_panels();
        per_task_ = kMostPanels;
        const auto too_few = [&](std::int64_t of_thread) {
            return deal_.threads > 1 && tasks(per_task_) < of_thread * deal_.threads;
        };
        split_ = chunks_ > 1 && too_few(kTasks);
        if (chunks_ <= 1) {
            while (per_task_ > 1 && too_few(kTasksOfShortRows)) per_task_ /= 2;
            const auto time = [&](std::int64_t n) { return ceil_div(tasks(n), deal_.threads) * n; };
            while (per_task_ < kMostPanels && time(2 * per_task_) <= time(per_task_)) per_task_ *= 2;
        }
        while (chunks_ > 1 && per_task_ > 1 && too_few(kTasks)) per_task_ /= 2;
        per_task_ = std::clamp<std::int64_t>(panels_, 1, per_task_);
    }

    /// cpu/fa2/lanes/forward.cc
    void cut_for_lanes() {
        constexpr std::int64_t kMostPanels = 4, kTasks = 4;
        block_q_ = std::min(w_.tile.block_q, round_up(std::max<std::int64_t>(p_.len_q, 1), kLanes));
        count_panels();
        const std::int64_t query_heads = p_.batch * p_.heads_q;
        while (block_q_ >= 2 * kLanes && 2 * query_heads * (panels_ / p_.group()) * chunks_ <= deal_.threads) {
            block_q_ = ceil_div(block_q_, 2 * kLanes) * kLanes;
            count_panels();
        }
        per_task_ = kMostPanels;
        while (per_task_ > 1 && heads_ * panels_ < per_task_ * deal_.threads * kTasks) per_task_ /= 2;
        split_ = deal_.threads > 1 && chunks_ > 1 && heads_ * panels_ < 2 * deal_.threads;
    }

    void count_panels() {
        panels_ = p_.group() * std::max<std::int64_t>(1, ceil_div(p_.len_q, block_q_));
        chunks_ = std::max<std::int64_t>(1, ceil_div(p_.len_kv, kKeysOfChunk));
    }

    std::vector<Amounts> tasks_of_head(std::int64_t len_q, std::int64_t len_kv) const {
        const Band band = p_.mask.bind(len_q, len_kv);
        const std::int64_t of_query_head = ceil_div(len_q, block_q_);
        const std::int64_t all = p_.group() * of_query_head;
        std::vector<Amounts> result;
        for (std::int64_t first = 0; first < all; first += per_task_) {
            const Range panels{first, std::min(all, first + per_task_)};
            for (std::int64_t key = 0; key < len_kv; key += split_ ? kKeysOfChunk : len_kv) {
                const Range keys{key, split_ ? std::min(len_kv, key + kKeysOfChunk) : len_kv};
                result.push_back(task(band, panels, of_query_head, keys));
            }
        }
        return result;
    }

    Amounts task(const Band& band, const Range& panels, std::int64_t of_query_head, const Range& keys) const {
        Amounts sum;
        Range seen_by_any{keys.end, keys.begin};
        for (std::int64_t i = panels.begin; i < panels.end; ++i) {
            const std::int64_t q = i % of_query_head * block_q_;
            const Range queries{q, std::min(band.len_q, q + block_q_)};
            const Range seen = overlap(band.kv_range(queries.begin, queries.end), keys);
            if (deal_.on_matrix_unit)  // Q goes in, O comes out
                sum.packed += static_cast<double>(queries.size() * (p_.head_dim + p_.head_dim_v));
            if (seen.begin >= seen.end) continue;
            seen_by_any = {std::min(seen_by_any.begin, seen.begin), std::max(seen_by_any.end, seen.end)};
            add_panel(band, queries, seen, sum);
        }
        if (!deal_.on_matrix_unit || seen_by_any.begin >= seen_by_any.end) return sum;
        const Range packed{seen_by_any.begin / kKeysOfChunk * kKeysOfChunk,
                           std::min(keys.end, round_up(seen_by_any.end, kKeysOfChunk))};
        sum.packed += static_cast<double>(packed.size() * ((keys_in_place() ? 0 : p_.head_dim) + p_.head_dim_v));
        return sum;
    }

    void add_panel(const Band& band, const Range& queries, const Range& seen, Amounts& sum) const {
        const std::int64_t lanes = round_up(queries.size(), kLanes);
        if (!deal_.on_matrix_unit) {
            const std::int64_t elements = lanes * (seen.end - seen.begin / w_.tile.block_kv * w_.tile.block_kv);
            sum.exps += static_cast<double>(elements);
            sum.flop += static_cast<double>(elements * 2 * (p_.head_dim + p_.head_dim_v));
            return;
        }
        for (std::int64_t block = seen.begin / kKeysOfChunk * kKeysOfChunk; block < seen.end; block += kKeysOfChunk) {
            const Range keys{std::max(block, seen.begin / kStrip * kStrip), std::min(block + kKeysOfChunk, seen.end)};
            const std::int64_t elements = lanes * round_up(keys.size(), kStrip);
            const bool plain = keys.size() % kStrip == 0 &&
                               band.coverage(queries.begin, queries.end, keys.begin, keys.end) == Coverage::full;
            sum.exps += static_cast<double>(elements) * (keys.size() > kKeysInCache ? kSpilled : 1);
            sum.masked += plain ? 0 : static_cast<double>(elements);
            // In bf16 the sum of the rounded weights is one more tile of O.
            const std::int64_t columns =
                round_up(p_.head_dim, kDeep) + round_up(p_.head_dim_v, kRows) + (deal_.parts == 1 ? kRows : 0);
            sum.flop += static_cast<double>(elements * 2 * columns);
        }
    }

    /// Are K's rows used where they lie (cpu/matrix/layout.hpp), those of a packed tensor?
    bool keys_in_place() const {
        constexpr std::int64_t kFarthest = 512;
        return deal_.parts == 1 && p_.head_dim % kDeep == 0 && p_.heads_kv * p_.head_dim <= kFarthest;
    }

    static constexpr std::int64_t kStrip = 32, kDeep = 32, kRows = 16;  // tiles of the matrix unit
    const Problem& p_;
    const schedule::Workload& w_;
    CpuDeal deal_;
    std::int64_t heads_;  // of keys, of all members
    std::int64_t block_q_ = 1, panels_ = 1, chunks_ = 1, per_task_ = 1;
    bool split_ = false;
};

/// The backward on a matrix unit: cpu/fa2/matrix/backward.cc.
class BackwardTasks {
 public:
    BackwardTasks(const schedule::Workload& w, const CpuDeal& deal)
        : p_(w.problem), w_(w), deal_(deal), heads_(p_.batch * p_.heads_q) {
        const std::int64_t blocks = std::max<std::int64_t>(1, ceil_div(p_.len_kv, kBlockKv));
        const std::int64_t tiles = std::max<std::int64_t>(1, ceil_div(p_.len_q, kBlockQ));
        const std::int64_t wanted = ceil_div(kStripesPerWorker * deal.threads, std::max<std::int64_t>(1, heads_));
        stripes_ = deal.threads == 1 ? 1 : std::min({wanted, blocks, tiles});
        striped_ = (heads_ >= deal.threads || heads_ * stripes_ >= kStripesPerWorker * deal.threads) && sums_fit();
    }

    double count() const {
        const std::int64_t strips = ceil_div(p_.len_kv, kTile) * ceil_div(p_.len_q, kBlockQ);
        return static_cast<double>(heads_) * static_cast<double>(std::max<std::int64_t>(1, strips)) / 16;
    }

    std::vector<Loop> loops() const {
        std::vector<Loop> all;
        all.push_back({.tasks = {packing()}, .even = true});
        if (deal_.parts == 1) all.push_back(deltas());
        if (striped_) all.push_back(stripes());
        else all.push_back(parts());
        return all;
    }

 private:
    static constexpr std::int64_t kBlockQ = 128, kBlockKv = 256, kTile = 32, kRows = 16, kStripesPerWorker = 4;
    enum class Makes { all, keys, queries, delta };

    bool sums_fit() const {
        const double dims = 4 * static_cast<double>(p_.head_dim + p_.head_dim_v);
        const double queries = static_cast<double>(heads_ * p_.len_q) * dims;
        return p_.heads_q == p_.heads_kv || static_cast<double>(heads_ * p_.len_kv) * dims <= std::max(0x1p28, queries);
    }

    double flop_of(Makes what) const {
        const auto d = static_cast<double>(round_up(p_.head_dim, kRows)),
                   dv = static_cast<double>(round_up(p_.head_dim_v, kRows));
        const auto scores = static_cast<double>(round_up(p_.head_dim, kTile) + round_up(p_.head_dim_v, kTile));
        switch (what) {
            case Makes::all: return 2 * (scores + dv + 2 * d);
            case Makes::keys: return 2 * (scores + dv + d);
            case Makes::queries: return 2 * (scores + d);
            case Makes::delta: return 2 * scores;
        }
        return 0;
    }

    /// Queries against keys of a head: strips of 32 keys, each with the queries of a tile that see some of it.
    Amounts amounts(const Band& band, const Range& queries, const Range& keys, Makes what) const {
        Amounts sum;
        for (std::int64_t key = keys.begin; key < keys.end; key += kTile) {
            const Range strip{key, std::min(key + kTile, band.len_kv)};
            const Range seen = overlap(band.q_range(strip.begin, strip.end), queries);
            for (std::int64_t q = std::max(seen.begin, queries.begin) / kBlockQ * kBlockQ; q < seen.end; q += kBlockQ) {
                const Range own = overlap(seen, {std::max(q, queries.begin), std::min(q + kBlockQ, queries.end)});
                if (own.begin >= own.end) continue;
                const Range tiles{own.begin / kTile * kTile, round_up(own.end, kTile)};
                const auto elements = static_cast<double>(kTile * tiles.size());
                const std::int64_t last = std::min(tiles.end, band.len_q);
                const bool plain =
                    last == tiles.end && band.coverage(tiles.begin, last, strip.begin, strip.end) == Coverage::full;
                sum.exps += elements;
                sum.masked += plain ? 0 : elements;
            }
        }
        sum.flop = sum.exps * flop_of(what);
        return sum;
    }

    Amounts packing() const {
        const auto queries = static_cast<double>(p_.rows_q() * p_.heads_q),
                   keys = static_cast<double>(p_.rows_kv() * p_.heads_kv);
        const auto d = static_cast<double>(p_.head_dim), dv = static_cast<double>(p_.head_dim_v);
        return {.packed = queries * 2 * (d + dv) + keys * (2 * d + dv)};
    }

    std::int64_t rows_per_task(std::int64_t heads, std::int64_t len, std::int64_t most, std::int64_t tasks) const {
        while (most > kTile && heads * ceil_div(len, most) < tasks * deal_.threads) most /= 2;
        return most;
    }

    /// Tasks of so many queries each, the last ones first, of all heads.
    void add_queries(std::int64_t rows, Makes what, std::vector<Amounts>& tasks) const {
        for (const auto& [len_q, len_kv] : members_of(w_)) {
            const Band band = p_.mask.bind(len_q, len_kv);
            for (std::int64_t i = ceil_div(len_q, rows); i-- > 0;) {
                const Range queries{i * rows, std::min(len_q, (i + 1) * rows)};
                tasks.insert(tasks.end(), static_cast<std::size_t>(p_.heads_q),
                             amounts(band, queries, {0, len_kv}, what));
            }
        }
    }

    Loop deltas() const {
        Loop loop;
        add_queries(rows_per_task(heads_, p_.len_q, kBlockQ, 2), Makes::delta, loop.tasks);
        return loop;
    }

    Loop stripes() const {
        Loop loop;
        const bool whole = stripes_ == 1 && (deal_.threads == 1 || heads_ >= kStripesPerWorker * deal_.threads);
        for (const auto& [len_q, len_kv] : members_of(w_)) {
            const Band band = p_.mask.bind(len_q, len_kv);
            if (whole) {
                loop.tasks.insert(loop.tasks.end(), static_cast<std::size_t>(p_.heads_q),
                                  amounts(band, {0, len_q}, {0, len_kv}, Makes::all));
                continue;
            }
            const std::int64_t tiles = ceil_div(len_q, kBlockQ);
            std::vector<std::vector<Amounts>> head;
            for (std::int64_t s = 0; s < stripes_; ++s) {
                const Range queries{tiles * s / stripes_ * kBlockQ,
                                    std::min(len_q, tiles * (s + 1) / stripes_ * kBlockQ)};
                std::vector<Amounts> blocks;
                for (std::int64_t key = 0; key < std::max<std::int64_t>(len_kv, 1); key += kBlockKv)
                    blocks.push_back(amounts(band, queries, {key, std::min(len_kv, key + kBlockKv)}, Makes::all));
                head.push_back(std::move(blocks));
            }
            loop.stripes.insert(loop.stripes.end(), static_cast<std::size_t>(p_.heads_q), head);
        }
        return loop;
    }

    /// dK and dV of some keys over all queries, then dQ of some queries over all keys.
    Loop parts() const {
        Loop loop;
        const std::int64_t rows = rows_per_task(p_.batch * p_.heads_kv, p_.len_kv, kBlockKv, 1);
        for (const auto& [len_q, len_kv] : members_of(w_)) {
            const Band band = p_.mask.bind(len_q, len_kv);
            for (std::int64_t key = 0; key < len_kv; key += rows) {
                const Amounts of_head = amounts(band, {0, len_q}, {key, std::min(len_kv, key + rows)}, Makes::keys);
                Amounts group;
                for (std::int64_t i = 0; i < p_.group(); ++i) group += of_head;
                loop.tasks.insert(loop.tasks.end(), static_cast<std::size_t>(p_.heads_kv), group);
            }
        }
        add_queries(rows_per_task(heads_, p_.len_q, kBlockQ, 2), Makes::queries, loop.tasks);
        return loop;
    }

    const Problem& p_;
    const schedule::Workload& w_;
    CpuDeal deal_;
    std::int64_t heads_;  // of queries, of all members
    std::int64_t stripes_ = 1;
    bool striped_ = true;
};

}  // namespace

Amounts& Amounts::operator+=(const Amounts& other) {
    flop += other.flop, exps += other.exps, masked += other.masked, packed += other.packed;
    return *this;
}

Amounts Loop::sum() const {
    Amounts all;
    for (const Amounts& task : tasks) all += task;
    for (const auto& head : stripes) {
        for (const auto& stripe : head)
            for (const Amounts& block : stripe) all += block;
    }
    return all;
}

double Loop::done(int threads, const Cost& cost) const {
    if (even) return cost(sum()) / threads;
    if (!stripes.empty()) return StripesRun(stripes, cost).done(threads);
    std::vector<double> clocks;
    clocks.reserve(tasks.size());
    for (const Amounts& task : tasks) clocks.push_back(cost(task));
    return dealt(clocks, threads);
}

std::vector<Loop> loops_of(const schedule::Workload& workload, const CpuDeal& deal) {
    if (workload.pass == Pass::forward) {
        const ForwardTasks tasks(workload, deal);
        if (tasks.count() > kMostTasks) return {};
        return {tasks.loop()};
    }
    const BackwardTasks tasks(workload, deal);
    if (!deal.on_matrix_unit || tasks.count() > kMostTasks) return {};
    return tasks.loops();
}

}  // namespace tessera::model
