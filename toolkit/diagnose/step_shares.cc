// SPDX-License-Identifier: Apache-2.0
#include "diagnose/step_shares.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "diagnose/kernel_text.hpp"

namespace tessera::diagnose {
namespace {

/// The part that a kernel of no matrix product belongs to, by its name in lower case.
double& part_named(StepShares& shares, const std::string& lower) {
    if (contains_any(lower,
                     {"nccl", "rccl", "allreduce", "all_reduce", "allgather", "reduce_scatter", "cross_device_reduce"}))
        return shares.communication_us;
    if (contains_any(lower, {"multi_tensor_apply", "adam"})) return shares.optimizer_us;
    if (contains_any(lower, {"norm", "triton_poi", "triton_red", "triton_per"})) return shares.pointwise_us;
    return shares.other_us;
}

}  // namespace

StepShares shares_of(const Trace& trace, const std::vector<NameReading>& readings, const std::vector<bool>& taken) {
    StepShares shares;
    for (std::uint32_t i = 0; i < trace.runs.size(); ++i) {
        if (taken[i]) continue;
        const KernelRun& run = trace.runs[i];
        switch (readings[run.name].role) {
            case Role::gemm: shares.gemm_us += run.us; break;
            case Role::elementwise:
            case Role::softmax:
            case Role::softmax_backward: shares.pointwise_us += run.us; break;
            default: part_named(shares, lower_case(trace.kernels[run.name].substr(0, 64))) += run.us;
        }
    }
    return shares;
}

void share_evidence(AttentionKind& kind, const std::unordered_map<std::uint32_t, KernelSum>& names,
                    const std::vector<NameReading>& readings) {
    std::vector<std::string> all;
    std::map<std::string, std::size_t> names_with;
    std::size_t count = 0;
    // In the order of the names' numbers, so that the text does not depend on the table's.
    for (const auto& [name, sum] : std::map<std::uint32_t, KernelSum>(names.begin(), names.end())) {
        const NameReading& reading = readings[name];
        if (reading.role != kind.reading.role || reading.family != kind.reading.family) continue;
        ++count;
        for (const std::string& evidence : reading.evidence) {
            if (names_with[evidence]++ == 0) all.push_back(evidence);
        }
    }
    if (count < 2) return;
    for (std::string& evidence : all) {
        const std::size_t with = names_with[evidence];
        if (with < count) evidence += " (of " + std::to_string(with) + " of its " + std::to_string(count) + " kernels)";
    }
    kind.reading.evidence = std::move(all);
}

std::vector<NamedKernel> named_kernels(const Trace& trace, const std::vector<NameReading>& readings,
                                       const std::map<std::uint32_t, KernelSum>& rows) {
    std::vector<NamedKernel> result;
    for (const auto& [name, sum] : rows) {
        NamedKernel row{sum, readings[name]};
        row.kernel.name = trace.kernels[name];
        row.kernel.role = row.reading.role;
        result.push_back(row);
    }
    std::stable_sort(result.begin(), result.end(),
                     [](const NamedKernel& a, const NamedKernel& b) { return a.kernel.us > b.kernel.us; });
    return result;
}

}  // namespace tessera::diagnose
