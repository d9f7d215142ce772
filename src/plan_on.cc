// SPDX-License-Identifier: Apache-2.0
#include "plan_on.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/host/kernel_table.hpp"
#include "model/gpu.hpp"
#include "model/live_keys.hpp"
#include "registry.hpp"

namespace tessera {
namespace {

constexpr double kGiB = 1073741824.0;

/// The question that all candidates are asked.
struct Question {
    const model::Machine& machine;
    const Problem& problem;
    const PlanOptions& options;
    model::PredictOptions how;
    int threads;
};

std::optional<std::string> excluded_by_options(const Candidate& candidate, const PlanOptions& options) {
    if (!options.kernel.empty() && candidate.kernel != options.kernel)
        return "kernel " + options.kernel + " was asked for";
    if (options.schedule && candidate.schedule != *options.schedule)
        return fmt::format("schedule {} was asked for", name_of(*options.schedule));
    return std::nullopt;
}

schedule::Footprint footprint_of(const Question& q, const Candidate& candidate) {
    const bool cache = q.problem.kv_lengths;  // of which all slots take memory
    return schedule::footprint({.problem = model::on_live_keys(q.problem, {}),
                                .schedule = candidate.schedule,
                                .pass = q.options.pass,
                                .tile = candidate.tile,
                                .sequences = cache ? decltype(q.how.sequences){} : q.how.sequences});
}

/// Why tensors and workspace don't fit the machine's memory, or nothing.
std::optional<std::string> does_not_fit(const Question& q, const Candidate& candidate) {
    if (!schedule::countable(q.problem)) return "has more bytes than can be counted";
    const Problem& p = q.problem;
    const double scores = static_cast<double>(p.heads_q) * static_cast<double>(p.len_q) * static_cast<double>(p.len_kv);
    const double bias = p.bias ? 4 * scores : 0;  // fp32, which the sequences share
    const double needed =
        static_cast<double>(footprint_of(q, candidate).tensors) + bias + static_cast<double>(candidate.workspace_bytes);
    const double has = q.machine.memory_gib * kGiB;
    if (needed <= has) return std::nullopt;
    return fmt::format("needs {:.4g} GiB for tensors and workspace, {} has {:.4g}: {:.4g} GiB too much", needed / kGiB,
                       q.machine.name, has / kGiB, (needed - has) / kGiB);
}

/// Fills in what is known of a kernel that takes the Problem.
void predict_candidate(const Question& q, Candidate& candidate) {
    model::PredictOptions how = q.how;
    how.tile = candidate.tile;
    if (q.machine.kind == model::MachineKind::gpu) how.kernel = candidate.kernel;
    if (model::refusal(q.problem, candidate.schedule, q.options.pass, q.machine, how)) return;
    candidate.predicted = model::predict(q.problem, candidate.schedule, q.options.pass, q.machine, how);
}

std::vector<Candidate> on_gpu(const Question& q) {
    std::vector<Candidate> list;
    for (const cuda::KernelEntry& entry : cuda::kernel_entries()) {
        if (entry.pass != q.options.pass) continue;
        Candidate candidate{.kernel = entry.name, .schedule = entry.schedule};
        if (const auto reason = cuda::refusal(entry, q.problem, q.options.tile, model::limits_of(q.machine))) {
            candidate.reason = *reason;
        } else {
            candidate.capable = true;
            candidate.tile = entry.tile_of(q.problem, model::limits_of(q.machine));
            predict_candidate(q, candidate);
            if (candidate.kernel == model::kDecodeKernel)
                candidate.workspace_bytes = model::decode_workspace(q.problem);
            else if (schedule::countable(q.problem)) candidate.workspace_bytes = footprint_of(q, candidate).workspace;
        }
        list.push_back(std::move(candidate));
    }
    return list;
}

std::vector<Candidate> on_cpu(const Question& q) {
    std::vector<Candidate> list;
    const Device host{DeviceType::cpu, 0};
    for (const Kernel& kernel : registry()) {
        if (kernel.info.backend != Backend::cpu || kernel.info.pass != q.options.pass) continue;
        Candidate candidate{.kernel = kernel.info.name, .schedule = kernel.info.schedule};
        const auto& dtypes = kernel.info.dtypes;
        if (q.problem.kv_lengths && q.options.pass == Pass::backward) {
            candidate.reason = "a cache of keys has no gradient";
        } else if (std::find(dtypes.begin(), dtypes.end(), q.problem.dtype) == dtypes.end()) {
            candidate.reason = fmt::format("does not take {}", name_of(q.problem.dtype));
        } else if (const auto reason = kernel.refuse(q.problem, q.options.tile, host)) {
            candidate.reason = *reason;
        } else {
            candidate.capable = true;
            Plan plan{.problem = q.problem, .pass = q.options.pass, .device = host, .threads = q.threads};
            plan.tile = candidate.tile = q.options.tile.value_or(kernel.default_tile(q.problem, host));
            candidate.workspace_bytes = static_cast<std::int64_t>(kernel.workspace_bytes(plan));
            predict_candidate(q, candidate);
        }
        list.push_back(std::move(candidate));
    }
    return list;
}

}  // namespace

const Candidate* PlanOn::chosen() const {
    const auto found = std::find_if(kernels.begin(), kernels.end(),
                                    [](const Candidate& candidate) { return candidate.reason.empty(); });
    return found == kernels.end() ? nullptr : &*found;
}

PlanOn plan_on(const model::Machine& machine, const Problem& problem, const PlanOptions& options,
               const std::vector<std::pair<std::int64_t, std::int64_t>>& sequences) {
    problem.validate();
    validate_plan_options(options);
    const bool gpu = machine.kind == model::MachineKind::gpu;
    PlanOn result;
    result.threads = gpu ? 0 : options.threads > 0 ? options.threads : static_cast<int>(machine.cores.value);
    const Question question{machine,
                            problem,
                            options,
                            {.by = "tessera", .threads = result.threads, .sequences = sequences},
                            result.threads};
    result.kernels = gpu ? on_gpu(question) : on_cpu(question);
    std::string chosen;
    for (Candidate& candidate : result.kernels) {
        if (!candidate.capable) continue;
        if (const auto reason = does_not_fit(question, candidate)) {
            candidate.reason = *reason;
            candidate.capable = false;
        } else if (const auto other = excluded_by_options(candidate, options)) {
            candidate.reason = *other;
        } else if (!chosen.empty()) {
            candidate.reason = "could run it; comes after " + chosen + " in the order of preference";
        } else {
            chosen = candidate.kernel;
        }
    }
    return result;
}

}  // namespace tessera
