// SPDX-License-Identifier: Apache-2.0
#include "measure/predicted.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "measure/accuracy.hpp"
#include "model/live_keys.hpp"
#include "tessera/error.hpp"

namespace tessera::measure {
namespace {

bool is_estimate(const model::Quantity& quantity) { return quantity.source.starts_with("estimate"); }

/// Returns the bytes that every kernel must read: Q, K, V (of a cache: the keys of its sequences); in the backward also
/// O, dO and the LSE.
double input_bytes(const Record& r, const Problem& of_call) {
    const Problem p = model::on_live_keys(of_call, sequences_of(r));
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

std::optional<model::Prediction> predict(const Record& measured, const model::Machine* machine) {
    try {
        Comparisons comparisons = compare({&measured, 1}, machine);
        if (comparisons.rows.empty()) return std::nullopt;
        return std::move(comparisons.rows.front().prediction);
    } catch (const Error&) {  // an unknown mask or dtype
        return std::nullopt;
    }
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
    const double roof = is_cpu  // TFLOP/s
                            ? machine.gemm_flop(problem.dtype, false) * cores * machine.clock_ghz * 1e-3
                            : machine.peak_tflops(problem.dtype) * (machine.clock_ghz / machine.rated_clock_ghz);
    // A rate that tessera calibrate timed for less than a second is no datasheet value; shared cores can also speed up.
    constexpr double kDoubtful = 2;
    const bool timed = is_cpu && !measured_kernels(machine).empty();
    if (measured.tflops > roof) {
        const bool estimate = is_estimate(machine.matrix_flop) || is_estimate(machine.fma_flop) ||
                              is_estimate(machine.clock_ghz) || (timed && measured.tflops < kDoubtful * roof);
        return AboveRoof{fmt::format("{:.4g} TFLOP/s is above the {:.4g} TFLOP/s that GEMMs on {} can reach",
                                     measured.tflops, roof, machine.name),
                         !estimate};
    }
    if (problem.ragged) return std::nullopt;
    const double least_ms = input_bytes(measured, problem) / (machine.dram_gbs * 1e6);
    if (measured.ms < least_ms) {
        return AboveRoof{fmt::format("{:.4g} ms is less than the {:.4g} ms in which {} can read the inputs once",
                                     measured.ms, least_ms, machine.name),
                         !is_estimate(machine.dram_gbs) && !(timed && measured.ms * kDoubtful > least_ms)};
    }
    return std::nullopt;
}

}  // namespace tessera::measure
