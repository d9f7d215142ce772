// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "model/timeline.hpp"
#include "roofline_views.hpp"
#include "table.hpp"

namespace tessera::cli {
namespace {

using model::TimedStep;
using model::Unit;

constexpr Unit kUnits[] = {Unit::memory, Unit::gemms, Unit::exps};

struct Timeline {
    std::vector<TimedStep> steps;
    std::array<double, 3> busy{};  ///< us of each unit
    double end = 0;

    Timeline(const schedule::Workload& workload, const model::Machine& machine)
        : steps(model::timeline(workload, machine)) {
        for (const TimedStep& s : steps) {
            busy[static_cast<std::size_t>(s.unit)] += s.end_us - s.begin_us;
            end = std::max(end, s.end_us);
        }
    }
};

/// The digit of a tile of keys; a step without one loads Q.
char letter_of(const schedule::Step& step, std::int64_t block_kv) {
    constexpr std::string_view kLetters = "0123456789abcdefghijklmnopqrstuvwxyz";
    if (step.keys.empty()) return 'Q';
    return kLetters[static_cast<std::size_t>(step.keys.begin / block_kv) % kLetters.size()];
}

/// Formats a lane: each character shows what the unit does in the middle of an equal part of the time.
std::string lane_text(const Timeline& timeline, Unit unit, std::int64_t block_kv, std::size_t characters) {
    std::string lane(characters, '.');
    for (const TimedStep& s : timeline.steps) {
        if (s.unit != unit) continue;
        for (std::size_t i = 0; i < characters; ++i) {
            const double at = (static_cast<double>(i) + 0.5) / static_cast<double>(characters) * timeline.end;
            if (at >= s.begin_us && at < s.end_us) lane[i] = letter_of(s.step, block_kv);
        }
    }
    return lane;
}

std::string range_of(const Range& range) {
    return range.empty() ? "-" : fmt::format("{}..{}", range.begin, range.end - 1);
}

}  // namespace

std::string timeline_text(const schedule::Workload& w, const model::Machine& machine, int width) {
    const Timeline timeline(w, machine);
    std::string text =
        facts_text({{"device", fmt::format("{}: one of {} cores", machine.name, machine.cores.value)},
                    {"problem", w.problem.describe()},
                    {"schedule", fmt::format("{} {}, tile {} x {}", name_of(w.schedule), name_of(w.pass),
                                             w.tile.block_q, w.tile.block_kv)},
                    {"reads",
                     "a lane for each unit, time to the right. A digit or letter is the tile of keys in work, Q a step "
                     "of queries alone, a dot an idle unit. Every unit runs at its full rate: this shows dependencies "
                     "and is no prediction"}},
                   width) +
        "\n";
    constexpr int kName = 18;
    for (const Unit unit : kUnits) {
        const double percent =
            timeline.end > 0 ? 100 * timeline.busy[static_cast<std::size_t>(unit)] / timeline.end : 0;
        text += fmt::format("{:<10}{:>4.0f} %  {}\n", model::name_of(unit), percent,
                            lane_text(timeline, unit, w.tile.block_kv, static_cast<std::size_t>(width - kName)));
    }
    text += fmt::format("{:<{}}0{:>{}}\n\n", "", kName, fmt::format("{:.4g} us", timeline.end), width - kName - 1);
    Table table({{"begin us", Align::right}, {"end us", Align::right}, {"unit"}, {"step"}, {"queries"}, {"keys"}});
    constexpr std::size_t kMost = 40;
    for (std::size_t i = 0; i < std::min(kMost, timeline.steps.size()); ++i) {
        const TimedStep& s = timeline.steps[i];
        table.add({fmt::format("{:.4f}", s.begin_us), fmt::format("{:.4f}", s.end_us), model::name_of(s.unit),
                   schedule::name_of(s.step.operation), range_of(s.step.queries), range_of(s.step.keys)});
    }
    text += table.text(width);
    if (timeline.steps.size() > kMost)
        text += fmt::format("({} steps in all; --json has every one)\n", timeline.steps.size());
    return text;
}

Json timeline_json(const schedule::Workload& w, const model::Machine& machine) {
    const Timeline timeline(w, machine);
    Json steps = Json::array();
    for (const TimedStep& s : timeline.steps) {
        steps.push_back({{"begin_us", s.begin_us},
                         {"end_us", s.end_us},
                         {"unit", model::name_of(s.unit)},
                         {"step", schedule::name_of(s.step.operation)},
                         {"queries", {s.step.queries.begin, s.step.queries.end}},
                         {"keys", {s.step.keys.begin, s.step.keys.end}}});
    }
    Json busy = Json::object();
    for (const Unit unit : kUnits) busy[model::name_of(unit)] = timeline.busy[static_cast<std::size_t>(unit)];
    return {{"device", machine.name},  {"schedule", name_of(w.schedule)},
            {"pass", name_of(w.pass)}, {"tile", {w.tile.block_q, w.tile.block_kv}},
            {"end_us", timeline.end},  {"busy_us", busy},
            {"steps", steps}};
}

}  // namespace tessera::cli
