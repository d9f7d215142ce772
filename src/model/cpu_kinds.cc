// SPDX-License-Identifier: Apache-2.0
//
// The kind of CPU kernel that a question is about, and its constants on the machine.
#include <algorithm>

#include <cmath>

#include "core/split.hpp"
#include "core/stack_heads.hpp"
#include "model/cpu.hpp"

namespace tessera::model {
namespace {

/// Can a matrix unit run the question's tile? Other tiles run in multiply-adds (cpu/README.md).
bool fits_matrix_unit(const Question& q) {
    if (q.schedule != Schedule::fa2) return false;
    if (!q.options.tile) return true;
    const Tile& tile = *q.options.tile;
    if (q.pass == Pass::backward) return tile.block_q == 128 && tile.block_kv == 256;
    return tile.block_q % kMatrixPanel == 0 && tile.block_kv % kMatrixPanel == 0;
}

double median_of(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const std::size_t half = values.size() / 2;
    return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace

/// fp32 in parts pays if the unit is at least this many times as fast as multiply-adds. AMX is 13 times as fast, at
/// least 4 times on a shared host; AVX512-BF16 is twice as fast.
constexpr double kPartsPay = 3;

bool in_parts(const Question& q) {
    return q.problem.dtype == DType::fp32 && fits_matrix_unit(q) &&
           q.machine.matrix_flop > kPartsPay * q.machine.fma_flop;
}

bool runs_few_queries(const Question& q) {
    const Problem& p = q.problem;
    const bool has_amx = q.machine.matrix_flop > kPartsPay * q.machine.fma_flop;
    if (q.schedule != Schedule::fa2 || has_amx) return false;
    if (q.pass == Pass::forward) return (stackable(p) ? p.group() : p.len_q) <= kFewQueries;
    return p.len_q <= kFewQueries && p.group() * p.len_q <= kMostFewRows && p.softcap == 0 && !p.alibi && !p.bias &&
           p.dropout.probability == 0 && std::abs(p.effective_scale()) <= 1;
}

bool runs_on_matrix_unit(const Question& q) {
    if (q.pass == Pass::backward && runs_few_queries(q)) return false;
    const bool bf16 = q.problem.dtype == DType::bf16 && q.machine.matrix_flop > q.machine.fma_flop;
    return in_parts(q) || (bf16 && fits_matrix_unit(q));
}

bool is_standard_or_fa1(const Question& q) { return q.schedule != Schedule::fa2 && q.pass == Pass::forward; }

std::string cpu_kernel_kind(Schedule schedule, Pass pass, DType dtype) {
    return fmt::format("{} {}", schedule == Schedule::fa2 ? name_of(dtype) : name_of(schedule), name_of(pass));
}

std::span<const std::string> cpu_kernel_kinds() {
    static const std::vector<std::string> kinds = [] {
        std::vector<std::string> list;
        for (const Pass pass : {Pass::forward, Pass::backward}) {
            for (const DType dtype : {DType::fp32, DType::fp16, DType::bf16})
                list.push_back(cpu_kernel_kind(Schedule::fa2, pass, dtype));
            for (const Schedule schedule : {Schedule::fa1, Schedule::standard})
                list.push_back(cpu_kernel_kind(schedule, pass, DType::fp32));
        }
        return list;
    }();
    return kinds;
}

const MeasuredKernels* measured_of(const Question& q) {
    const PredictOptions own_tile;
    if (runs_few_queries(q)) return nullptr;
    if (runs_on_matrix_unit(q) != runs_on_matrix_unit({q.problem, q.schedule, q.pass, q.machine, own_tile}))
        return nullptr;
    const std::string kernels = cpu_kernel_kind(q.schedule, q.pass, q.problem.dtype);
    const auto all = measured_kernels(q.machine);
    const auto found = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.kernels == kernels; });
    return found == all.end() ? nullptr : &*found;
}

KernelShares shares_of(const Question& question) {
    if (const MeasuredKernels* own = measured_of(question)) return own->shares;
    KernelShares shares = cpu_family_of(question).constants;
    const auto measured = measured_kernels(question.machine);
    if (measured.empty()) return shares;
    // The start of threads and their contention belong to the host. Without them, an unmeasured kind would look faster
    // than the measured ones.
    for (const auto member : {&KernelShares::start_us, &KernelShares::contended_speed}) {
        std::vector<double> values;
        for (const MeasuredKernels& one : measured) values.push_back(one.shares.*member);
        shares.*member = median_of(std::move(values));
    }
    return shares;
}

}  // namespace tessera::model
