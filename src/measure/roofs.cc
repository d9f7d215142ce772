// SPDX-License-Identifier: Apache-2.0
#include "measure/roofs.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "cpu/tile/peak.hpp"

namespace tessera::measure {
namespace {

using Clock = std::chrono::steady_clock;

/// Amount per second when every thread calls work(thread), which returns an amount, until the time is over.
template <class Work>
double rate(int threads, double seconds, const Work& work) {
    std::atomic<int> ready{0};
    std::atomic<double> sum{0};
    const auto run = [&](int thread) {
        work(thread);  // wakes the core
        ready.fetch_add(1);
        while (ready.load() < threads) std::this_thread::yield();
        const auto begin = Clock::now();
        double amount = 0;
        double passed = 0;
        while (passed < seconds) {
            amount += work(thread);
            passed = std::chrono::duration<double>(Clock::now() - begin).count();
        }
        sum.fetch_add(amount / passed);
    };
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
    run(0);
    for (std::thread& other : others) other.join();
    return sum.load();
}

/// Bytes per second of threads that read parts of a buffer larger than the caches.
double read_rate(int threads, double seconds) {
    constexpr std::int64_t kFloatsPerThread = std::int64_t{1} << 23;  // 32 MiB
    constexpr std::int64_t kPart = std::int64_t{1} << 16;
    std::vector<std::vector<float>> memory(static_cast<std::size_t>(threads));
    std::vector<std::int64_t> at(memory.size());
    std::atomic<float> sink{0};
    return rate(threads, seconds, [&](int thread) {
        const auto own = static_cast<std::size_t>(thread);
        if (memory[own].empty()) memory[own].assign(kFloatsPerThread, 1.0F);  // first touched by its reader
        sink.store(cpu::tile::peak_read(memory[own].data() + at[own], kPart), std::memory_order_relaxed);
        at[own] = (at[own] + kPart) % kFloatsPerThread;
        return static_cast<double>(kPart * static_cast<std::int64_t>(sizeof(float)));
    });
}

}  // namespace

Roofs probe_roofs(int threads, double seconds) {
    return {.threads = threads,
            .multiply_add = rate(threads, seconds, [](int) { return cpu::tile::peak_multiply_adds(10000); }),
            .tile_product = rate(threads, seconds, [](int) { return cpu::tile::peak_tile_products(100); }),
            .exponential = rate(threads, seconds, [](int) { return cpu::tile::peak_exponentials(100); }),
            .read = read_rate(threads, seconds)};
}

}  // namespace tessera::measure
