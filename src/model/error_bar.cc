// SPDX-License-Identifier: Apache-2.0
#include "model/error_bar.hpp"

#include <algorithm>
#include <string_view>

#include "model/error_bars.hpp"
#include "model/family.hpp"
#include "model/parts.hpp"

namespace tessera::model {
namespace {

/// An H100 has an H200's bars, a quarter wider: of 346 rows (bench/results/h100), 94 % lie inside of an H200's own.
constexpr double kH100 = 1.25;

/// Cards that others published tables of (bench/results/published), and cards of the same chip: what nine of ten of
/// their rows with as many queries as keys stay within, rounded up.
struct CardBars {
    std::string_view machine;
    double forward, backward;
};
constexpr CardBars kCards[] = {{"a100", 0.2, 0.15},     {"a100-40", 0.2, 0.15}, {"a100-pcie", 0.2, 0.15},
                               {"a800", 0.2, 0.15},     {"b200", 0.2, 0.2},     {"gb200", 0.2, 0.2},
                               {"b300", 0.25, 0.25},    {"gb300", 0.25, 0.25},  {"rtxa5000", 0.25, 0.25},
                               {"rtxpro6000", 0.2, 0.2}};

/// Cards that nobody measured: what nine of ten rows of a published table stay within by the bars of all other tables
/// (measure/coverage.hpp), and half as much again.
constexpr CardBars kElsewhere{"", 0.3, 0.3};
/// Other numbers of queries than of keys, windows and ragged batches, on any of these cards: 29 % on an A100.
constexpr double kOtherKinds = 0.45;
constexpr double kShort = 1.25;  ///< of an H200's bar, short calls of other cards have at least

/// cuda.decode.forward: nine of ten of its held-out rows.
constexpr double kDecode = 0.2;
constexpr std::string_view kDecodeRecords = "decode_fitted.jsonl";  ///< what its constants were fitted to

constexpr double kCachedByFa3 = 0.3;  ///< at least this much where on_cache_by_fa3()

/// PyTorch's memory-efficient kernels: held-out rows of prefill are up to 8 % off (h200/pytorch_held_out.jsonl).
constexpr double kEfficientPrefill = 0.1;

// CPUs, by the blind rows of bench/results/cpu.
constexpr double kCalibrated = 0.3;
constexpr double kNotCalibrated = 1;

double bar_of_h200(const BarCell& cell, const Prediction& p) {
    if (p.fitted_on.ends_with(kDecodeRecords)) return kDecode;
    if (p.by == kEfficient) return cell.is_short ? kErrorWithoutRows : kEfficientPrefill;
    const std::string_view schedule = name_of(p.schedule);
    const std::string_view pass = name_of(p.pass);
    double of_all = 1;
    for (const ErrorBar& bar : kErrorBars) {
        if (bar.pass != pass || bar.kind != cell.kind || bar.is_short != cell.is_short) continue;
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

bool in_tables(const std::string& kind) {
    return kind == "prefill" || kind == "grouped heads" || kind == "head_dim" || kind == "few heads";
}

bool like_rows_of_pytorch(const Problem& p) {
    return p.dtype == DType::bf16 && kind_of(p) == "prefill" && not_modelled(p, false).empty();
}

bool is_short(const Prediction& prediction) {
    constexpr double kFlop = 2e10;
    return static_cast<double>(prediction.cost.work.flop) <= kFlop;
}

BarCell bar_cell_of(const Problem& problem, const Prediction& prediction) {
    constexpr std::int64_t kShortDocuments = 512, kLongDocuments = 2048;
    const std::string kind = kind_of(problem);
    if (kind == "decode") return {problem.len_q > 1 ? "few queries" : kind, false};
    if (kind != "ragged") return {kind, is_short(prediction)};
    const std::int64_t keys = problem.rows_kv();
    if (keys < kShortDocuments * problem.batch || is_short(prediction)) return {"short documents", false};
    return {keys >= kLongDocuments * problem.batch ? "long documents" : kind, false};
}

bool on_cache_by_fa3(const Problem& problem, const Prediction& prediction) {
    return problem.kv_lengths && prediction.by == "tessera" && prediction.schedule == Schedule::fa3;
}

static const CardBars* card_of(const Machine& machine) {
    const auto found = std::find_if(std::begin(kCards), std::end(kCards),
                                    [&](const CardBars& card) { return card.machine == machine.name; });
    return found == std::end(kCards) ? nullptr : found;
}

Rows rows_of(const Machine& machine) {
    if (machine.name == "h200") return Rows::many;
    if (machine.name == "h100") return Rows::some;
    return card_of(machine) != nullptr ? Rows::published : Rows::none;
}

double error_bar(const Problem& problem, const Prediction& prediction, const Machine& machine) {
    if (prediction.measured) return kCalibrated;
    if (machine.kind == MachineKind::cpu) return kNotCalibrated;
    const BarCell cell = bar_cell_of(problem, prediction);
    const double least = on_cache_by_fa3(problem, prediction) ? kCachedByFa3 : 0;
    const double h200 = std::max(bar_of_h200(cell, prediction), least);
    if (prediction.by == kEfficient && !like_rows_of_pytorch(problem)) return kErrorWithoutRows;
    if (rows_of(machine) == Rows::many) return h200;
    if (rows_of(machine) == Rows::some) return kH100 * h200;
    const CardBars* known = card_of(machine);
    const CardBars& card = known == nullptr ? kElsewhere : *known;
    const bool as_published = in_tables(cell.kind);
    const double bar = !as_published ? kOtherKinds : prediction.pass == Pass::forward ? card.forward : card.backward;
    return std::max({bar, cell.is_short ? kShort * h200 : 0.0, known == nullptr || !as_published ? h200 : 0.0});
}

}  // namespace tessera::model
