// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "cuda/device.hpp"
#include "measure/host.hpp"
#include "measure/record.hpp"
#include "micro/figures.hpp"

namespace tessera::micro {
namespace {

/// The clock of the multiprocessors while the kernel ran; 0 if clocks were not counted.
double clock_hz(const Figure& f) { return f.cycles / (f.ms * 1e-3); }

/// Share of the nominal rate at the clock that was measured; 0 without a nominal rate.
double share(const Chip& chip, const Figure& f) {
    const double per_second = f.work / (f.ms * 1e-3);
    if (f.nominal_per_second > 0) return per_second / f.nominal_per_second;
    return f.nominal > 0 ? f.work / (f.cycles * chip.multiprocessors * f.nominal) : 0;
}

int attribute(cudaDeviceAttr which) {
    int value = 0;
    cuda::check(cudaDeviceGetAttribute(&value, which, 0), "cudaDeviceGetAttribute");
    return value;
}

measure::Record record_of(const Chip& chip, const Figure& f, const std::string& commit) {
    measure::Record record;
    record.kernel = "micro: " + f.name;
    record.pass = "micro";
    record.dtype = f.resource == "tensor" ? "bf16" : "";
    record.features = f.variant;
    record.ms = f.ms;
    record.ms_spread = f.ms_spread;
    record.bound = f.resource.empty() ? "latency of a " + f.unit : f.resource;
    if (f.resource.empty()) record.ms /= f.work, record.ms_spread /= f.work;
    else if (f.unit == "B") record.bytes[f.resource] = f.work;
    else record.tflops = f.work / (f.ms * 1e-3) * 1e-12;
    if (const double part = share(chip, f); part > 0) record.percent_of_bound = 100 * part;
    record.device = chip.name;
    record.threads = f.threads;
    record.clock_mhz = clock_hz(f) * 1e-6;
    int driver = 0, runtime = 0;
    cuda::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    cuda::check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    const auto text = [](int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); };
    record.versions = {{"cuda_driver", text(driver)}, {"cuda", text(runtime)}};
    record.date = measure::utc_date();
    record.commit = commit;
    return record;
}

}  // namespace

Chip this_chip() {
    const cuda::DeviceProperties& p = cuda::properties(Device{DeviceType::cuda, 0});
    const double memory_khz = attribute(cudaDevAttrMemoryClockRate);
    const double bus_bytes = attribute(cudaDevAttrGlobalMemoryBusWidth) / 8.0;
    return {.name = p.name,
            .multiprocessors = p.multiprocessors,
            .clock_hz = attribute(cudaDevAttrClockRate) * 1e3,
            .dram_bytes_per_second = 2 * memory_khz * 1e3 * bus_bytes};  // two transfers a clock
}

void print(const Chip& chip, const std::vector<Figure>& figures) {
    fmt::print("{}: {} multiprocessors, up to {:.0f} MHz, device memory {:.0f} GB/s by its clock\n\n", chip.name,
               chip.multiprocessors, chip.clock_hz * 1e-6, chip.dram_bytes_per_second * 1e-9);
    fmt::print("{:<44}{:<28}{:>10}{:>8}{:>9}{:>6}{:>6}\n", "", "", "rate", "unit", "/SM/clk", "% nom", "MHz");
    for (const Figure& f : figures) {
        fmt::print("{:<44}{:<28}", f.name, f.variant);
        const double mhz = clock_hz(f) * 1e-6;
        if (f.resource.empty()) {
            fmt::print("{:>10.1f}{:>8}", f.ms * 1e6 / f.work, "ns");
            if (f.cycles > 0) fmt::print("{:>9.1f} clocks", f.cycles / f.work);
        } else {
            fmt::print("{:>10.3f}{:>8}{:>9.1f}", f.work / (f.ms * 1e-3) * 1e-12, "T" + f.unit + "/s",
                       f.work / (f.cycles * chip.multiprocessors));
            if (const double part = share(chip, f); part > 0) fmt::print("{:>6.1f}", 100 * part);
            else fmt::print("{:>6}", "");
            fmt::print("{:>6.0f}", mhz);
        }
        fmt::print("\n");
    }
}

void save(const std::string& path, const std::string& commit, const Chip& chip, const std::vector<Figure>& figures) {
    std::vector<measure::Record> records;
    for (const Figure& f : figures) records.push_back(record_of(chip, f, commit));
    measure::append_records(path, records);
}

}  // namespace tessera::micro
