// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "report.hpp"
#include "walk_text.hpp"

namespace tessera::cli {
namespace {

using walk::Matrix;

const char* name_of(TileStep step) {
    switch (step) {
        case TileStep::scores: return "scores";
        case TileStep::softmax: return "softmax";
        case TileStep::values: return "values";
        case TileStep::merge: return "merge";
        case TileStep::finish: return "finish";
        case TileStep::weights: return "weights";
        case TileStep::gradients: return "gradients";
        case TileStep::dq: return "dq";
        case TileStep::dk_and_dv: return "dk_and_dv";
    }
    return "?";
}

const char* name_of(Coverage coverage) {
    return coverage == Coverage::empty ? "skipped" : coverage == Coverage::partial ? "partial" : "full";
}

/// Formats infinities as strings, because JSON has none. A float is written as a double of equal value, which preserves
/// its bits.
Json json_of(float value) {
    if (std::isnan(value)) return "nan";
    if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
    return static_cast<double>(value);
}

Json json_of(const std::vector<float>& values, std::size_t begin, std::size_t count) {
    Json json = Json::array();
    for (std::size_t i = begin; i < begin + count; ++i) json.push_back(json_of(values[i]));
    return json;
}

void add(Json& json, const char* name, const std::vector<float>& values, const std::optional<std::size_t>& lane) {
    if (values.empty()) return;
    json[name] = lane ? json_of(values[*lane]) : json_of(values, 0, values.size());
}

void add(Json& json, const char* name, const Matrix& matrix, const std::optional<std::size_t>& lane) {
    if (matrix.empty()) return;
    const auto columns = static_cast<std::size_t>(matrix.columns);
    if (lane) {
        json[name] = json_of(matrix.values, *lane * columns, columns);
        return;
    }
    json[name] = Json::array();
    for (std::size_t row = 0; row < static_cast<std::size_t>(matrix.rows); ++row)
        json[name].push_back(json_of(matrix.values, row * columns, columns));
}

Json json_of(const walk::Step& step, const std::optional<std::size_t>& lane) {
    Json json = {
        {"step", name_of(step.step)}, {"tile", name_of(step.coverage)}, {"keys", {step.keys.begin, step.keys.end}}};
    add(json, "m", step.m, lane);
    add(json, "l", step.l, lane);
    add(json, "rescale", step.rescale, lane);
    add(json, "o", step.o, lane);
    add(json, "s", step.s, lane);
    add(json, "p", step.p, lane);
    add(json, "ds", step.ds, lane);
    add(json, "dq", step.dq, lane);
    add(json, "dk", step.dk, {});  // indexed by keys, so all rows
    add(json, "dv", step.dv, {});
    json["bytes"] = {{"schedule", step.moved.schedule}, {"standard", step.moved.standard}};
    return json;
}

Json json_of(const walk::HandVector& vector) {
    Json json = Json::array();
    for (const walk::Fraction& f : vector) json.push_back(f.text());
    return json;
}

Json json_of(const std::vector<walk::Fraction>& values) {
    Json json = Json::array();
    for (const walk::Fraction& f : values) json.push_back(f.text());
    return json;
}

Json json_of(const std::optional<std::int64_t>& value) { return value ? Json(*value) : Json(nullptr); }

Json json_of(const walk::HandStep& step) {
    Json s = Json::array();
    for (const auto& score : step.s) s.push_back(json_of(score));
    return {{"row", step.row},
            {"keys", {step.keys.begin, step.keys.end}},
            {"tile", name_of(step.coverage)},
            {"s", s},
            {"m", json_of(step.m)},
            {"rescale", step.rescale.text()},
            {"p", json_of(step.p)},
            {"l", step.l.text()},
            {"o", json_of(step.o)}};
}

/// Formats the sums after the tile.
Json json_of(const walk::HandGradientStep& step) {
    const auto vectors = [](const std::vector<walk::HandVector>& values) {
        Json list = Json::array();
        for (const walk::HandVector& v : values) list.push_back(json_of(v));
        return list;
    };
    return {{"queries", {step.queries.begin, step.queries.end}},
            {"keys", {step.keys.begin, step.keys.end}},
            {"tile", name_of(step.coverage)},
            {"dq_over_ln2", vectors(step.dq)},
            {"dk_over_ln2", vectors(step.dk)},
            {"dv", vectors(step.dv)}};
}

}  // namespace

Json json_of(const walk::Trace& trace, const std::optional<std::int64_t>& row) {
    std::optional<std::size_t> lane;
    if (row) lane = static_cast<std::size_t>(*row - trace.queries.begin);
    Json json = {{"problem", cli::json_of(trace.plan.problem)},
                 {"plan", cli::json_of(trace.plan)},
                 {"batch", trace.selection.batch},
                 {"head", trace.selection.head},
                 {"queries", {trace.queries.begin, trace.queries.end}}};
    if (row) json["row"] = *row;
    json["tiles"] = {{"full", trace.count(Coverage::full)},
                     {"partial", trace.count(Coverage::partial)},
                     {"skipped", trace.count(Coverage::empty)}};
    add(json, "lse", trace.lse, lane);
    add(json, "delta", trace.delta, lane);
    json["steps"] = Json::array();
    for (const walk::Step& step : trace.steps) json["steps"].push_back(json_of(step, lane));
    return json;
}

Json json_of(const walk::Hand& hand, bool backward) {
    Json json = {{"schedule", tessera::name_of(hand.schedule)},
                 {"scale", "ln 2"},
                 {"q", hand.example.q},
                 {"k", hand.example.k},
                 {"v", hand.example.v}};
    json["tile"] = {hand.example.tile.block_q, hand.example.tile.block_kv};
    json["steps"] = Json::array();
    for (const walk::HandStep& step : hand.steps) json["steps"].push_back(json_of(step));
    json["rows"] = Json::array();
    for (const walk::HandRow& row : hand.rows) {
        Json one = {{"m", json_of(row.m)}, {"l", row.l.text()}, {"o", json_of(row.o)}, {"p", json_of(row.p)}};
        if (backward) {
            one["delta"] = row.delta.text();
            one["dp"] = json_of(row.dp);
            one["ds"] = json_of(row.ds);
            one["dq_over_ln2"] = json_of(row.dq);
        }
        json["rows"].push_back(one);
    }
    if (!backward) return json;
    json["do"] = hand.example.d_o;
    for (std::size_t j = 0; j < hand.dk.size(); ++j) {
        json["dk_over_ln2"].push_back(json_of(hand.dk[j]));
        json["dv"].push_back(json_of(hand.dv[j]));
    }
    for (const walk::HandGradientStep& step : hand.gradient_steps) json["gradient_steps"].push_back(json_of(step));
    return json;
}

}  // namespace tessera::cli
