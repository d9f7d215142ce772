// SPDX-License-Identifier: Apache-2.0
#include "model/machine.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "model/cpu.hpp"
#include "model/machines.hpp"
#include "tessera/error.hpp"

namespace tessera {

bool Machine::supports(DType dtype) const {
    if (kind == MachineKind::cpu) return dtype == DType::fp32 || dtype == DType::bf16 || dtype == DType::fp16;
    constexpr double kFirstWithBf16 = 8.0;
    return dtype == DType::fp16 || dtype == DType::fp32 || (dtype == DType::bf16 && capability >= kFirstWithBf16);
}

double Machine::gemm_flop(DType dtype, bool warp_wide) const {
    if (kind == MachineKind::cpu) return dtype == DType::bf16 ? matrix_flop : fma_flop;  // fp16 is widened
    if (size_of(dtype) > 2) return fma_flop;
    return matrix_flop * (warp_wide ? warp_matrix_share.value : 1.0);
}

double Machine::peak_tflops(DType dtype) const {
    double flop = gemm_flop(dtype, false);
    // fp32 as three bf16 parts.
    if (dtype == DType::fp32 && (kind == MachineKind::cpu || supports(DType::bf16)))
        flop = std::max(flop, matrix_flop / model::kMmasPerFp32);
    return flop * cores * rated_clock_ghz * 1e-3;
}

std::span<const Machine> machines() {
    static const std::vector<Machine> all = [] {
        std::vector<Machine> list = model::gpu_machines();
        model::add_cards(list);
        for (Machine& cpu : model::cpu_machines()) list.push_back(std::move(cpu));
        return list;
    }();
    return all;
}

const Machine* find_machine(std::string_view name) {
    for (const Machine& machine : machines()) {
        if (machine.name == name) return &machine;
    }
    return nullptr;
}

const Machine* machine_of_device(std::string_view device) {
    struct Known {
        const char* text;
        const char* name;
    };
    constexpr Known kKnown[] = {
        {"GH200", "gh200"},
        {"H200", "h200"},
        {"H20", "h20"},
        {"H100 PCIe", "h100-pcie"},
        {"H100", "h100"},
        {"A100-SXM4-40GB", "a100-40"},
        {"A100-PCIE-40GB", "a100-40"},
        {"A100 80GB PCIe", "a100-pcie"},
        {"A100", "a100"},
        {"A800", "a800"},
        {"RTX A6000", "a6000"},
        {"L40S", "l40s"},
        {"RTX PRO 6000", "rtxpro6000"},
        {"RTX 5090", "rtx5090"},
        {"A10", "a10"},
        {"RTX A5000", "rtxa5000"},
        {"L4", "l4"},
        {"RTX 3090", "rtx3090"},
        {"RTX 4090", "rtx4090"},
        {"V100", "v100"},
        {"T4", "t4"},
        {"GB200", "gb200"},
        {"GB300", "gb300"},
        {"B200", "b200"},
        {"B300", "b300"},
    };
    if (const char* host = model::name_of_host(device)) return find_machine(host);
    if (device.starts_with("AMD ") || device.starts_with("Intel")) return nullptr;  // "AMD A10-7850K" is no NVIDIA A10
    for (const Known& known : kKnown) {
        const std::size_t at = device.find(known.text);
        if (at == std::string_view::npos) continue;
        const std::size_t end = at + std::string_view(known.text).size();
        const bool whole = end == device.size() || std::isalnum(static_cast<unsigned char>(device[end])) == 0;
        if (whole) return find_machine(known.name);
    }
    return nullptr;
}

namespace {

void validate_kernels(const Machine& machine) {
    const auto bad = [](const std::string& field, const std::string& expected, const auto& got) {
        throw Error(ErrorCode::bad_data, field, fmt::format("expected {}, got {}", expected, got));
    };
    const auto measured = measured_kernels(machine);
    if (machine.kind == MachineKind::gpu && !measured.empty())
        bad("kernels", "no kernels in the file of a GPU", measured.front().kernels);
    const auto known = model::cpu_kernel_kinds();
    for (auto one = measured.begin(); one != measured.end(); ++one) {
        if (std::find(known.begin(), known.end(), one->kernels) == known.end())
            bad("kernels", fmt::format("one of {}", fmt::join(known, ", ")), one->kernels);
        const bool repeated = std::any_of(
            measured.begin(), one, [&](const MeasuredKernels& earlier) { return earlier.kernels == one->kernels; });
        if (repeated) bad("kernels", "each kind once", "a second " + one->kernels);
        for_each_share(one->shares, [&](const std::string& name, const double& value) {
            const model::ShareRange range = model::range_of_share(name);
            if (range.has(value)) return;
            bad(fmt::format("kernels, {}, {}", one->kernels, name),
                fmt::format("a number from {} to {}", range.least, range.most), value);
        });
    }
}

}  // namespace

void validate(const Machine& machine) {
    for_each_quantity(machine, [&](const std::string& name, const char*, const Quantity& quantity) {
        // Bounds that keep times and rates finite; real machines lie well within.
        constexpr double kLeast = 1e-6, kMost = 1e9;
        const bool may_be_zero = name == "capability" || name == "reduce_bytes";
        const double most = name.ends_with("_share") ? 1 : kMost;
        const double value = quantity.value;
        if ((may_be_zero && value == 0) || (value >= kLeast && value <= most)) return;
        throw Error(ErrorCode::bad_data, name,
                    fmt::format("expected a number from {} to {}, got {}", kLeast, most, value));
    });
    if (machine.cores.value != std::floor(machine.cores.value))
        throw Error(ErrorCode::bad_data, "cores", fmt::format("expected a whole number, got {}", machine.cores.value));
    validate_kernels(machine);
}

}  // namespace tessera

namespace tessera::model {

ShareRange range_of_share(std::string_view name) {
    struct Known {
        const char* name;
        ShareRange range;
    };
    // Shares are relative to the host's rates in short runs. Noise may raise them over 1, by a quarter at most.
    constexpr Known kKnown[] = {{"gemm_share", {0.01, 1.25}},
                                {"exp_share", {0.01, 20}},
                                {"extra_tiles", {0, 20}},
                                {"loop_starts", {0, 100}},
                                {"call_us", {0, 1e5}},
                                {"pack_ns", {0, 100}},
                                {"contended_speed", {0.01, 1.25}},
                                {"start_us", {0, 1e5}},
                                {"read_share", {0.01, 4}},
                                {"mask_share", {0, 20}}};
    for (const Known& known : kKnown) {
        if (name == known.name) return known.range;
    }
    return {0, 0};
}

bool in_range(const KernelShares& shares) {
    bool all = true;
    for_each_share(shares,
                   [&](const char* name, const double& value) { all = all && range_of_share(name).has(value); });
    return all;
}

cuda::Limits limits_of(const Machine& machine) {
    // From compute capability 8.0 on, the system reserves 1 KiB of a multiprocessor's shared memory for each block.
    const double kept = machine.capability >= 8.0 ? 1 : 0;
    return {.who = machine.name,
            .capability = static_cast<int>(std::lround(10 * machine.capability.value)),
            .shared_bytes = static_cast<std::int64_t>((machine.shared_kib - kept) * 1024),
            .memory_bytes = static_cast<std::int64_t>(std::min(machine.memory_gib * 1073741824.0, 0x1p56))};
}

}  // namespace tessera::model
