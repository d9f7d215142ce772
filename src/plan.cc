// SPDX-License-Identifier: Apache-2.0
#include "tessera/plan.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "core/arena.hpp"
#include "parallel.hpp"
#include "plan_on.hpp"
#include "registry.hpp"
#include "tessera/error.hpp"

namespace tessera {
void validate_plan_options(const PlanOptions& options) {
    constexpr int kMaxThreads = 1024;
    constexpr std::int64_t kMaxBlock = 4096;
    if (options.threads < 0 || options.threads > kMaxThreads) {
        throw Error(ErrorCode::invalid_argument, "threads",
                    fmt::format("expected 0..{}, got {}", kMaxThreads, options.threads));
    }
    if (options.tile) {
        for (const auto& [name, value] :
             {std::pair{"block_q", options.tile->block_q}, std::pair{"block_kv", options.tile->block_kv}}) {
            if (value < 1 || value > kMaxBlock) {
                throw Error(ErrorCode::invalid_argument, name, fmt::format("expected 1..{}, got {}", kMaxBlock, value));
            }
        }
    }
    if (options.device && options.device->index < 0) {
        throw Error(ErrorCode::invalid_argument, "device",
                    fmt::format("expected an index from 0, got {}", options.device->index));
    }
    if (!options.kernel.empty()) {
        const auto all = kernels();
        const auto known =
            std::any_of(all.begin(), all.end(), [&](const KernelInfo& k) { return k.name == options.kernel; });
        if (!known) {
            throw Error(ErrorCode::invalid_argument, "kernel",
                        fmt::format("expected a name that kernels() lists, got \"{}\"", options.kernel));
        }
    }
}

namespace {

/// The device of the tensors, as PlanOptions::device says.
Device device_of(const PlanOptions& options) {
    if (options.device) return *options.device;
    bool on_cuda = options.backend == Backend::cuda;
    for (const KernelInfo& info : kernels()) {
        if (info.name == options.kernel && info.backend == Backend::cuda) on_cuda = true;
    }
    return {on_cuda ? DeviceType::cuda : DeviceType::cpu, 0};
}

/// Throws when nothing can run on the device at all, whatever the problem.
void expect_available(const Device& device, const PlanOptions& options) {
    const auto reason = unavailable(device);
    if (!reason) return;
    const char* argument = options.device ? "device" : options.backend ? "backend" : "kernel";
    throw Error(ErrorCode::device_unavailable, argument, *reason);
}

/// Why the caller's options leave this kernel out, or nothing.
std::optional<std::string> excluded_by_options(const KernelInfo& info, const PlanOptions& options) {
    if (!options.kernel.empty() && info.name != options.kernel) return "kernel " + options.kernel + " was asked for";
    if (options.backend && info.backend != *options.backend) {
        return fmt::format("backend {} was asked for", name_of(*options.backend));
    }
    if (options.schedule && info.schedule != *options.schedule) {
        return fmt::format("schedule {} was asked for", name_of(*options.schedule));
    }
    return std::nullopt;
}

const char* memory_name(DeviceType type) { return type == DeviceType::cuda ? "CUDA memory" : "host memory"; }

/// Why this kernel can't compute the Problem, or nothing.
std::optional<std::string> incapable(const Kernel& kernel, const Problem& problem, const PlanOptions& options,
                                     const Device& device) {
    if (kernel.info.pass != options.pass) return fmt::format("computes the {} only", name_of(kernel.info.pass));
    if (problem.kv_lengths && options.pass == Pass::backward) return "a cache of keys has no gradient";
    const auto& dtypes = kernel.info.dtypes;
    if (std::find(dtypes.begin(), dtypes.end(), problem.dtype) == dtypes.end()) {
        return fmt::format("does not take {}", name_of(problem.dtype));
    }
    const DeviceType wanted = kernel.info.backend == Backend::cuda ? DeviceType::cuda : DeviceType::cpu;
    if (device.type != wanted) {
        return fmt::format("takes tensors in {}; they are in {}", memory_name(wanted), memory_name(device.type));
    }
    return kernel.refuse(problem, options.tile, device);
}

[[noreturn]] void throw_no_kernel(const Problem& problem, const PlanOptions& options,
                                  const std::vector<Refusal>& refused) {
    std::string reasons;
    for (const Refusal& r : refused) {
        if (r.kernel->pass == options.pass) reasons += fmt::format("\n  {}: {}", r.kernel->name, r.reason);
    }
    throw Error(ErrorCode::unsupported, "",
                fmt::format("no kernel takes this {} ({}):{}", name_of(options.pass), problem.describe(), reasons));
}

std::string bytes_text(std::size_t bytes) {
    const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    auto value = static_cast<double>(bytes);
    std::size_t unit = 0;
    while (value >= 1024 && unit + 1 < std::size(units)) value /= 1024, ++unit;
    return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

/// Bytes of this machine's memory.
std::size_t physical_memory() {
    const long pages = ::sysconf(_SC_PHYS_PAGES), size = ::sysconf(_SC_PAGESIZE);
    if (pages <= 0 || size <= 0) return Arena::kTooMuch;
    return static_cast<std::size_t>(pages) * static_cast<std::size_t>(size);
}

/// Fills in how `kernel` would run the Problem. Returns why it can't after all, or nothing.
std::optional<std::string> complete(Plan& plan, const Kernel& kernel, const PlanOptions& options) {
    plan.kernel = &kernels()[static_cast<std::size_t>(&kernel - registry().data())];
    plan.tile = options.tile.value_or(kernel.default_tile(plan.problem, plan.device));
    plan.threads = options.threads > 0 ? options.threads : available_threads();
    plan.target = kernel.target(plan.device);
    if (kernel.matrix_unit != nullptr) plan.matrix_unit = kernel.matrix_unit(plan);
    plan.o_residual = knows_o_residual(kernel, plan.problem);
    plan.workspace_bytes = kernel.workspace_bytes(plan);
    if (plan.workspace_bytes >= Arena::kTooMuch) return "would need more workspace than memory can address";
    const bool on_host = plan.kernel->backend == Backend::cpu && plan.kernel->schedule == Schedule::standard;
    if (on_host && plan.workspace_bytes > physical_memory())
        return fmt::format("needs {} of workspace, this machine has {} of memory", bytes_text(plan.workspace_bytes),
                           bytes_text(physical_memory()));
    return std::nullopt;
}

/// One entry of describe(): a label, then words that go on below each other where a line would pass kColumns.
std::string entry(std::string_view label, std::string_view words) {
    constexpr std::size_t kColumns = 80;
    constexpr std::size_t kIndent = 11;
    std::string text = fmt::format("{:<{}}", label, kIndent);
    std::size_t column = kIndent;
    while (!words.empty()) {
        const std::string_view word = words.substr(0, words.find(' '));
        words.remove_prefix(std::min(words.size(), word.size() + 1));
        if (column > kIndent && column + 1 + word.size() > kColumns) {
            text += fmt::format("\n{:{}}", "", kIndent);
            column = kIndent;
        }
        if (column > kIndent) text += ' ', ++column;
        text += word;
        column += word.size();
    }
    return text + '\n';
}

/// The cost and the gain of keeping o_residual, as text.
std::string o_residual_text(const Plan& plan) {
    const Problem& p = plan.problem;
    const auto bytes = static_cast<std::size_t>(p.rows_q() * p.heads_q * p.head_dim_v);
    if (plan.pass == Pass::forward) return fmt::format("can be written, for the backward: {}", bytes_text(bytes));
    return fmt::format("taken, where the forward has written it ({}): five products a pair; seven without it",
                       bytes_text(bytes));
}

}  // namespace

Plan plan(const Problem& problem, const PlanOptions& options) {
    problem.validate();
    validate_plan_options(options);
    Plan result{.problem = problem, .pass = options.pass, .device = device_of(options)};
    expect_available(result.device, options);
    std::vector<Refusal> refused;
    const auto infos = kernels();
    bool chosen = false;
    for (const Kernel& kernel : registry()) {
        const KernelInfo* info = &infos[static_cast<std::size_t>(&kernel - registry().data())];
        auto reason = incapable(kernel, problem, options, result.device);
        bool capable = !reason;
        if (!reason) reason = excluded_by_options(kernel.info, options);
        if (!reason && chosen)
            reason = "could run it; comes after " + result.kernel->name + " in the order of preference";
        if (!reason) {
            reason = complete(result, kernel, options);
            chosen = capable = !reason;
        }
        if (!reason) continue;
        refused.push_back({info, *reason, capable});
    }
    if (!chosen) throw_no_kernel(problem, options, refused);
    result.refused = std::move(refused);
    return result;
}

std::string Plan::describe() const {
    if (kernel == nullptr) return entry("kernel", "none: not made by plan()");
    std::string text = entry("problem", problem.describe());
    text += entry("kernel", fmt::format("{} ({}{})", kernel->name, target,
                                        matrix_unit.empty() ? "" : ", GEMMs on " + matrix_unit));
    text += entry("tile", fmt::format("{} queries x {} keys", tile.block_q, tile.block_kv));
    if (device.type == DeviceType::cuda) text += entry("device", fmt::format("CUDA device {}", device.index));
    else text += entry("threads", std::to_string(threads));
    text += entry("workspace", bytes_text(workspace_bytes));
    if (o_residual) text += entry("o_residual", o_residual_text(*this));
    for (const Refusal& r : refused) {
        if (r.kernel->pass == pass) text += entry("not", fmt::format("{}: {}", r.kernel->name, r.reason));
    }
    return text;
}

}  // namespace tessera
