// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <vector>

#include "schedule/schedule.hpp"
#include "tessera/observer.hpp"
#include "tessera/plan.hpp"

namespace tessera::walk {

/// Bytes between slow and fast memory for one tile of queries, counted as in src/schedule. The bytes of K and V (dK and
/// dV) that move once for several tiles of queries are divided equally among these tiles.
struct Traffic {
    double schedule = 0;  ///< the schedule of the plan
    double standard = 0;  ///< standard attention over these tiles: S and P (dS too) through slow memory
};

/// The bytes of a Traffic that one operation moves.
struct Moved {
    schedule::Operation operation{};
    std::int64_t times = 0;
    double least = 0, most = 0;  ///< bytes of a single move
    double bytes = 0;            ///< bytes of all moves
    std::int64_t shared_by = 1;  ///< tiles of queries that share one move; the bytes are those of one tile
};

/// A sum of Moved.
class TrafficSum {
 public:
    void add(const Moved& moved);
    void add(const TrafficSum& other);
    double bytes() const;
    const std::vector<Moved>& moved() const { return moved_; }

 private:
    std::vector<Moved> moved_;
};

/// The steps of a schedule that belong to one tile of queries, with their bytes by kind of the kernel's steps.
class RowBytes {
 public:
    RowBytes(const schedule::Workload& workload, const Range& queries);

    /// Returns the bytes of a step of this kind with these keys, in proportion for a part of a tile.
    double of(TileStep step, const Range& keys) const;
    /// Returns the bytes of all steps with these keys, except `at_end`.
    double of(const Range& keys) const;
    double at_end() const { return at_end_; }
    /// Returns the parts of the sum, in the order in which they begin.
    const std::vector<Moved>& moved() const { return all_.moved(); }

 private:
    void visit(const schedule::Step& step);
    TileStep kind_of(schedule::Operation operation);
    void add(TileStep kind, const Range& keys, double bytes);

    Schedule schedule_;
    Pass pass_;
    Range queries_;
    std::map<TileStep, std::vector<std::pair<Range, double>>> parts_;
    double at_end_ = 0;

    // State that changes from step to step.
    schedule::Workload workload_;
    bool keys_outer_;
    bool in_columns_ = false;  ///< standard backward: the GEMMs that run over the queries
    double pending_ = 0;       ///< bytes of this tile of queries, for its next step with keys
    TrafficSum all_;
    TrafficSum without_row_;  ///< K or V for the next step with queries
    Range column_{};          ///< keys that are loaded for all queries
    TrafficSum column_part_;  ///< bytes of these keys that each tile of queries which sees them counts
    TileStep last_kind_{};
    Range last_keys_{};
};

/// Adds up the bytes from step to step of the kernel.
class TrafficCount {
 public:
    TrafficCount(const Plan& plan, const Range& queries, std::int64_t len_q, std::int64_t len_kv);

    /// Returns the traffic after the step.
    const Traffic& after(TileStep step, const Range& keys);
    /// Returns the traffic after the stores at the end of a backward, which have no step of their own.
    const Traffic& after_backward();
    /// Returns the parts of the schedule's bytes after all steps.
    const std::vector<Moved>& moved() const { return own_.moved(); }

 private:
    TrafficCount(const schedule::Workload& workload, const schedule::Workload& standard, const Range& queries)
        : is_standard_(workload.schedule == Schedule::standard),
          own_(workload, queries),
          standard_(standard, queries) {}

    bool is_standard_;
    RowBytes own_;
    RowBytes standard_;
    Traffic traffic_;
};

}  // namespace tessera::walk
