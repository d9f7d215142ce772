// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "roofline_views.hpp"
#include "schedule/fast_memory.hpp"
#include "table.hpp"

namespace tessera::cli {
namespace {

/// One memory: its size, its bandwidth, and the bytes of a tile in it.
struct Level {
    const char* name;
    double of_core;  ///< bytes; 0: all cores share it
    double bytes;
    double gbs;  ///< for all cores together; 0: unknown
    std::string contents;
    double used = 0;  ///< bytes of a tile in this memory
};

double gbs_of(double bytes_per_clk, const model::Machine& machine) {
    return bytes_per_clk * machine.cores * machine.rated_clock_ghz;
}

std::string sum_text(std::initializer_list<std::pair<const char*, std::int64_t>> parts) {
    std::string text;
    for (const auto& [name, bytes] : parts)
        text += fmt::format("{}{} {}", text.empty() ? "" : " + ", name, bytes_text(static_cast<double>(bytes)));
    return text;
}

std::vector<Level> levels_of(const schedule::Workload& w, const model::Machine& m) {
    const schedule::FastMemory fast = schedule::fast_memory(w);
    const bool gpu = m.kind == model::MachineKind::gpu;
    const auto shared_bytes = static_cast<double>(model::limits_of(m).shared_bytes);
    const schedule::Footprint memory = schedule::footprint(w);
    std::vector<Level> levels;
    if (gpu) {
        levels.push_back({"registers", model::kRegisterBytes, model::kRegisterBytes * m.cores, 0,
                          sum_text({{"S", fast.scores}, {"O, m, l", fast.o}}), static_cast<double>(fast.sums())});
        levels.push_back({"shared memory", shared_bytes, shared_bytes * m.cores, gbs_of(m.shared_bytes, m),
                          sum_text({{"Q", fast.q}, {"K", fast.k}, {"V", fast.v}}), static_cast<double>(fast.loaded())});
    } else {
        const double cache = m.shared_kib * 1024;
        levels.push_back(
            {"second-level cache", cache, cache * m.cores, gbs_of(m.shared_bytes, m),
             sum_text({{"Q", fast.q}, {"K", fast.k}, {"V", fast.v}, {"S", fast.scores}, {"O, m, l", fast.o}}),
             static_cast<double>(fast.total())});
    }
    levels.push_back({gpu ? "L2" : "last-level cache", 0, m.l2_mib * 1048576, gbs_of(m.l2_bytes, m), "", 0});
    levels.push_back({"DRAM", 0, m.memory_gib * 1073741824, m.dram_gbs,
                      sum_text({{"tensors", memory.tensors}, {"workspace", memory.workspace}}),
                      static_cast<double>(memory.total())});
    return levels;
}

/// The most keys that fit in a tile with these queries, with one stage of K and V and with two.
std::pair<std::int64_t, std::int64_t> most_keys(const schedule::Workload& w, const model::Machine& m) {
    if (m.kind == model::MachineKind::gpu) {
        const std::int64_t bytes = model::limits_of(m).shared_bytes;
        return {schedule::most_keys(w, bytes, 1, false), schedule::most_keys(w, bytes, 2, false)};
    }
    const auto bytes = static_cast<std::int64_t>(m.shared_kib * 1024);
    return {schedule::most_keys(w, bytes, 1, true), schedule::most_keys(w, bytes, 2, true)};
}

std::string contents_text(const Level& level) {
    if (level.contents.empty()) return "-";
    const double capacity = level.of_core > 0 ? level.of_core : level.bytes;
    const std::string sum = level.contents.find('+') == std::string::npos ? "" : " = " + bytes_text(level.used);
    if (level.used <= capacity) return fmt::format("{}{}: fits", level.contents, sum);
    return fmt::format("{}{}: {} too much", level.contents, sum, bytes_text(level.used - capacity));
}

}  // namespace

std::string tile_text(const schedule::Workload& w, const model::Machine& machine, int width) {
    Table table({{"memory"},
                 {"per core", Align::right},
                 {"in all", Align::right},
                 {"rate", Align::right},
                 {"contents of a tile"}});
    for (const Level& level : levels_of(w, machine)) {
        table.add({level.name, level.of_core > 0 ? bytes_text(level.of_core) : "shared", bytes_text(level.bytes),
                   level.gbs > 0 ? fmt::format("{} GB/s", count_text(static_cast<std::int64_t>(level.gbs))) : "-",
                   contents_text(level)});
    }
    const auto [once, twice] = most_keys(w, machine);
    const std::string most = once == 0
                                 ? fmt::format("no tile of {} queries fits", w.tile.block_q)
                                 : fmt::format("{} queries and {} keys; {} keys with two stages of K and V",
                                               w.tile.block_q, count_text(once), twice > 0 ? count_text(twice) : "no");
    return facts_text({{"device", fmt::format("{}: {}, {} cores", machine.name, machine.title, machine.cores.value)},
                       {"problem", w.problem.describe()},
                       {"tile", fmt::format("{} queries x {} keys", w.tile.block_q, w.tile.block_kv)}},
                      width) +
           "\n" + table.text(width) + "\n" + facts_text({{"largest", most}}, width);
}

Json tile_json(const schedule::Workload& w, const model::Machine& machine) {
    Json memories = Json::array();
    for (const Level& level : levels_of(w, machine)) {
        Json entry{{"memory", level.name}, {"bytes", level.bytes}, {"gbs", level.gbs}};
        if (level.of_core > 0) entry["bytes_of_a_core"] = level.of_core;
        if (!level.contents.empty()) {
            entry["held"] = level.used;
            entry["fits"] = level.used <= (level.of_core > 0 ? level.of_core : level.bytes);
        }
        memories.push_back(entry);
    }
    const auto [once, twice] = most_keys(w, machine);
    return {{"device", machine.name},
            {"tile", {w.tile.block_q, w.tile.block_kv}},
            {"memories", memories},
            {"most_keys", once},
            {"most_keys_twice", twice}};
}

}  // namespace tessera::cli
