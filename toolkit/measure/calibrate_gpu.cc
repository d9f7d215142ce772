// SPDX-License-Identifier: Apache-2.0
//
// Computes the roofs of a GPU from the Records of bench/micro, which count clocks inside their kernels.
#include <fmt/format.h>

#include <algorithm>

#include "measure/calibrate.hpp"
#include "tessera/error.hpp"

namespace tessera::measure {
namespace {

/// The best of the Records whose kernel is "micro: NAME" and whose variant contains `variant`.
struct Best {
    double value = 0;
    double clock_ghz = 0;
    bool found() const { return value > 0; }
};

/// True if no other unit works beside the measured one.
bool is_single_unit(const Record& r) { return r.features.find("copies") == std::string::npos; }

template <class Rate>
Best best(std::span<const Record> records, const std::string& name, const Rate& rate) {
    Best result;
    for (const Record& r : records) {
        if (r.kernel.rfind("micro: " + name, 0) != 0 || !(r.ms > 0) || !is_single_unit(r)) continue;
        const double value = rate(r);
        if (value > result.value) result = {value, r.clock_mhz * 1e-3};
    }
    return result;
}

double bytes_per_second(const Record& r) {
    double bytes = 0;
    for (const auto& [level, n] : r.bytes) bytes += n;
    return bytes / (r.ms * 1e-3);
}

/// Sets the clock without load and the clock under MMAs alone.
void set_clocks(model::Machine& m, std::span<const Record> micro, const std::string& provenance) {
    double highest = 0;
    double loaded = 0;
    for (const Record& r : micro) {
        highest = std::max(highest, r.clock_mhz * 1e-3);
        const bool full =
            r.kernel.rfind("micro: wgmma", 0) == 0 && is_single_unit(r) && r.percent_of_bound.value_or(0) > 99;
        if (full && r.clock_mhz > 0) loaded = loaded > 0 ? std::min(loaded, r.clock_mhz * 1e-3) : r.clock_mhz * 1e-3;
    }
    if (highest > 0) m.clock_ghz = {highest, provenance};
    if (loaded > 0) m.loaded_clock_ghz = {loaded, provenance};
}

}  // namespace

model::Machine calibrate_gpu(const model::Machine& start, std::span<const Record> micro) {
    if (start.kind != model::MachineKind::gpu)
        throw Error(ErrorCode::invalid_argument, "--device",
                    fmt::format("expected the GPU that the Records were measured on, got {}, a CPU", start.name));
    model::Machine m = start;
    std::string provenance;
    std::string device;
    for (const Record& r : micro) {
        if (r.kernel.rfind("micro: ", 0) != 0) continue;
        if (!device.empty() && r.device != device)
            throw Error(ErrorCode::bad_data, "device",
                        fmt::format("expected Records of one device, got {} and {}", device, r.device));
        device = r.device;
        provenance = fmt::format("measured by bench/micro, {}", r.date.substr(0, 10));
    }
    if (device.empty()) throw Error(ErrorCode::bad_data, "micro", "expected Records of bench/micro, got none");
    const model::Machine* known = model::machine_of_device(device);
    if (known != nullptr && model::find_machine(start.name) != nullptr && known->name != start.name)
        throw Error(ErrorCode::bad_data, "device",
                    fmt::format("expected Records of {}, got those of {}", start.title, device));
    m.name = start.name + "-calibrated";
    m.title = fmt::format("{}, with the rates that bench/micro measured", device);

    const double sms = m.cores;
    const auto per_clock = [&](const Record& r, double per_second) {
        return r.clock_mhz > 0 ? per_second / (sms * r.clock_mhz * 1e6) : 0.0;
    };
    const auto flop = [&](const Record& r) { return per_clock(r, r.tflops * 1e12); };
    const auto bytes = [&](const Record& r) { return per_clock(r, bytes_per_second(r)); };
    const auto set = [&](model::Quantity& quantity, const Best& measured, double value) {
        if (measured.found()) quantity = {value, provenance};
    };
    const Best wgmma = best(micro, "wgmma", flop);
    const Best warp = best(micro, "mma.sync", flop);
    set(m.matrix_flop, wgmma, wgmma.value);
    if (wgmma.found() && warp.found()) m.warp_matrix_share = {warp.value / wgmma.value, provenance};
    else if (warp.found()) m.matrix_flop = {warp.value, provenance}, m.warp_matrix_share = {1, provenance};
    const Best exps = best(micro, "ex2", flop);  // one operation each
    set(m.exp_rate, exps, exps.value);
    const Best fma = best(micro, "FMA", flop);  // counted as one operation, too
    set(m.fma_flop, fma, 2 * fma.value);
    const Best shared = best(micro, "shared memory", bytes);
    set(m.shared_bytes, shared, shared.value);
    const Best l2 = best(micro, "TMA, L2", bytes);
    const Best l2_loads = best(micro, "L2, read", bytes);
    set(m.l2_bytes, l2.found() ? l2 : l2_loads, std::max(l2.value, l2_loads.value));
    const Best read = best(micro, "device memory, read", bytes_per_second);
    if (read.found()) m.dram_read_share = {std::min(1.0, read.value * 1e-9 / m.dram_gbs), provenance};
    const Best copied = best(micro, "device memory, copied", bytes_per_second);
    if (copied.found()) m.dram_copy_share = {std::min(1.0, copied.value * 1e-9 / m.dram_gbs), provenance};
    const Best launch = best(micro, "launches, one after the other", [](const Record& r) { return 1 / r.ms; });
    set(m.launch_us, launch, 1e3 / launch.value);

    set_clocks(m, micro, provenance);
    validate(m);
    return m;
}

}  // namespace tessera::measure
