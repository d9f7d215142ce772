// SPDX-License-Identifier: Apache-2.0
#include "diagnose/device.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <iterator>
#include <vector>

#include "diagnose/kernel_text.hpp"

namespace tessera::diagnose {
namespace {

using model::Machine;

constexpr double kUnlistedError = 0.3;    // an estimate: the model was compared with no such card
constexpr double kSliceError = 0.2;       // an estimate: a part of a listed card
constexpr double kMemoryTolerance = 0.1;  // drivers keep a part of the memory, and makers round it

/// Words that make a name that of another card, though it contains a listed card's name.
constexpr const char* kVariants[] = {"gh200", "gb200", "gb300", "nvl", "laptop", "max-q",     "mobile", "super",
                                     "ti",    "d",     "pcie",  "3e",  "144g",   "pcie-40gb", "a800"};

/// True if the lower-case `text` contains `word` without a letter or a digit next to it.
bool has_whole(std::string_view text, std::string_view word) {
    const auto joins = [&](std::size_t at) {
        return at < text.size() && std::isalnum(static_cast<unsigned char>(text[at])) != 0;
    };
    for (std::size_t at = text.find(word); at != std::string_view::npos; at = text.find(word, at + 1)) {
        if (!(at > 0 && joins(at - 1)) && !joins(at + word.size())) return true;
    }
    return false;
}

bool is_slice(const Gpu& gpu) { return contains(gpu.name, "MIG "); }

bool is_variant(const Gpu& gpu, const Machine& machine) {
    const std::string name = lower_case(gpu.name);
    const std::string title = lower_case(machine.title);
    const bool named = std::any_of(std::begin(kVariants), std::end(kVariants),
                                   [&](const char* word) { return has_whole(name, word) && !has_whole(title, word); });
    return named || is_slice(gpu);
}

/// The listed card that the name is of, or is a variant of.
const Machine* named_card(const Gpu& gpu) {
    const Machine* machine = model::machine_of_device(gpu.name);
    if (machine == nullptr || machine->kind != model::MachineKind::gpu) return nullptr;
    const bool of_a100 = machine->name == "a100" || machine->name == "a100-40" || machine->name == "a800";
    return of_a100 && has_whole(lower_case(gpu.name), "pcie") ? model::find_machine("a100-pcie") : machine;
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
    if (machine == nullptr) machine = named_card(gpu);
    if (machine != nullptr && machine->kind != model::MachineKind::gpu) machine = nullptr;
    const bool listed =
        machine != nullptr && (by_its_name || (!is_variant(gpu, *machine) && fits_properties(gpu, *machine)));
    if (listed) {
        device.machine = *machine;
        return device;
    }
    if (machine == nullptr && gpu.multiprocessors) machine = nearest_of(gpu);
    if (machine == nullptr) {
        device.missing = fmt::format("the model does not know the GPU \"{}\"", gpu.name);
        if (gpu.capability && gpu.multiprocessors)
            device.missing += fmt::format(", and has no card of compute capability {}.{} to scale",
                                          *gpu.capability / 10, *gpu.capability % 10);
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
