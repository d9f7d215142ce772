// SPDX-License-Identifier: Apache-2.0
//
// The room "backward": the steps of fa2's backward by blocks of keys, assigned to parallel workers, and the places
// where two workers add to the same dQ.
#include <map>
#include <set>

#include "schedule/grid.hpp"
#include "tessera/error.hpp"
#include "workload.hpp"

namespace tessera::web {
namespace {

/// The tiles of queries for each tile of keys, in the order of the schedule.
std::map<std::int64_t, std::vector<std::int64_t>> columns_of(const schedule::Workload& w) {
    std::map<std::int64_t, std::vector<std::int64_t>> columns;
    schedule::for_each_step(w, [&](const schedule::Step& step) {
        if (step.operation == schedule::Operation::dq_product)
            columns[step.keys.begin / w.tile.block_kv].push_back(step.queries.begin / w.tile.block_q);
    });
    return columns;
}

/// Assigns tiles of keys to workers; a worker that has finished its tile takes the next one.
Json rounds_of(const std::map<std::int64_t, std::vector<std::int64_t>>& columns, std::size_t workers) {
    struct Place {
        std::int64_t column = -1;
        std::size_t at = 0;
    };
    std::vector<Place> places(workers);
    auto next = columns.begin();
    Json rounds = Json::array();
    while (true) {
        Json round = Json::array();
        std::set<std::int64_t> rows;
        std::set<std::int64_t> shared;
        for (std::size_t worker = 0; worker < workers; ++worker) {
            Place& place = places[worker];
            if (place.column >= 0 && place.at == columns.at(place.column).size()) place.column = -1;
            if (place.column < 0 && next != columns.end()) place = {(next++)->first, 0};
            if (place.column < 0) continue;
            const std::int64_t row = columns.at(place.column)[place.at++];
            if (!rows.insert(row).second) shared.insert(row);
            round.push_back({worker, row, place.column});
        }
        if (round.empty()) return rounds;
        rounds.push_back({{"tiles", round}, {"collisions", shared}});
    }
}

}  // namespace

Json ask_backward(const Json& question) {
    const schedule::Workload w = workload_of(question, Schedule::fa2, Pass::backward);
    const auto workers = question.value("workers", std::int64_t{4});
    if (workers < 1 || workers > 64)
        throw Error(ErrorCode::invalid_argument, "workers", "expected 1..64, got " + std::to_string(workers));
    expect_playable(w);
    const schedule::Grid grid{w.problem.mask.bind(w.problem.len_q, w.problem.len_kv), w.tile};
    const schedule::Cost cost = schedule::cost(w);
    const schedule::Footprint memory = schedule::footprint(w);
    schedule::Workload standard = w;
    standard.schedule = Schedule::standard;
    schedule::Workload forward = w;
    forward.pass = Pass::forward;
    return {{"rows", grid.rows()},
            {"columns", grid.columns()},
            {"rounds", rounds_of(columns_of(w), static_cast<std::size_t>(workers))},
            {"work", json_of(cost.work)},
            {"forward_work", json_of(schedule::cost(forward).work)},
            {"standard_work", json_of(schedule::cost(standard).work)},
            {"tiles", {{"full", cost.full}, {"partial", cost.partial}, {"skipped", cost.skipped}}},
            {"workspace", memory.workspace},
            {"standard_workspace", schedule::footprint(standard).workspace}};
}

}  // namespace tessera::web
