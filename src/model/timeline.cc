// SPDX-License-Identifier: Apache-2.0
#include "model/timeline.hpp"

#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <map>
#include <utility>

#include "tessera/error.hpp"

namespace tessera::model {
namespace {

using schedule::Operation;
using schedule::Step;

Unit unit_of(const Step& step) {
    if (step.work.flop > 0) return Unit::gemms;
    return step.work.exps > 0 ? Unit::exps : Unit::memory;
}

bool is_store(Operation operation) {
    switch (operation) {
        case Operation::store_o:
        case Operation::store_state:
        case Operation::store_scores:
        case Operation::store_weights:
        case Operation::add_dq:
        case Operation::store_ds:
        case Operation::store_dkv:
        case Operation::store_dq: return true;
        default: return false;
    }
}

/// Does the step load data that the schedule itself stored for the same queries? It then waits for that store.
bool is_load_of_stored(Operation operation) {
    return operation == Operation::load_state || operation == Operation::load_scores ||
           operation == Operation::load_weights || operation == Operation::load_ds;
}

/// The kernel of `standard` that loads this: 0: S = Q K^T, 1: the softmax, 2: O = P V; backward: 3 for the rest.
int kernel_of(Operation load) {
    switch (load) {
        case Operation::load_q:
        case Operation::load_k: return 0;
        case Operation::load_scores: return 1;
        case Operation::load_v:
        case Operation::load_weights: return 2;
        default: return 3;
    }
}

/// Computes the microseconds of a step on one multiprocessor.
class Rates {
 public:
    Rates(const Machine& m, DType dtype) {
        const double clocks_per_us = m.rated_clock_ghz * 1e3;
        flop_ = m.gemm_flop(dtype, false) * clocks_per_us;
        exps_ = m.exp_rate * clocks_per_us;
        l2_ = m.l2_bytes * clocks_per_us;
        dram_ = m.dram_gbs * 1e3 / m.cores;
    }
    double of(const Step& step) const {
        const auto& work = step.work;
        const auto time = [](std::int64_t amount, double rate) {
            return rate > 0 ? static_cast<double>(amount) / rate : 0;
        };
        switch (unit_of(step)) {
            case Unit::gemms: return time(work.flop, flop_);
            case Unit::exps: return time(work.exps, exps_);
            case Unit::memory: break;
        }
        return std::max(time(work.bytes.dram, dram_), time(work.bytes.l2, l2_));
    }

 private:
    double flop_, exps_, l2_, dram_;  // per microsecond
};

/// Lays the steps out one after another, by the rules of timeline().
class Layout {
 public:
    Layout(const schedule::Workload& workload, const Rates& rates)
        : rates_(rates),
          overlaps_(workload.schedule == Schedule::fa3 && workload.pass == Pass::forward),
          separate_kernels_(workload.schedule == Schedule::standard) {}

    void add(const Step& step) {
        if (unit_of(step) != Unit::memory) work(step);
        else if (is_store(step.operation)) stores_.push_back({step, work_end_});
        else load(step);
    }
    std::vector<TimedStep> finished() {
        flush_stores(std::numeric_limits<double>::infinity());
        return std::move(timed_);
    }

 private:
    struct Store {
        Step step;
        double ready;
    };

    /// Appends the step at the first time from `ready` on at which its unit is free. Returns its end.
    double append(const Step& step, Unit unit, double ready) {
        double& free = free_[static_cast<std::size_t>(unit)];
        const double begin = std::max(free, ready);
        free = begin + rates_.of(step);
        timed_.push_back({step, unit, begin, free});
        return free;
    }

    /// Runs the stores that are ready by `until`; the others let loads pass.
    void flush_stores(double until) {
        while (!stores_.empty() && stores_.front().ready <= until) {
            const Store& store = stores_.front();
            stored_[store.step.queries.begin] = store_end_ = append(store.step, Unit::memory, store.ready);
            stores_.pop_front();
        }
    }

    void load(const Step& step) {
        double ready = tile_before_;
        const bool next_kernel = separate_kernels_ && kernel_of(step.operation) != kernel_;
        if (next_kernel) {
            flush_stores(std::numeric_limits<double>::infinity());
            ready = std::max(work_end_, store_end_);
            kernel_ = kernel_of(step.operation);
        }
        if (is_load_of_stored(step.operation)) {
            const auto same = [&](const Store& s) { return s.step.queries.begin == step.queries.begin; };
            while (std::any_of(stores_.begin(), stores_.end(), same)) flush_stores(stores_.front().ready);
            if (const auto at = stored_.find(step.queries.begin); at != stored_.end())
                ready = std::max(ready, at->second);
        }
        flush_stores(std::max(ready, free_[static_cast<std::size_t>(Unit::memory)]));
        load_end_ = append(step, Unit::memory, ready);
        has_loaded_ = true;
    }

    /// Adds a computing step. It waits for its loads and, except in fa3, for the previous work. In fa3 the GEMMs of the
    /// next tile wait for GEMMs only, P waits for its scores, and O for its P.
    void work(const Step& step) {
        const Unit unit = unit_of(step);
        if (std::exchange(has_loaded_, false)) tile_before_ = work_end_;  // another tile begins
        double ready = std::max(load_end_, work_end_);
        if (overlaps_ && unit == Unit::exps) ready = scores_end_;
        else if (overlaps_) ready = step.operation == Operation::values ? std::max(load_end_, weights_end_) : load_end_;
        const double end = append(step, unit, ready);
        work_end_ = std::max(work_end_, end);
        if (step.operation == Operation::scores) scores_end_ = end;
        if (unit == Unit::exps) weights_end_ = end;
    }

    const Rates& rates_;
    bool overlaps_;
    bool separate_kernels_;
    int kernel_ = 0;
    std::array<double, 3> free_{};           // time at which each unit is free
    std::deque<Store> stores_;               // not started
    std::map<std::int64_t, double> stored_;  // first query -> end of its last store
    bool has_loaded_ = false;                // loads since the last work
    double load_end_ = 0, store_end_ = 0, work_end_ = 0, scores_end_ = 0, weights_end_ = 0;
    double tile_before_ = 0;  // end of the work before this tile's
    std::vector<TimedStep> timed_;
};

}  // namespace

const char* name_of(Unit unit) { return unit == Unit::memory ? "memory" : unit == Unit::gemms ? "GEMMs" : "exps"; }

std::vector<TimedStep> timeline(const schedule::Workload& workload, const Machine& machine) {
    if (!machine.supports(workload.problem.dtype))
        throw Error(
            ErrorCode::unsupported, machine.name,
            std::string("expected a dtype that the machine computes, got ") + tessera::name_of(workload.problem.dtype));
    const Rates rates(machine, workload.problem.dtype);
    Layout layout(workload, rates);
    schedule::for_each_step(workload, [&](const Step& step) { layout.add(step); });
    return layout.finished();
}

}  // namespace tessera::model
