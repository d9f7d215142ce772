// SPDX-License-Identifier: Apache-2.0
#include "learn/setting.hpp"

#include <algorithm>
#include <utility>

namespace tessera::learn {

const model::Machine& h200() { return *model::find_machine("h200"); }

Problem problem_of(std::int64_t len, std::int64_t heads, std::int64_t head_dim) {
    Problem problem = Problem::dense(1, len, heads, head_dim);
    problem.dtype = DType::bf16;
    return problem;
}

schedule::Workload workload_of(const Problem& problem, Schedule schedule, Tile tile, Pass pass) {
    return {.problem = problem,
            .schedule = schedule,
            .pass = pass,
            .tile = tile,
            .residency = {.keys = false, .queries = false, .scores = false, .tiles_at_once = 1}};
}

namespace {

double sum_of(const schedule::Workload& workload, std::initializer_list<schedule::Operation> operations,
              std::int64_t schedule::Bytes::*level) {
    double bytes = 0;
    schedule::for_each_step(workload, [&](const schedule::Step& step) {
        if (std::find(operations.begin(), operations.end(), step.operation) != operations.end())
            bytes += static_cast<double>(step.work.bytes.*level);
    });
    return bytes;
}

}  // namespace

double dram_of(const Problem& problem, Schedule schedule, Tile tile,
               std::initializer_list<schedule::Operation> operations) {
    schedule::Workload workload = workload_of(problem, schedule, tile);
    workload.residency.keys = true;
    return sum_of(workload, operations, &schedule::Bytes::dram);
}

double bytes_of(const schedule::Workload& workload, std::initializer_list<schedule::Operation> operations) {
    return sum_of(workload, operations, &schedule::Bytes::l2);
}

double walked_bytes(Schedule schedule, Tile tile) {
    Problem problem = Problem::dense(1, 1024, 1, 64);
    problem.dtype = DType::fp32;
    double bytes = 0;
    schedule::for_each_step(workload_of(problem, schedule, tile),
                            [&](const schedule::Step& step) { bytes += static_cast<double>(step.work.bytes.l2); });
    return bytes * static_cast<double>(tile.block_q) / 1024;
}

walk::Hand pencil_example() { return walk::work_by_hand(Schedule::fa2, {}); }

walk::Hand stream_scores(const std::vector<std::int64_t>& scores, std::int64_t block) {
    walk::HandExample example{.q = {{1, 0}}, .k = {}, .v = {}, .d_o = {{1, 0}}, .tile = {1, block}};
    for (const std::int64_t score : scores) {
        example.k.push_back({score, 0});
        example.v.push_back({1, 0});
    }
    return walk::work_by_hand(example, Schedule::fa2, {});
}

OverlapClocks overlap_clocks(int head_dim) {
    constexpr double kQueries = 128, kKeys = 176;
    const model::Machine& m = h200();
    return {.gemms = kQueries * kKeys * 4 * head_dim / m.matrix_flop, .exponentials = kQueries * kKeys / m.exp_rate};
}

measure::SweepRow predicted(const model::Machine& machine, const Problem& problem, std::vector<Schedule> schedules) {
    return measure::sweep_one(problem, {machine, std::move(schedules), {Pass::forward}, {.by = "published"}});
}

double predicted_ms(const model::Machine& machine, const Problem& problem, Schedule schedule) {
    return predicted(machine, problem, {schedule}).of(schedule)->ms();
}

}  // namespace tessera::learn
