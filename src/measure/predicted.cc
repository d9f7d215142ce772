// SPDX-License-Identifier: Apache-2.0
#include "measure/predicted.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "tessera/error.hpp"

namespace tessera::measure {
namespace {

/// A side of a window as mask_text() writes it.
std::optional<std::int64_t> side_of(std::string_view text) {
    if (text == "unbounded") return unbounded;
    std::int64_t side = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), side);
    if (error != std::errc{} || end != text.data() + text.size() || side < 0) return std::nullopt;
    return side;
}

/// The inverse of mask_text(); a bare "causal" is taken where both alignments are the same.
std::optional<Mask> mask_of(std::string_view text, bool square) {
    Mask mask;
    if (text == "none") return mask;
    const auto take = [&](std::string_view word) {
        if (!text.starts_with(word)) return false;
        text.remove_prefix(word.size());
        return true;
    };
    if (take("causal bottom-right")) mask.causal = Causal::bottom_right;
    else if (take("causal top-left")) mask.causal = Causal::top_left;
    else if (square && take("causal")) mask.causal = Causal::bottom_right;
    if (text.empty()) return mask;
    if (mask.causal != Causal::none && !take(", ")) return std::nullopt;
    if (!take("window ")) return std::nullopt;
    const std::size_t comma = text.find(',');
    if (comma == std::string_view::npos) return std::nullopt;
    const auto left = side_of(text.substr(0, comma)), right = side_of(text.substr(comma + 1));
    if (!left || !right) return std::nullopt;
    mask.window_left = *left;
    mask.window_right = *right;
    return mask;
}

std::optional<DType> dtype_of(const std::string& name) {
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16, DType::fp64}) {
        if (name == name_of(dtype)) return dtype;
    }
    return std::nullopt;
}

std::optional<Pass> pass_of(const std::string& name) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
        if (name == name_of(pass)) return pass;
    }
    return std::nullopt;
}

/// Whose kernel and which schedule, in the model's words. A peer's Record names itself, not its schedule.
struct Who {
    std::string by;
    Schedule schedule;
};

std::optional<Who> who_of(const Record& r) {
    if (r.by == "fa2") return Who{"flash-attention", Schedule::fa2};
    if (r.by == "fa3") return Who{"flash-attention", Schedule::fa3};
    if (r.by == "cudnn") return Who{"cudnn", Schedule::fa3};
    if (r.by != "tessera") return std::nullopt;
    for (const Schedule schedule : {Schedule::standard, Schedule::fa1, Schedule::fa2, Schedule::fa3}) {
        if (r.schedule == name_of(schedule)) return Who{"tessera", schedule};
    }
    return std::nullopt;
}

bool is_estimate(const model::Quantity& quantity) { return quantity.source.starts_with("estimate"); }

/// Bytes that every kernel must read: Q, K, V; in the backward also O, dO and the LSE.
double input_bytes(const Record& r, const Problem& p) {
    const auto rows = [](std::int64_t batch, std::int64_t len, std::int64_t heads) {
        return static_cast<double>(batch) * static_cast<double>(len) * static_cast<double>(heads);
    };
    const double queries = rows(p.batch, p.len_q, p.heads_q), keys = rows(p.batch, p.len_kv, p.heads_kv);
    const auto d = static_cast<double>(p.head_dim), dv = static_cast<double>(p.head_dim_v);
    const auto element = static_cast<double>(size_of(p.dtype));
    if (r.pass == "backward") return element * (queries * (d + 2 * dv) + keys * (d + dv)) + 4 * queries;
    return element * (queries * d + keys * (d + dv));
}

}  // namespace

std::optional<Problem> problem_of(const Record& r) {
    const auto dtype = dtype_of(r.dtype);
    const auto mask = mask_of(r.mask, r.len_q == r.len_kv);
    if (!dtype || !mask || r.features.find("ragged") != std::string::npos) return std::nullopt;
    Problem p;
    p.dtype = *dtype;
    p.mask = *mask;
    p.batch = r.batch;
    p.len_q = r.len_q;
    p.len_kv = r.len_kv;
    p.heads_q = r.heads_q;
    p.heads_kv = r.heads_kv;
    p.head_dim = r.head_dim;
    p.head_dim_v = r.head_dim_v;
    try {
        p.validate();
    } catch (const Error&) {  // a figure of something else than attention
        return std::nullopt;
    }
    return p;
}

std::optional<model::Prediction> predict(const Record& measured, const model::Machine* machine) {
    if (machine == nullptr) machine = model::machine_of_device(measured.device);
    const auto problem = problem_of(measured);
    const auto who = who_of(measured);
    const auto pass = pass_of(measured.pass);
    if (machine == nullptr || !problem || !who || !pass) return std::nullopt;
    const model::PredictOptions options{.by = who->by, .threads = measured.threads};
    if (model::refusal(*problem, who->schedule, *pass, *machine, options)) return std::nullopt;
    return model::predict(*problem, who->schedule, *pass, *machine, options);
}

Record record_of(const model::Prediction& prediction, const Record& measured) {
    Record record = measured;
    record.what = "predicted";
    record.ms = prediction.ms;
    record.ms_spread = 0;
    record.tflops = prediction.tflops;
    record.bound = prediction.bound;
    record.percent_of_bound = prediction.percent_of_bound;
    const auto& bytes = prediction.cost.work.bytes;
    record.bytes = {{"dram", static_cast<double>(bytes.dram)}, {"l2", static_cast<double>(bytes.l2)}};
    record.clock_mhz = prediction.clock_ghz * 1e3;
    record.watts.reset();
    return record;
}

std::optional<AboveRoof> above_roof(const Record& measured, const Problem& problem, const model::Machine& machine) {
    const bool is_cpu = machine.kind == model::MachineKind::cpu;
    const double cores =
        is_cpu && measured.threads > 0 ? std::min<double>(measured.threads, machine.cores) : machine.cores;
    const double roof = machine.product_flop(problem.dtype, false) * cores * machine.clock_ghz * 1e-3;  // TFLOP/s
    if (measured.tflops > roof) {
        const bool estimate = is_estimate(machine.matrix_flop) || is_estimate(machine.clock_ghz);
        return AboveRoof{fmt::format("{:.4g} TFLOP/s is above the {:.4g} TFLOP/s that the products of {} can reach",
                                     measured.tflops, roof, machine.name),
                         !estimate};
    }
    if (problem.ragged) return std::nullopt;
    const double least_ms = input_bytes(measured, problem) / (machine.dram_gbs * 1e6);
    if (measured.ms < least_ms) {
        return AboveRoof{fmt::format("{:.4g} ms is less than the {:.4g} ms in which {} can read the inputs once",
                                     measured.ms, least_ms, machine.name),
                         !is_estimate(machine.dram_gbs)};
    }
    return std::nullopt;
}

}  // namespace tessera::measure
