// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <fmt/format.h>

#include "measure/record.hpp"
#include "table.hpp"

namespace tessera::cli {

Json json_of(const Problem& p) {
    Json json = {{"dtype", name_of(p.dtype)},   {"batch", p.batch},           {"len_q", p.len_q},
                 {"len_kv", p.len_kv},          {"heads_q", p.heads_q},       {"heads_kv", p.heads_kv},
                 {"head_dim", p.head_dim},      {"head_dim_v", p.head_dim_v}, {"mask", measure::mask_text(p.mask)},
                 {"scale", p.effective_scale()}};
    if (const std::string features = measure::features_text(p); !features.empty()) json["features"] = features;
    if (p.dropout.probability > 0) json["seed"] = p.dropout.seed;
    return json;
}

namespace {

std::string device_text(const Device& device) {
    return device.type == DeviceType::cuda ? fmt::format("cuda:{}", device.index) : "cpu";
}

}  // namespace

Json json_of(const Plan& plan) {
    return {{"kernel", plan.kernel->name},
            {"backend", name_of(plan.kernel->backend)},
            {"schedule", name_of(plan.kernel->schedule)},
            {"pass", name_of(plan.pass)},
            {"target", plan.target},
            {"matrix_unit", plan.matrix_unit.empty() ? Json(nullptr) : Json(plan.matrix_unit)},
            {"device", device_text(plan.device)},
            {"block_q", plan.tile.block_q},
            {"block_kv", plan.tile.block_kv},
            {"threads", plan.threads},
            {"workspace_bytes", plan.workspace_bytes},
            {"o_residual", plan.o_residual}};
}

Json json_of(const check::Report& report) {
    Json tensors = Json::array();
    for (const check::TensorReport& t : report.tensors) {
        tensors.push_back({{"name", t.name},
                           {"pass", t.pass},
                           {"relative_rmse", t.relative_rmse},
                           {"max_abs_error", t.max_abs_error},
                           {"value", t.value},
                           {"limit", t.limit},
                           {"finite", t.finite},
                           {"free", t.free},
                           {"rule", t.rule},
                           {"worst", t.worst}});
    }
    return {{"pass", report.pass()}, {"tensors", tensors}};
}

std::string plan_text(const Plan& plan) {
    const std::string runs_on = plan.device.type == DeviceType::cuda
                                    ? device_text(plan.device)
                                    : fmt::format("{} thread{}", plan.threads, plan.threads == 1 ? "" : "s");
    const std::string unit = plan.matrix_unit.empty() ? "" : ", GEMMs on " + plan.matrix_unit;
    return fmt::format("{} ({}{}), tile {} x {}, {}, workspace {}", plan.kernel->name, plan.target, unit,
                       plan.tile.block_q, plan.tile.block_kv, runs_on,
                       bytes_text(static_cast<double>(plan.workspace_bytes)));
}

namespace {

std::string verdict_of(const check::TensorReport& t) {
    if (!t.pass) return fmt::format("FAIL {}: {}", t.rule, t.worst);
    if (t.free > 0)
        return fmt::format("ok, except {} elements whose scores exceed the range of fp32, which are not checked",
                           count_text(t.free));
    return t.finite > 0 ? "ok" : "ok: no finite element to compare";
}

}  // namespace

std::string report_text(const check::Report& report, int width) {
    Table table({{"tensor"},
                 {"relative RMSE", Align::right},
                 {"max error", Align::right},
                 {"of limit", Align::right},
                 {"verdict"}});
    for (const check::TensorReport& t : report.tensors) {
        const bool compared = !t.pass || t.finite > 0;
        table.add({t.name, compared ? fmt::format("{:.2e}", t.relative_rmse) : "-",
                   compared ? fmt::format("{:.2e}", t.max_abs_error) : "-",
                   compared ? fmt::format("{:.3g} %", t.used() * 100) : "-", verdict_of(t)});
    }
    return table.text(width);
}

}  // namespace tessera::cli
