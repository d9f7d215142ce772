// SPDX-License-Identifier: Apache-2.0
#include "walk/traffic.hpp"

#include <algorithm>

#include "schedule/grid.hpp"

namespace tessera::walk {
namespace {

using schedule::Operation;

double overlap(const Range& a, const Range& b) {
    return static_cast<double>(Range{std::max(a.begin, b.begin), std::min(a.end, b.end)}.size());
}

/// Returns the workload of one head of one sequence, which contains all keys of a tile of queries.
schedule::Workload one_head(const Plan& plan, Schedule schedule, std::int64_t len_q, std::int64_t len_kv) {
    Problem p;
    p.dtype = plan.problem.dtype;
    p.mask = plan.problem.mask;
    p.batch = p.heads_q = p.heads_kv = 1;
    p.len_q = len_q;
    p.len_kv = len_kv;
    p.head_dim = plan.problem.head_dim;
    p.head_dim_v = plan.problem.head_dim_v;
    return {.problem = p, .schedule = schedule, .pass = plan.pass, .tile = plan.tile};
}

/// Returns the number of tiles of queries that see some of these keys.
std::int64_t query_tiles_of(const schedule::Workload& w, const Range& keys) {
    const Band band = w.problem.mask.bind(w.problem.len_q, w.problem.len_kv);
    const Range seen = band.q_range(keys.begin, keys.end);
    if (seen.empty()) return 1;
    return schedule::ceil_div(seen.end, w.tile.block_q) - seen.begin / w.tile.block_q;
}

}  // namespace

RowBytes::RowBytes(const schedule::Workload& workload, const Range& queries)
    : schedule_(workload.schedule),
      pass_(workload.pass),
      queries_(queries),
      workload_(workload),
      keys_outer_(schedule_ == Schedule::fa1 || (schedule_ != Schedule::standard && pass_ == Pass::backward)) {
    schedule::for_each_step(workload, [this](const schedule::Step& step) { visit(step); });
    at_end_ += pending_;  // fa1: O, m and l are written once more as results
}

/// Returns the kind of kernel step that an operation belongs to.
TileStep RowBytes::kind_of(Operation operation) {
    const bool forward = pass_ == Pass::forward;
    if (schedule_ != Schedule::standard) return forward ? TileStep::values : TileStep::gradients;
    if (forward) {
        if (operation == Operation::scores || operation == Operation::store_scores) return TileStep::scores;
        const bool rows = operation == Operation::load_scores || operation == Operation::softmax ||
                          operation == Operation::store_weights;
        return rows ? TileStep::softmax : TileStep::values;
    }
    if (operation == Operation::load_weights) in_columns_ = true;
    if (in_columns_) return TileStep::dk_and_dv;
    return operation == Operation::load_ds || operation == Operation::dq_product ? TileStep::dq : TileStep::weights;
}

void RowBytes::add(TileStep kind, const Range& keys, double bytes) {
    auto& parts = parts_[kind];
    const auto same = std::find_if(parts.begin(), parts.end(), [&](const auto& part) { return part.first == keys; });
    if (same == parts.end()) parts.emplace_back(keys, bytes);
    else same->second += bytes;
}

void TrafficSum::add(const Moved& moved) {
    if (moved.bytes == 0) return;
    const auto same = std::find_if(moved_.begin(), moved_.end(), [&](const Moved& m) {
        return m.operation == moved.operation && m.shared_by == moved.shared_by;
    });
    if (same == moved_.end()) return moved_.push_back(moved);
    same->times += moved.times;
    same->bytes += moved.bytes;
    same->least = std::min(same->least, moved.least);
    same->most = std::max(same->most, moved.most);
}

void TrafficSum::add(const TrafficSum& other) {
    for (const Moved& moved : other.moved_) add(moved);
}

double TrafficSum::bytes() const {
    double sum = 0;
    for (const Moved& moved : moved_) sum += moved.bytes;
    return sum;
}

void RowBytes::visit(const schedule::Step& step) {
    const auto bytes = static_cast<double>(step.work.bytes.l2);
    const auto moved = [&](std::int64_t shared_by = 1) {
        const double per_tile = bytes / static_cast<double>(shared_by);
        return Moved{step.operation, 1, per_tile, per_tile, per_tile, shared_by};
    };
    const TileStep kind = kind_of(step.operation);
    if (step.queries.empty()) {
        if (step.operation == Operation::store_dkv) {
            const bool is_last = !last_keys_.empty() && last_keys_.begin == step.keys.begin;
            const auto& parts = parts_[kind];
            const bool uses_keys = is_last || std::any_of(parts.begin(), parts.end(), [&](const auto& part) {
                                       return part.first.begin == step.keys.begin;
                                   });
            const std::int64_t rows = query_tiles_of(workload_, step.keys);
            if (uses_keys) add(kind, step.keys, bytes / static_cast<double>(rows)), all_.add(moved(rows));
        } else if (keys_outer_) {
            if (!(column_ == step.keys)) column_ = step.keys, column_part_ = {};
            column_part_.add(moved(query_tiles_of(workload_, step.keys)));
        } else {
            without_row_.add(moved());
        }
        return;
    }
    const bool own = step.queries == queries_;
    if (own) pending_ += without_row_.bytes(), all_.add(without_row_);
    without_row_ = {};
    if (!own) return;
    all_.add(moved());
    if (step.operation == Operation::store_state || step.operation == Operation::add_dq) {
        add(last_kind_, last_keys_, bytes);
    } else if (step.operation == Operation::store_o || step.operation == Operation::store_dq) {
        at_end_ += bytes;
    } else if (step.keys.empty()) {
        pending_ += bytes;
    } else {
        if (keys_outer_ && column_.begin == step.keys.begin) {
            pending_ += column_part_.bytes();
            all_.add(column_part_);
            column_part_ = {};
        }
        add(kind, step.keys, pending_ + bytes);
        pending_ = 0;
        last_kind_ = kind;
        last_keys_ = step.keys;
    }
}

double RowBytes::of(TileStep step, const Range& keys) const {
    const auto found = parts_.find(step);
    if (found == parts_.end()) return 0;
    double sum = 0;
    for (const auto& [range, bytes] : found->second) {
        if (!range.empty()) sum += bytes * overlap(range, keys) / static_cast<double>(range.size());
    }
    return sum;
}

double RowBytes::of(const Range& keys) const {
    double sum = 0;
    for (const auto& [kind, parts] : parts_) sum += of(kind, keys);
    return sum;
}

TrafficCount::TrafficCount(const Plan& plan, const Range& queries, std::int64_t len_q, std::int64_t len_kv)
    : TrafficCount(one_head(plan, plan.kernel->schedule, len_q, len_kv),
                   one_head(plan, Schedule::standard, len_q, len_kv), queries) {}

const Traffic& TrafficCount::after(TileStep step, const Range& keys) {
    if (step == TileStep::merge) return traffic_;  // moves no bytes: it stays in fast memory
    if (step == TileStep::finish) {
        traffic_.schedule += own_.at_end();
        traffic_.standard += standard_.at_end();
    } else {
        traffic_.schedule += own_.of(step, keys);
        traffic_.standard += is_standard_ ? standard_.of(step, keys) : standard_.of(keys);
    }
    return traffic_;
}

const Traffic& TrafficCount::after_backward() {
    traffic_.schedule += own_.at_end();
    traffic_.standard += standard_.at_end();
    return traffic_;
}

}  // namespace tessera::walk
