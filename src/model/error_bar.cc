// SPDX-License-Identifier: Apache-2.0
#include "model/error_bar.hpp"

#include <algorithm>
#include <string_view>

#include "model/error_bars.hpp"

namespace tessera::model {
namespace {

/// An H100 has an H200's bars, a quarter wider: of 346 rows (bench/results/h100), 94 % lie inside of an H200's own.
constexpr double kH100 = 1.25;

/// The RTX A5000 and the B200 have published tables of prefill alone, up to 18 % off (bench/results/published).
constexpr double kLeastOfPublished = 0.25;

/// Cards that nobody measured: no row says how far off they are. Twice and a half an H200's bar covers such tables of
/// others as were looked at, in the median 8 to 16 % off (A100, A800, H100 PCIe, RTX 4090), and at least 40 %.
constexpr double kLeastElsewhere = 0.4;
constexpr double kElsewhere = 2.5;

/// cuda.decode.forward: nine of ten of its held-out rows.
constexpr double kDecode = 0.2;
constexpr std::string_view kDecodeRecords = "decode_fitted.jsonl";  ///< what its constants were fitted to

// CPUs, by the blind rows of bench/results/cpu.
constexpr double kCalibrated = 0.3;
constexpr double kNotCalibrated = 1;

double bar_of_h200(const char* kind, bool is_short, const Prediction& p) {
    if (p.fitted_on.ends_with(kDecodeRecords)) return kDecode;
    const std::string_view schedule = name_of(p.schedule);
    const std::string_view pass = name_of(p.pass);
    double of_all = 1;
    for (const ErrorBar& bar : kErrorBars) {
        if (bar.pass != pass || bar.kind != kind || bar.is_short != is_short) continue;
        if (bar.by == p.by && bar.schedule == schedule) return bar.error;
        if (bar.by.empty()) of_all = bar.error;
    }
    return of_all;
}

}  // namespace

std::string kind_of(const Problem& p) {
    constexpr std::int64_t kFewQueries = 16, kTile = 128, kHalfOfThem = 66;
    const auto dim = std::max(p.head_dim, p.head_dim_v);
    if (p.ragged) return "ragged";
    if (p.len_q <= kFewQueries && p.len_kv > kFewQueries) return "decode";
    if (p.mask.window_left != unbounded || p.mask.window_right != unbounded) return "window";
    if (p.len_q != p.len_kv) return "cross lengths";
    if (p.batch * p.heads_q * ((p.len_q + kTile - 1) / kTile) < kHalfOfThem) return "few heads";
    if (dim != 64 && dim != 128 && dim != 256) return "head_dim";
    return p.heads_q != p.heads_kv ? "grouped heads" : "prefill";
}

bool is_short(const Prediction& prediction) {
    constexpr double kFlop = 2e10;
    return static_cast<double>(prediction.cost.work.flop) <= kFlop;
}

Rows rows_of(const Machine& machine) {
    if (machine.name == "h200") return Rows::many;
    if (machine.name == "h100") return Rows::some;
    return machine.name == "b200" || machine.name == "rtxa5000" ? Rows::of_prefill : Rows::none;
}

double error_bar(const Problem& problem, const Prediction& prediction, const Machine& machine) {
    if (prediction.measured) return kCalibrated;
    if (machine.kind == MachineKind::cpu) return kNotCalibrated;
    const std::string kind = kind_of(problem);
    const bool few = kind == "decode";
    const double bar =
        bar_of_h200(few && problem.len_q > 1 ? "few queries" : kind.c_str(), !few && is_short(prediction), prediction);
    switch (rows_of(machine)) {
        case Rows::many: return bar;
        case Rows::some: return kH100 * bar;
        case Rows::of_prefill:
            if (kind == "prefill") return std::max(bar, kLeastOfPublished);
            break;
        case Rows::none: break;
    }
    return std::max(kLeastElsewhere, kElsewhere * bar);
}

}  // namespace tessera::model
