// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <vector>

#include "schedule/schedule.hpp"
#include "tessera/observer.hpp"
#include "tessera/plan.hpp"

namespace tessera::walk {

/// Bytes between slow and fast memory for one tile of queries, as src/schedule counts them. K and V (dK and dV) that
/// are moved once for all tiles of queries count in equal parts.
struct Traffic {
    double schedule = 0;  ///< the schedule at hand
    double standard = 0;  ///< standard attention over the same tiles: S and P (dS too) through slow memory
};

/// What one operation moves of a Traffic.
struct Moved {
    schedule::Operation operation{};
    std::int64_t times = 0;
    double least = 0, most = 0;  ///< bytes of one time
    double bytes = 0;            ///< of all
    std::int64_t shared_by = 1;  ///< tiles of queries that share what is moved once: these are the bytes of one
};

/// A sum of Moved.
class Pile {
 public:
    void add(const Moved& moved);
    void add(const Pile& other);
    double bytes() const;
    const std::vector<Moved>& moved() const { return moved_; }

 private:
    std::vector<Moved> moved_;
};

/// The steps of a schedule that belong to one tile of queries, their bytes by what the kernel tells of.
class RowBytes {
 public:
    RowBytes(const schedule::Workload& workload, const Range& queries);

    /// Of a step of this kind with these keys; of parts of tiles their part.
    double of(TileStep step, const Range& keys) const;
    /// Of all steps with these keys, but for `at_end`.
    double of(const Range& keys) const;
    double at_end() const { return at_end_; }
    /// What all that is made of, in the order in which it begins.
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

    // While the steps go by:
    schedule::Workload workload_;
    bool keys_outer_;
    bool in_columns_ = false;  ///< standard backward: the products that run over the queries
    double pending_ = 0;       ///< of this tile of queries, for its next step with keys
    Pile all_;
    Pile without_row_;   ///< K or V for the next step with queries
    Range column_{};     ///< keys that are loaded for all queries
    Pile column_share_;  ///< what each tile of queries that meets them bears
    TileStep last_kind_{};
    Range last_keys_{};
};

/// Adds up the bytes as the kernel's steps go by.
class TrafficCount {
 public:
    TrafficCount(const Plan& plan, const Range& queries, std::int64_t len_q, std::int64_t len_kv);

    /// After the step.
    const Traffic& after(TileStep step, const Range& keys);
    /// What leaves at the end of a backward, which has no step of its own.
    const Traffic& after_backward();
    /// What the schedule's bytes are made of when all steps have gone by.
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
