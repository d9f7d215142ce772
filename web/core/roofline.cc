// SPDX-License-Identifier: Apache-2.0
//
// The room "roofline": the data of the figure that `tessera roofline --svg` draws, and the limits in its text.
#include "device_option.hpp"
#include "measure/sweep.hpp"
#include "roofline_options.hpp"
#include "workload.hpp"

namespace tessera::web {
namespace {

Json json_of(const plot::Figure& figure) {
    Json series = Json::array();
    for (const plot::Series& s : figure.series) {
        Json points = Json::array();
        for (const plot::Point& p : s.points) points.push_back({{"x", p.x}, {"y", p.y}, {"note", p.note}});
        series.push_back({{"name", s.name}, {"points", points}});
    }
    Json guides = Json::array();
    for (const plot::Guide& g : figure.guides)
        guides.push_back({{"from", {g.from.x, g.from.y}}, {"to", {g.to.x, g.to.y}}, {"label", g.label}});
    return {
        {"title", figure.title},
        {"x", {{"label", figure.x.label}, {"least", figure.x.least.value_or(1)}, {"most", figure.x.most.value_or(1)}}},
        {"y", {{"label", figure.y.label}, {"least", figure.y.least.value_or(1)}, {"most", figure.y.most.value_or(1)}}},
        {"series", series},
        {"guides", guides}};
}

/// The lengths at which a schedule is faster than standard, and the longest row it can compute.
Json limits_of(const measure::SweepRow& row, const measure::SweepQuestion& question) {
    Json limits = Json::object();
    for (const measure::SweepCell& cell : row.cells) {
        if (!cell.known()) continue;
        Json ranges = Json::array();
        if (cell.schedule != Schedule::standard && row.of(Schedule::standard) != nullptr) {
            const auto found = measure::faster_than_standard(row.problem, cell.schedule, question);
            for (const Range& range : found.value_or(std::vector<Range>{})) ranges.push_back({range.begin, range.end});
        }
        limits[tessera::name_of(cell.schedule)] = {
            {"faster", ranges},
            {"longest",
             model::longest_that_fits(row.problem, cell.schedule, question.passes.back(), question.machine)}};
    }
    return limits;
}

}  // namespace

Json ask_roofline(const Json& question) {
    cli::RooflineOptions options;
    CLI::App app;
    options.declare(app);
    auto args = question.at("args").get<std::vector<std::string>>();
    std::reverse(args.begin(), args.end());
    app.parse(args);
    const model::Machine machine = cli::machine_of_option(options.device);
    const measure::SweepQuestion asked{machine, options.schedule_list(), options.passes(),
                                       options.predict_options(machine), options.baseline_kind()};
    std::vector<measure::SweepRow> rows;
    for (const Problem& problem : options.problems(machine)) rows.push_back(measure::sweep_one(problem, asked));
    Json answer{{"figure", json_of(measure::roofline_figure(machine, rows))},
                {"limits", limits_of(rows.front(), asked)}};
    if (const auto fraction = options.attention_fraction()) {
        Json wins = Json::array();
        for (const measure::SweepRow& row : rows) {
            const double win = row.win(row.best());
            wins.push_back(win > 0 ? measure::amdahl_speedup(*fraction, win) : 0);
        }
        answer["model_wins"] = wins;
    }
    return answer;
}

}  // namespace tessera::web
