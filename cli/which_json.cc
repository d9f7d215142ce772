// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include "advice_text.hpp"
#include "diagnose/call_inputs.hpp"
#include "diagnose/device.hpp"
#include "diagnose/slowed_clock.hpp"
#include "which_text.hpp"

namespace tessera::cli {
namespace {

using diagnose::AttentionKind;
using diagnose::Diagnosis;
using diagnose::NamedKernel;
using diagnose::NameReading;

// A document has the same fields for every kind of file; null is what the file does not say.

Json text_or_null(const std::string& text) { return text.empty() ? Json() : Json(text); }

Json number_or_null(int number) { return number == 0 ? Json() : Json(number); }

template <class T>
Json value_or_null(const std::optional<T>& value) {
    return value ? Json(*value) : Json();
}

Json time_or_null(const Diagnosis& d, double us) { return d.timed ? Json(us) : Json(); }

Json shape_json(const diagnose::ShapeSum& shape, const Diagnosis& d) {
    const bool spreads = shape.spread.runs > 0;
    return {{"call", text_of(shape.call)},
            {"calls", shape.count},
            {"us", time_or_null(d, shape.us)},
            {"median_us", spreads ? Json(shape.spread.median_us) : Json()},
            {"worst_us", spreads ? Json(shape.spread.worst_us) : Json()},
            {"outliers", spreads ? Json(shape.spread.outliers) : Json()}};
}

/// The clock's time in the trace; null if the file has no order of time.
Json clock_json(const Diagnosis& d) {
    if (d.clock.clock_us <= 0) return nullptr;
    return {{"us", d.clock.clock_us},
            {"busy_us", d.clock.busy_us},
            {"attention_us", d.clock.attention_us},
            {"gpus", d.clock.gpus},
            {"host_bound", d.clock.host_bound()},
            {"pauses", d.clock.pauses},
            {"pauses_us", d.clock.pauses_us},
            {"longest_pause_us", d.clock.longest_pause_us}};
}

/// The steps that the profiler marked; null if there are none.
Json steps_json(const diagnose::MarkedSteps& steps) {
    if (steps.count == 0) return nullptr;
    return {{"count", steps.count},
            {"us", steps.us},
            {"median_us", steps.median_us},
            {"longest_us", steps.longest_us},
            {"longest", steps.longest},
            {"busy_us", steps.busy_us},
            {"attention_us", steps.attention_us},
            {"outliers", steps.outliers},
            {"usual_us", steps.usual_us},
            {"usual_busy_us", steps.usual_busy_us},
            {"usual_attention_us", steps.usual_attention_us}};
}

/// The clock that the times imply; null if they agree with the predictions.
Json slowed_json(const Diagnosis& d, const diagnose::Call& stated) {
    const auto slowed = d.timed ? diagnose::slowed_clock(d, stated) : std::nullopt;
    if (!slowed) return nullptr;
    return {{"machine", slowed->machine},
            {"ghz", slowed->ghz},
            {"usual_ghz", slowed->usual_ghz},
            {"least", slowed->least},
            {"most", slowed->most}};
}

}  // namespace

Json json_of(const NameReading& r) {
    return {{"family", name_of(r.family)},
            {"role", name_of(r.role)},
            {"pass", name_of(r.pass)},
            {"confidence", name_of(r.confidence)},
            {"exactness", name_of(r.exactness)},
            {"algorithm", text_or_null(r.algorithm)},
            {"library", text_or_null(r.library)},
            {"release", text_or_null(r.release)},
            {"dtype", text_or_null(r.dtype)},
            {"mask", text_or_null(r.mask)},
            {"arch", number_or_null(r.arch)},
            {"head_dim", number_or_null(r.head_dim)},
            {"head_dim_v", number_or_null(r.head_dim_v)},
            {"tile", r.tile_q != 0 ? Json{r.tile_q, r.tile_kv} : Json()},
            {"name_is_cut", r.cut},
            {"features", r.features},
            {"evidence", r.evidence}};
}

static Json gpu_json(const diagnose::Gpu& gpu) {
    return {{"name", gpu.name},
            {"capability", value_or_null(gpu.capability)},
            {"multiprocessors", value_or_null(gpu.multiprocessors)},
            {"memory_gib", value_or_null(gpu.memory_gib)},
            {"note", text_or_null(diagnose::device_of(gpu).caveat)}};
}

static Json kind_json(const AttentionKind& kind, const Diagnosis& d, const diagnose::Call& stated) {
    Json row = json_of(kind.reading);
    row["calls"] = kind.calls;
    row["us"] = time_or_null(d, kind.us);
    row["beside_us"] = time_or_null(d, kind.beside_us);
    row["share"] = d.timed && d.gpu_us > 0 ? Json(kind.us / d.gpu_us) : Json();
    row["asked_by"] = text_or_null(kind.asked_by);
    row["shapes"] = Json::array();
    for (const diagnose::ShapeSum& shape : kind.shapes) row["shapes"].push_back(shape_json(shape, d));
    row["host"] = row["repeated_kv"] = row["why_not_faster"] = nullptr;
    if (kind.host.runs > 0) row["host"] = {{"median_us", kind.host.median_us}, {"worst_us", kind.host.worst_us}};
    if (kind.repeats.calls > 0) row["repeated_kv"] = {{"times", kind.repeats.times}, {"calls", kind.repeats.calls}};
    row["kernels"] = Json::array();
    for (const diagnose::KernelSum& kernel : kind.kernels)
        row["kernels"].push_back({{"name", kernel.name}, {"runs", kernel.count}, {"us", time_or_null(d, kernel.us)}});
    row["beyond_sdpa"] = text_or_null(diagnose::beyond_sdpa(kind));
    if (const auto advice = diagnose::advise(d, kind, stated)) row["why_not_faster"] = json_of(*advice);
    return row;
}

Json json_of(const Diagnosis& d, const diagnose::Call& stated) {
    const auto sums = [&](const std::vector<NamedKernel>& kernels) {
        Json rows = Json::array();
        for (const NamedKernel& kernel : kernels) {
            rows.push_back({{"name", kernel.kernel.name},
                            {"runs", kernel.kernel.count},
                            {"us", time_or_null(d, kernel.kernel.us)},
                            {"reading", json_of(kernel.reading)}});
        }
        return rows;
    };
    Json gpus = Json::array(), kinds = Json::array();
    for (const diagnose::Gpu& gpu : d.gpus) gpus.push_back(gpu_json(gpu));
    for (const AttentionKind& kind : d.kinds) kinds.push_back(kind_json(kind, d, stated));
    return {{"file", d.file},
            {"tool", d.tool},
            {"paragraph", paragraph_of(d, stated)},
            {"gpus", gpus},
            {"runs", d.runs},
            {"gpu_us", time_or_null(d, d.gpu_us)},
            {"attention_us", time_or_null(d, d.attention_us)},
            {"clock", clock_json(d)},
            {"steps", steps_json(d.steps)},
            {"slowed_clock", slowed_json(d, stated)},
            {"attention", kinds},
            {"no_attention", sums(d.look_alikes)},
            {"unknown", sums(d.unknown)},
            {"softmax", sums(d.softmaxes)},
            {"cpu_ops", d.cpu_ops},
            {"notes", d.notes}};
}

}  // namespace tessera::cli
