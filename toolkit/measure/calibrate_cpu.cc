// SPDX-License-Identifier: Apache-2.0
//
// Measures the roofs of this CPU. Every rate is the best of several short runs, because other work on the machine can
// only lower it. A rate counts the CPU time of its threads, not wall time. The machine file says so if other work took
// much of that time.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "cpu/matrix/peak.hpp"
#include "cpu/simd/primitives.hpp"
#include "io/memory.hpp"
#include "measure/calibrate.hpp"
#include "measure/calibrate_kernels.hpp"
#include "measure/host.hpp"
#include "measure/timer.hpp"
#include "parallel.hpp"
#include "tessera/error.hpp"

namespace tessera::measure {
namespace {

constexpr double kSeconds = 0.08;  // length of one run
constexpr int kRuns = 5;

/// Work that one thread repeats; returns the amount done, in its unit.
using Work = std::function<double()>;

/// Returns the best rate of kRuns (work per second of all threads together); make(thread) prepares a thread's work.
/// `cpu_fraction` falls to the lowest fraction of CPU time that a thread got in the best run.
double best_rate(int threads, const std::function<Work(int)>& make, double& cpu_fraction) {
    double best = 0, fraction_of_best = 1;
    for (int run = 0; run < kRuns; ++run) {
        std::atomic<int> ready{0};
        std::vector<double> rates(static_cast<std::size_t>(threads)), fractions(rates);
        std::vector<std::thread> pool;
        for (int t = 0; t < threads; ++t) {
            pool.emplace_back([&, t] {
                const Work work = make(t);
                work();
                ++ready;
                while (ready.load() < threads) std::this_thread::yield();
                double done = 0;
                const Timer timer;
                const ThreadTimer own;
                while (timer.seconds() < kSeconds) done += work();
                const double ran = std::max(own.seconds(), 1e-6);
                rates[static_cast<std::size_t>(t)] = done / ran;
                fractions[static_cast<std::size_t>(t)] = std::min(1.0, ran / timer.seconds());
            });
        }
        for (std::thread& thread : pool) thread.join();
        double sum = 0;
        for (const double rate : rates) sum += rate;
        if (sum > best) best = sum, fraction_of_best = *std::min_element(fractions.begin(), fractions.end());
    }
    cpu_fraction = std::min(cpu_fraction, fraction_of_best);
    return best;
}

/// Computes x = x a + b, where each step waits for the one before: 4 clocks on x86-64 (3 for the multiplication, 1 for
/// the addition).
Work dependent_steps() {
    return [x = std::uint64_t{1}]() mutable {
        constexpr int kSteps = 100'000;
        constexpr double kClocks = 4;
        for (int i = 0; i < kSteps; ++i) x = x * 6364136223846793005ULL + 1442695040888963407ULL;
        static std::atomic<std::uint64_t> sink;
        sink.store(x, std::memory_order_relaxed);
        return kSteps * kClocks;
    };
}

/// Returns floats aligned to a cache line.
std::shared_ptr<float[]> floats(std::int64_t n, float value) {
    const auto count = static_cast<std::size_t>(n);
    std::shared_ptr<float[]> tile(static_cast<float*>(::operator new[](count * sizeof(float), std::align_val_t{64})),
                                  [](float* memory) { ::operator delete[](memory, std::align_val_t{64}); });
    std::fill_n(tile.get(), count, value);
    return tile;
}

/// Returns FLOP of the library's own tile GEMM with operands in the first-level cache.
Work gemms() {
    constexpr std::int64_t kRows = 64, kLanes = 64, kDepth = 64;
    return [a = floats(kRows * kDepth, 0.5F), b = floats(kDepth * kLanes, 0.25F),
            c = floats(kRows * kLanes, 0.0F)]() mutable {
        constexpr int kTimes = 20;
        for (int i = 0; i < kTimes; ++i) {
            cpu::simd::matmul({.m = kRows,
                               .n = kLanes,
                               .k = kDepth,
                               .a = a.get(),
                               .a_row = kDepth,
                               .a_k = 1,
                               .b = b.get(),
                               .b_stride = kLanes,
                               .c = c.get(),
                               .c_stride = kLanes});
        }
        return 2.0 * kRows * kLanes * kDepth * kTimes;
    };
}

/// Computes exp(s - lse) of a tile with the library's own exponential.
Work exponentials() {
    constexpr std::int64_t kKeys = 64, kLanes = 64;
    return [s = floats(kKeys * kLanes, 0.5F), lse = floats(kLanes, 2.0F)]() mutable {
        constexpr int kTimes = 20;
        for (int i = 0; i < kTimes; ++i) cpu::simd::weights_from_lse(s.get(), lse.get(), kKeys, kLanes, kLanes);
        return static_cast<double>(kKeys * kLanes * kTimes);
    };
}

/// Returns bytes read. The C library's search for an absent byte reads at the full speed of loads.
Work reading(std::size_t bytes) {
    auto buffer = std::make_shared<std::vector<char>>(bytes, '\0');
    return [buffer] {
        const std::size_t part = buffer->size();
        if (std::memchr(buffer->data(), 1, part) != nullptr) return 0.0;
        return static_cast<double>(part);
    };
}

/// Returns the microseconds of an empty parallel loop on all threads, the best of many.
double loop_microseconds(int threads) {
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 300; ++i) {
        const Timer timer;
        default_parallel_for(threads, threads, [](std::int64_t, int) {});
        best = std::min(best, timer.seconds() * 1e6);
    }
    return best;
}

model::Quantity measured(double value) { return {value, "measured by tessera calibrate"}; }

/// Rounds to three digits, the precision of such a measurement.
double rounded(double value) {
    if (value == 0) return 0;
    const double unit = std::pow(10, std::floor(std::log10(value)) - 2);
    return std::round(value / unit) * unit;
}

}  // namespace

model::Machine measure_roofs(int threads, const CalibrationProgress& progress) {
    const int cores = available_threads();
    if (threads <= 0) threads = cores;
    if (threads > cores)
        throw Error(ErrorCode::invalid_argument, "threads",
                    fmt::format("expected up to {}, the cores of this process, got {}", cores, threads));
    double cpu_fraction = 1;
    const auto rate = [&](const char* what, int workers, const std::function<Work(int)>& make) {
        progress(fmt::format("{}, {} thread{}", what, workers, workers == 1 ? "" : "s"));
        return best_rate(workers, make, cpu_fraction);
    };
    const double hertz = rate("clock", 1, [](int) { return dependent_steps(); });
    const double gemm_1 = rate("GEMMs", 1, [](int) { return gemms(); });
    const double gemm_n = rate("GEMMs", threads, [](int) { return gemms(); });
    progress("GEMMs of bf16 tiles, 1 thread");
    // Another thread may hold the unit for seconds, which cuts the rate to a third. So it is measured three times.
    const auto tile_rate = [&] {
        return best_rate(
            1, [](int) { return [] { return cpu::matrix::peak_tile_products(100); }; }, cpu_fraction);
    };
    double tiles = tile_rate();
    const double exps = rate("exponentials", 1, [](int) { return exponentials(); });
    constexpr std::size_t kSecondLevel = std::size_t{384} << 10;
    const double second_level = rate("second-level cache", 1, [](int) { return reading(kSecondLevel); });
    const std::size_t last = std::max<std::size_t>(static_cast<std::size_t>(last_level_cache()), std::size_t{4} << 20);
    const auto bytes_per_thread = last / 2 / static_cast<std::size_t>(threads);
    tiles = std::max(tiles, tile_rate());
    const double last_level = rate("last-level cache", threads, [&](int) { return reading(bytes_per_thread); });
    const std::size_t beyond = std::max(last * 4 / static_cast<std::size_t>(threads), std::size_t{64} << 20);
    const double memory = rate("memory", threads, [&](int) { return reading(beyond); });
    tiles = std::max(tiles, tile_rate());
    progress("parallel loop");
    const double loop = loop_microseconds(threads);

    model::Machine m;
    m.name = "this-host";
    m.title = fmt::format("{}, {} threads", describe_host().cpu, threads);
    m.kind = model::MachineKind::cpu;
    m.capability = {0, "none"};
    m.cores = {static_cast<double>(threads), "the threads that were measured"};
    const double loaded = hertz * std::min(1.0, gemm_n / threads / gemm_1);
    m.clock_ghz = measured(rounded(hertz * 1e-9));
    m.rated_clock_ghz = m.clock_ghz;
    constexpr double kUndisturbed = 0.9;  // fraction of CPU time above which no other work disturbed a thread
    m.loaded_clock_ghz = {
        rounded(loaded * 1e-9),
        "measured: rate of GEMMs per thread with all threads over that with one" +
            (cpu_fraction >= kUndisturbed
                 ? std::string()
                 : fmt::format("; uncertain, because other programs left a thread {:.0f} % of the CPU time",
                               100 * cpu_fraction))};
    m.fma_flop = measured(rounded(gemm_1 / hertz));
    m.matrix_flop =
        tiles > gemm_1 ? measured(rounded(tiles / hertz)) : m.fma_flop;  // without such a unit bf16 is widened
    m.warp_matrix_share = {1, "the kernels use no other MMA instruction"};
    m.exp_rate = measured(rounded(exps / hertz));
    m.shared_bytes = measured(rounded(second_level / hertz));
    m.shared_kib = {static_cast<double>(kSecondLevel >> 10), "the size that was read"};
    m.l2_bytes = measured(rounded(last_level / threads / loaded));
    m.l2_mib = {static_cast<double>(last) / 1048576.0, "as the operating system reports"};
    m.reduce_bytes = {0, "no such unit"};
    m.dram_gbs = measured(rounded(memory * 1e-9));
    m.dram_read_share = {1, "the rate is that of reading"};
    m.dram_copy_share = {0.8, "estimate: usual"};
    m.memory_gib = {rounded(static_cast<double>(io::memory_state().limit) / 1073741824.0),
                    "as the operating system reports"};
    m.launch_us = measured(rounded(loop));
    validate(m);
    return m;
}

model::Machine calibrate_cpu(int threads, const CalibrationProgress& progress) {
    model::Machine m = measure_roofs(threads, progress);
    set_measured_kernels(m, measure_kernels(m, [&](const std::string& what) { progress("kernels, " + what); }));
    validate(m);
    return m;
}

}  // namespace tessera::measure
