// SPDX-License-Identifier: Apache-2.0
//
// The room "tiles": the map of tiles, the pairs computed in vain, and whether a tile fits in fast memory.
#include "schedule/fast_memory.hpp"
#include "schedule/grid.hpp"
#include "workload.hpp"

namespace tessera::web {
namespace {

constexpr std::int64_t kMostDrawn = 64 * 64;  // the most tiles of a map; a larger one has only counts

/// Returns one string per tile of queries with one letter per tile of keys: f(ull), p(artial), s(kipped).
Json map_of(const schedule::Grid& grid) {
    Json map = Json::array();
    for (std::int64_t i = 0; i < grid.rows(); ++i) {
        std::string row;
        for (std::int64_t j = 0; j < grid.columns(); ++j) row += name_of(grid.coverage(i, j))[0];
        map.push_back(row);
    }
    return map;
}

Json json_of(const schedule::FastMemory& near) {
    return {{"q", near.q},           {"k", near.k},          {"v", near.v},
            {"scores", near.scores}, {"o", near.o},          {"loaded", near.loaded()},
            {"sums", near.sums()},   {"total", near.total()}};
}

}  // namespace

Json ask_tiles(const Json& question) {
    const schedule::Workload w = workload_of(question, Schedule::fa2, Pass::forward);
    const model::Machine& machine = machine_of(question);
    const schedule::Grid grid{w.problem.mask.bind(w.problem.len_q, w.problem.len_kv), w.tile, true};
    const schedule::Cost cost = schedule::cost(w);
    const schedule::FastMemory near = schedule::fast_memory(w);
    const auto room = static_cast<std::int64_t>(machine.shared_kib * 1024);
    const bool is_gpu = machine.kind == model::MachineKind::gpu;
    const std::int64_t held = is_gpu ? near.loaded() : near.total();
    Json answer{
        {"rows", grid.rows()},
        {"columns", grid.columns()},
        {"tiles", {{"full", cost.full}, {"partial", cost.partial}, {"skipped", cost.skipped}}},
        {"pairs", cost.pairs},
        {"elements", cost.elements},
        {"wasted", cost.elements > 0 ? 1 - static_cast<double>(cost.pairs) / static_cast<double>(cost.elements) : 0},
        {"near", json_of(near)},
        {"whole_rows", json_of(schedule::fast_memory_of_whole_rows(w))},
        {"scratchpad",
         {{"device", machine.name},
          {"title", machine.title},
          {"gpu", is_gpu},
          {"bytes", room},
          {"held", held},
          {"fits", held <= room},
          {"source", machine.shared_kib.source}}},
        {"work", web::json_of(cost.work)}};
    if (grid.rows() * grid.columns() <= kMostDrawn) answer["map"] = map_of(grid);
    return answer;
}

Json ask_devices(const Json&) {
    Json list = Json::array();
    for (const model::Machine& m : model::machines()) {
        list.push_back({{"name", m.name},
                        {"title", m.title},
                        {"gpu", m.kind == model::MachineKind::gpu},
                        {"cores", m.cores.value},
                        {"dram_gbs", m.dram_gbs.value},
                        {"memory_gib", m.memory_gib.value},
                        {"shared_kib", m.shared_kib.value},
                        {"bf16", m.supports(DType::bf16)},
                        {"source", m.dram_gbs.source}});
    }
    return list;
}

}  // namespace tessera::web
