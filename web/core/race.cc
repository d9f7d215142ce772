// SPDX-License-Identifier: Apache-2.0
//
// The room "race": every schedule's steps in time. The room "backward" uses it for the backward's steps.
#include "model/timeline.hpp"
#include "workload.hpp"

namespace tessera::web {
namespace {

/// Returns [operation, unit, begin_us, end_us, query begin, end, key begin, end, coverage, dram, l2, shared, flop,
/// exps]. A list without names keeps thousands of steps short.
Json row_of(const model::TimedStep& timed) {
    const schedule::Step& s = timed.step;
    const auto& bytes = s.work.bytes;
    return {schedule::name_of(s.operation),
            model::name_of(timed.unit),
            timed.begin_us,
            timed.end_us,
            s.queries.begin,
            s.queries.end,
            s.keys.begin,
            s.keys.end,
            name_of(s.coverage),
            bytes.dram,
            bytes.l2,
            bytes.shared,
            s.work.flop,
            s.work.exps};
}

Json lane_of(const Json& question, Schedule schedule, Pass pass, const model::Machine& machine) {
    const schedule::Workload w = workload_of(question, schedule, pass);
    Json steps = Json::array();
    Json busy{{"memory", 0.0}, {"GEMMs", 0.0}, {"exps", 0.0}};
    double end = 0;
    for (const model::TimedStep& timed : model::timeline(w, machine)) {
        steps.push_back(row_of(timed));
        const char* unit = model::name_of(timed.unit);
        busy[unit] = busy[unit].get<double>() + timed.end_us - timed.begin_us;
        end = std::max(end, timed.end_us);
    }
    const schedule::Cost cost = schedule::cost(w);
    return {{"schedule", tessera::name_of(schedule)},
            {"end_us", end},
            {"busy_us", busy},
            {"work", json_of(cost.work)},
            {"tiles", {{"full", cost.full}, {"partial", cost.partial}, {"skipped", cost.skipped}}},
            {"steps", steps}};
}

}  // namespace

Json ask_race(const Json& question) {
    const Pass pass = question.value("pass", "forward") == "backward" ? Pass::backward : Pass::forward;
    const model::Machine& machine = machine_of(question);
    expect_playable(workload_of(question, Schedule::fa2, pass));
    Json lanes = Json::array();
    for (const Schedule schedule : kSchedules) lanes.push_back(lane_of(question, schedule, pass, machine));
    return {{"device", machine.name}, {"title", machine.title}, {"cores", machine.cores.value}, {"lanes", lanes}};
}

}  // namespace tessera::web
