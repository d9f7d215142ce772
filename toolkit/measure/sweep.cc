// SPDX-License-Identifier: Apache-2.0
#include "measure/sweep.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "measure/record.hpp"
#include "model/family.hpp"

namespace tessera::measure {
namespace {

constexpr std::int64_t kShortest = 16;
constexpr std::int64_t kLongest = std::int64_t{1} << 20;

/// Returns the options for one schedule, with "published" resolved. FlashAttention's own kernels take no sinks. A
/// forward before a backward writes the residual of O.
model::PredictOptions options_for(const SweepQuestion& question, const Problem& problem, Schedule schedule) {
    model::PredictOptions options = question.options;
    options.o_residual = question.passes.size() > 1 && size_of(problem.dtype) <= 2;
    if (options.by != "published") return options;
    const bool has_authors_kernels = (schedule == Schedule::fa2 || schedule == Schedule::fa3) && !problem.sinks;
    const bool on_gpu = question.machine.kind == model::MachineKind::gpu;
    options.by = has_authors_kernels && on_gpu ? "flash-attention" : "tessera";
    return options;
}

Problem with_length(const Problem& problem, std::int64_t len) {
    Problem p = problem;
    p.len_kv = len;
    if (problem.len_q == problem.len_kv) p.len_q = len;
    return p;
}

}  // namespace

double SweepCell::ms() const {
    double sum = 0;
    for (const auto& pass : passes) sum += pass.ms;
    return sum;
}

double SweepCell::tflops() const {
    double flop = 0;
    for (const auto& pass : passes) flop += static_cast<double>(pass.cost.work.flop);
    return ms() > 0 ? flop * 1e-9 / ms() : 0;
}

const model::Prediction& SweepCell::longest() const {
    return *std::max_element(passes.begin(), passes.end(), [](const auto& a, const auto& b) { return a.ms < b.ms; });
}

const SweepCell* SweepRow::best() const {
    const SweepCell* found = nullptr;
    for (const SweepCell& cell : cells) {
        if (cell.known() && cell.fits && (found == nullptr || cell.ms() < found->ms())) found = &cell;
    }
    return found;
}

const SweepCell* SweepRow::of(Schedule schedule) const {
    for (const SweepCell& cell : cells) {
        if (cell.schedule == schedule && cell.known()) return &cell;
    }
    return nullptr;
}

double SweepRow::win(const SweepCell* cell) const {
    if (cell == nullptr || !cell->known() || !(cell->ms() > 0) || no_win(*cell)) return 0;
    return baseline.cell.ms() / cell->ms();
}

double SweepRow::win_error(const SweepCell& cell) const {
    return (1 + cell.longest().error) * (1 + baseline.cell.longest().error) - 1;
}

std::optional<std::string> SweepRow::no_win(const SweepCell& cell) const {
    if (!baseline.cell.known()) return baseline.cell.refusal;
    if (!baseline.cell.fits) return "it does not fit the memory";  // no machine could have run it
    return missing_cost(cell);
}

std::optional<std::string> SweepRow::missing_cost(const SweepCell& cell) const {
    const auto lacks = [](const SweepCell& one) { return one.longest().not_modelled; };
    if (const std::string what = lacks(baseline.cell); !what.empty()) return what + " is not in its time";
    if (cell.known() && !lacks(cell).empty())
        return fmt::format("{} is not in the time of {}", lacks(cell), name_of(cell.schedule));
    return std::nullopt;
}

namespace {

SweepBaseline baseline_of(const Problem& problem, const SweepQuestion& question) {
    SweepBaseline result{.kind = question.baseline.value_or(model::without_flash(problem, question.machine)),
                         .cell = {.schedule = Schedule::standard}};
    SweepCell& cell = result.cell;
    for (const Pass pass : question.passes) {
        if (const auto reason = model::refusal(problem, result.kind, pass, question.machine, question.options)) {
            cell.refusal = *reason;
            cell.passes.clear();
            break;
        }
        cell.passes.push_back(model::predict(problem, result.kind, pass, question.machine, question.options));
        const double capacity = question.machine.memory_gib * 1073741824.0;
        cell.fits = cell.fits && static_cast<double>(cell.passes.back().memory.total()) <= capacity;
    }
    return result;
}

}  // namespace

SweepRow sweep_one(const Problem& problem, const SweepQuestion& question) {
    SweepRow row{problem, {}, baseline_of(problem, question)};
    for (const Schedule schedule : question.schedules) {
        SweepCell cell{.schedule = schedule};
        const model::PredictOptions options = options_for(question, problem, schedule);
        for (const Pass pass : question.passes) {
            if (const auto reason = model::refusal(problem, schedule, pass, question.machine, options)) {
                cell.refusal = *reason;
                cell.passes.clear();
                break;
            }
            cell.passes.push_back(model::predict(problem, schedule, pass, question.machine, options));
            const double capacity = question.machine.memory_gib * 1073741824.0;
            cell.fits = cell.fits && static_cast<double>(cell.passes.back().memory.total()) <= capacity;
        }
        row.cells.push_back(std::move(cell));
    }
    return row;
}

std::optional<std::vector<Range>> faster_than_standard(const Problem& problem, Schedule schedule,
                                                       const SweepQuestion& question) {
    SweepQuestion pair{
        question.machine, {Schedule::standard, schedule}, question.passes, question.options, model::Baseline::standard};
    pair.options.worksheet = false;
    if (const Problem shortest = with_length(problem, kShortest); schedule::countable(shortest)) {
        const SweepRow row = sweep_one(shortest, pair);
        if (row.baseline.cell.known() && row.missing_cost(row.cells.back())) return std::nullopt;
    }
    const auto faster = [&](std::int64_t len) {
        const SweepRow row = sweep_one(with_length(problem, len), pair);
        return row.win(&row.cells.back()) > 1;
    };
    // A crossing is found within 3 % of its length. The length at which standard stops fitting is found exactly.
    std::int64_t beyond = kLongest;
    for (const Pass pass : question.passes)
        beyond = std::min(beyond, model::longest_that_fits(problem, Schedule::standard, pass, question.machine) + 1);
    std::vector<Range> ranges;
    bool before = false;
    std::int64_t previous = kShortest;
    // For many heads the longest rows cannot be counted; the search then ends there instead of at kLongest.
    for (std::int64_t len = kShortest; len <= kLongest && schedule::countable(with_length(problem, len));
         previous = len, len *= 2) {
        const bool now = faster(len);
        if (now == before) continue;
        std::int64_t low = len == kShortest ? 0 : previous;  // last length without a change
        std::int64_t high = len;
        while (high - low > std::max<std::int64_t>(1, low / 32)) {
            const std::int64_t middle = low + (high - low) / 2;
            if (middle == 0) break;
            (faster(middle) == before ? low : high) = middle;
        }
        if (now) ranges.push_back({high, 0});
        else ranges.back().end = std::min(high, beyond);
        before = now;
    }
    return ranges;
}

double mma_peak_tflops(const model::Machine& machine, const Problem& problem, const model::Prediction& prediction) {
    const model::Family* family = model::find_family(prediction.schedule, prediction.pass, prediction.by);
    const bool on_gpu = machine.kind == model::MachineKind::gpu && family != nullptr;
    const double flop = on_gpu ? model::gemm_flop(*family, problem, machine) : machine.gemm_flop(problem.dtype, false);
    return flop * machine.cores * machine.rated_clock_ghz * 1e-3;
}

double amdahl_speedup(double fraction, double speedup) { return 1 / (1 - fraction + fraction / speedup); }

}  // namespace tessera::measure
