// SPDX-License-Identifier: Apache-2.0
#include "advice_text.hpp"
#include "diagnose/call_inputs.hpp"
#include "diagnose/device.hpp"
#include "which_text.hpp"

namespace tessera::cli {
namespace {

using diagnose::AttentionKind;
using diagnose::Diagnosis;
using diagnose::NamedKernel;
using diagnose::NameReading;

Json shape_json(const diagnose::ShapeSum& shape) {
    Json json{{"call", text_of(shape.call)}, {"calls", shape.count}, {"us", shape.us}};
    if (shape.spread.runs > 0) {
        json["median_us"] = shape.spread.median_us;
        json["worst_us"] = shape.spread.worst_us;
        json["outliers"] = shape.spread.outliers;
    }
    return json;
}

/// The clock's time in the trace; null if the file has no order of time.
Json clock_json(const Diagnosis& d) {
    if (d.clock.clock_us <= 0) return nullptr;
    return {{"us", d.clock.clock_us},
            {"busy_us", d.clock.busy_us},
            {"attention_us", d.clock.attention_us},
            {"host_bound", d.clock.host_bound()}};
}

}  // namespace

Json json_of(const NameReading& r) {
    Json json{{"family", name_of(r.family)},
              {"role", name_of(r.role)},
              {"pass", name_of(r.pass)},
              {"confidence", name_of(r.confidence)},
              {"exactness", name_of(r.exactness)}};
    const auto add = [&](const char* key, const std::string& value) {
        if (!value.empty()) json[key] = value;
    };
    add("algorithm", r.algorithm);
    add("library", r.library);
    add("release", r.release);
    add("dtype", r.dtype);
    add("mask", r.mask);
    for (const auto& [key, value] : {std::pair{"arch", r.arch}, {"head_dim", r.head_dim}, {"head_dim_v", r.head_dim_v}})
        if (value != 0) json[key] = value;
    if (r.tile_q != 0) json["tile"] = {r.tile_q, r.tile_kv};
    if (r.cut) json["name_is_cut"] = true;
    json["features"] = r.features;
    json["evidence"] = r.evidence;
    return json;
}

Json json_of(const Diagnosis& d, const diagnose::Call& stated) {
    Json gpus = Json::array();
    for (const diagnose::Gpu& gpu : d.gpus) {
        Json row{{"name", gpu.name}};
        if (gpu.capability) row["capability"] = *gpu.capability;
        if (gpu.multiprocessors) row["multiprocessors"] = *gpu.multiprocessors;
        if (gpu.memory_gib) row["memory_gib"] = *gpu.memory_gib;
        if (const std::string caveat = diagnose::device_of(gpu).caveat; !caveat.empty()) row["note"] = caveat;
        gpus.push_back(row);
    }
    const auto sums = [&](const std::vector<NamedKernel>& kernels) {
        Json rows = Json::array();
        for (const NamedKernel& kernel : kernels) {
            rows.push_back({{"name", kernel.kernel.name},
                            {"runs", kernel.kernel.count},
                            {"us", kernel.kernel.us},
                            {"reading", json_of(kernel.reading)}});
        }
        return rows;
    };
    Json kinds = Json::array();
    for (const AttentionKind& kind : d.kinds) {
        Json row = json_of(kind.reading);
        row["calls"] = kind.calls;
        if (d.timed) row["us"] = kind.us, row["beside_us"] = kind.beside_us;
        if (d.timed && d.gpu_us > 0) row["share"] = kind.us / d.gpu_us;
        if (!kind.asked_by.empty()) row["asked_by"] = kind.asked_by;
        row["shapes"] = Json::array();
        for (const diagnose::ShapeSum& shape : kind.shapes) row["shapes"].push_back(shape_json(shape));
        if (kind.host.runs > 0) row["host"] = {{"median_us", kind.host.median_us}, {"worst_us", kind.host.worst_us}};
        if (kind.repeats.calls > 0) row["repeated_kv"] = {{"times", kind.repeats.times}, {"calls", kind.repeats.calls}};
        row["kernels"] = Json::array();
        for (const diagnose::KernelSum& kernel : kind.kernels)
            row["kernels"].push_back({{"name", kernel.name}, {"runs", kernel.count}, {"us", kernel.us}});
        if (const auto advice = diagnose::advise(d, kind, stated)) row["why_not_faster"] = json_of(*advice);
        kinds.push_back(row);
    }
    return {{"file", d.file},
            {"tool", d.tool},
            {"paragraph", paragraph_of(d, stated)},
            {"gpus", gpus},
            {"runs", d.runs},
            {"gpu_us", d.gpu_us},
            {"attention_us", d.attention_us},
            {"clock", clock_json(d)},
            {"attention", kinds},
            {"no_attention", sums(d.look_alikes)},
            {"unknown", sums(d.unknown)},
            {"softmax", sums(d.softmaxes)},
            {"cpu_ops", d.cpu_ops},
            {"notes", d.notes}};
}

}  // namespace tessera::cli
