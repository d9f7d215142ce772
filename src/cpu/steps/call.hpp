// SPDX-License-Identifier: Apache-2.0
//
// Helpers that every schedule uses on a call: its sequences and heads, its counters and its observer.
#pragma once

#include "cpu/steps/head.hpp"
#include "cpu/steps/head_tasks.hpp"

namespace tessera::cpu {

/// Counts the tiles of one task, adds them to the caller's counters at its end, and reports tiles to the caller's
/// observer.
class TileTally {
 public:
    explicit TileTally(TileCounters* counters, TileObserver* observer = nullptr)
        : counters_(counters), observer_(observer) {}
    template <class Args>
    explicit TileTally(const Call<Args>& call) : TileTally(call.counters, call.observer) {}
    ~TileTally();
    TileTally(const TileTally&) = delete;
    TileTally& operator=(const TileTally&) = delete;
    void ran(Coverage coverage, const Panel& panel, const KvTile& kv) { ran(coverage, panel.queries * kv.keys); }
    /// Counts a tile of `pairs` (query, key) pairs.
    void ran(Coverage coverage, std::int64_t pairs) {
        ++(coverage == Coverage::full ? full_ : partial_);
        computed_pairs_ += pairs;
    }
    /// Counts the skipped tiles of a panel: `touched` of `all` ran.
    void skipped(std::int64_t all, std::int64_t touched) { skipped_ += all - touched; }
    /// make_report() is called only if there is an observer.
    template <class MakeReport>
    void report(const MakeReport& make_report) const {
        if (observer_ != nullptr) observer_->saw(make_report());
    }

 private:
    TileCounters* counters_;
    TileObserver* observer_;
    std::int64_t full_ = 0;
    std::int64_t partial_ = 0;
    std::int64_t skipped_ = 0;
    std::int64_t computed_pairs_ = 0;
};

/// The report to an observer about a panel and some keys; the schedule adds the arrays.
TileReport report_of(TileStep step, const Head& head, const Panel& panel, Range keys, Coverage coverage);

/// Query head `index` of all sequences.
template <class Args>
Head head_of(const Call<Args>& call, std::int64_t index) {
    const Problem& p = call.plan.problem;
    return {p, call.args, sequence_of(call, index / p.heads_q), index % p.heads_q};
}

/// Calls body(head) in ascending order for the query heads that share a kv head.
template <class Body>
void for_each_query_head(const BackwardCall& call, const Sequence& sequence, std::int64_t kv_head, const Body& body) {
    const Problem& p = call.plan.problem;
    for (std::int64_t h = kv_head * p.group(); h < (kv_head + 1) * p.group(); ++h)
        body(Head(p, call.args, sequence, h));
}

}  // namespace tessera::cpu
