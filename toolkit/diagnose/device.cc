// SPDX-License-Identifier: Apache-2.0
#include "diagnose/device.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <vector>

#include "diagnose/kernel_text.hpp"

namespace tessera::diagnose {
namespace {

using model::Machine;

constexpr double kUnlistedError = 0.3;    // an estimate: the model was compared with no such card
constexpr double kSliceError = 0.2;       // an estimate: a part of a listed card
constexpr double kMemoryTolerance = 0.1;  // drivers keep a part of the memory, and makers round it

/// Words of a name that make it another card than the listed one whose name it contains.
constexpr const char* kVariants[] = {"GH200", "GB200", "GB300", "NVL", "Laptop", "Max-Q", "Mobile", "4090 D", "Super"};

bool is_slice(const Gpu& gpu) { return contains(gpu.name, "MIG "); }

bool is_variant(const Gpu& gpu, const Machine& machine) {
    for (const char* word : kVariants) {
        if (contains(gpu.name, word) && !contains(machine.title, word)) return true;
    }
    return is_slice(gpu);
}

bool fits_properties(const Gpu& gpu, const Machine& machine) {
    if (gpu.multiprocessors && *gpu.multiprocessors != static_cast<int>(machine.cores)) return false;
    if (!gpu.memory_gib || machine.memory_gib <= 0) return true;
    return std::abs(*gpu.memory_gib / machine.memory_gib - 1) <= kMemoryTolerance;
}

/// The listed card of the same capability whose memory and multiprocessors are nearest.
const Machine* nearest_of(const Gpu& gpu) {
    if (!gpu.capability) return nullptr;
    const auto generation = [](int capability) {
        return capability >= 100 && capability < 110 ? 100 : capability;  // B200 and B300
    };
    const Machine* nearest = nullptr;
    double least = 0;
    for (const Machine& machine : model::machines()) {
        if (machine.kind != model::MachineKind::gpu) continue;
        if (generation(static_cast<int>(std::lround(10 * machine.capability))) != generation(*gpu.capability)) continue;
        double distance = 0;
        if (gpu.multiprocessors) distance += std::abs(std::log(*gpu.multiprocessors / machine.cores));
        if (gpu.memory_gib) distance += std::abs(std::log(*gpu.memory_gib / machine.memory_gib));
        if (nearest == nullptr || distance < least) nearest = &machine, least = distance;
    }
    return nearest;
}

/// `machine` with the multiprocessors and the memory of `gpu`. A slice's bandwidth and cache are its share of memory.
Machine scaled(const Machine& machine, const Gpu& gpu) {
    Machine result = machine;
    if (gpu.multiprocessors) result.cores.value = *gpu.multiprocessors;
    if (gpu.memory_gib && machine.memory_gib > 0) {
        const double share = *gpu.memory_gib / machine.memory_gib;
        result.memory_gib.value = *gpu.memory_gib;
        if (is_slice(gpu) && share < 1) {
            result.dram_gbs.value *= share;
            result.l2_mib.value *= share;
        }
    }
    return result;
}

}  // namespace

std::string text_of(const Gpu& gpu) {
    std::vector<std::string> facts;
    if (gpu.capability) facts.push_back(fmt::format("sm{}", *gpu.capability));
    if (gpu.multiprocessors) facts.push_back(fmt::format("{} multiprocessors", *gpu.multiprocessors));
    if (gpu.memory_gib) facts.push_back(fmt::format("{:.1f} GiB", *gpu.memory_gib));
    const std::string all = fmt::format("{}", fmt::join(facts, ", "));
    if (gpu.name.empty()) return all;
    return all.empty() ? gpu.name : fmt::format("{} ({})", gpu.name, all);
}

Device device_of(const Gpu& gpu) {
    Device device;
    if (gpu.name.empty()) {
        device.missing = "the GPU's name is not known";
        return device;
    }
    const Machine* machine = nullptr;
    for (const Machine& listed : model::machines()) {
        if (listed.name == gpu.name || listed.title == gpu.name) machine = &listed;
    }
    const bool by_its_name = machine != nullptr;  // as the user gave it
    if (machine == nullptr) machine = model::machine_of_device(gpu.name);
    if (machine != nullptr && machine->kind != model::MachineKind::gpu) machine = nullptr;
    const bool listed =
        machine != nullptr && (by_its_name || (!is_variant(gpu, *machine) && fits_properties(gpu, *machine)));
    if (listed) {
        device.machine = *machine;
        return device;
    }
    if (const Machine* nearest = gpu.multiprocessors && !is_slice(gpu) ? nearest_of(gpu) : nullptr) machine = nearest;
    if (machine == nullptr && gpu.multiprocessors) machine = nearest_of(gpu);
    if (machine == nullptr || contains(gpu.name, "H20 ") || gpu.name == "NVIDIA H20") {
        device.missing = fmt::format("the model does not know the GPU \"{}\"", gpu.name);
        return device;
    }
    device.machine = scaled(*machine, gpu);
    device.more_error = is_slice(gpu) ? kSliceError : kUnlistedError;
    device.caveat =
        gpu.multiprocessors
            ? fmt::format(
                  "the GPU is {}, which is not among the model's cards: {} ({} multiprocessors, {:.0f} GiB) "
                  "scaled to it, with a wide bar",
                  text_of(gpu), machine->name, static_cast<int>(machine->cores), double(machine->memory_gib))
            : fmt::format("the GPU is {}, which is not among the model's cards: taken for {}, with a wide bar",
                          text_of(gpu), machine->name);
    return device;
}

}  // namespace tessera::diagnose
