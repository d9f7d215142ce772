// SPDX-License-Identifier: Apache-2.0
#include "host_rates.hpp"

#include <sched.h>

#include <cmath>
#include <fstream>
#include <memory>
#include <ostream>
#include <string>

#include "cpu/matrix/peak.hpp"
#include "cpu/simd/primitives.hpp"
#include "measure/host.hpp"
#include "measure/timer.hpp"

namespace tessera::fit {
namespace {

using measure::Timer;

double clock_ghz(int steps) {
    static std::atomic<std::uint64_t> sink;
    std::uint64_t x = sink.load(std::memory_order_relaxed);
    const Timer timer;
    for (int i = 0; i < steps; ++i) x = x * 6364136223846793005ULL + 1442695040888963407ULL;
    const double seconds = timer.seconds();
    sink.store(x, std::memory_order_relaxed);
    return 4e-9 * steps / seconds;  // 4 clocks a step
}

Rates rates_here() {
    struct alignas(64) Tiles {
        float a[64 * 64], b[64 * 64], c[64 * 64];
    };
    thread_local const auto tiles = std::make_unique<Tiles>();
    Rates rates;
    rates.cpu = sched_getcpu();
    rates.clock = clock_ghz(10'000);
    const auto lanes = [&](int times) {
        for (int i = 0; i < times; ++i)
            cpu::simd::matmul({.m = 64,
                               .n = 64,
                               .k = 64,
                               .a = tiles->a,
                               .a_row = 64,
                               .a_k = 1,
                               .b = tiles->b,
                               .b_stride = 64,
                               .c = tiles->c,
                               .c_stride = 64});
    };
    constexpr int kTimes = 4, kRounds = 40;
    lanes(1);
    const Timer of_lanes;
    lanes(kTimes);
    rates.lanes = 2e-9 * 64 * 64 * 64 * kTimes / of_lanes.seconds();
    cpu::matrix::peak_tile_products(2);
    const Timer of_tiles;
    rates.tiles = cpu::matrix::peak_tile_products(kRounds) * 1e-9 / of_tiles.seconds();
    return rates;
}

}  // namespace

std::vector<Rates> rates_of(int threads) {
    std::vector<Rates> rates(static_cast<std::size_t>(threads));
    on_all(threads, [&](int worker) { rates[static_cast<std::size_t>(worker)] = rates_here(); });
    return rates;
}

std::vector<int> cores_in_turn(int cpus) {
    std::vector<int> first, others;
    for (int cpu = 0; cpu < cpus; ++cpu) {
        std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
        int leader = cpu;
        file >> leader;
        (leader == cpu ? first : others).push_back(cpu);
    }
    first.insert(first.end(), others.begin(), others.end());
    return first;
}

void run_on(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
}

Json json_of(const std::vector<Rates>& rates) {
    Json json{{"clock", Json::array()}, {"lanes", Json::array()}, {"tiles", Json::array()}, {"cpus", Json::array()}};
    const auto rounded = [](double value) { return std::round(value * 100) / 100; };
    for (const Rates& one : rates) {
        json["clock"].push_back(rounded(one.clock)), json["lanes"].push_back(rounded(one.lanes));
        json["tiles"].push_back(rounded(one.tiles)), json["cpus"].push_back(one.cpu);
    }
    return json;
}

void write_states(std::ostream& out) {
    const int cpus = measure::describe_host().cores;
    const std::vector<int> order = cores_in_turn(cpus);
    constexpr double kSeconds = 0.25;
    const auto sample = [&](int cpu, const std::string& beside) {
        std::vector<Rates> rates;
        std::thread([&] {
            run_on(cpu);
            for (const Timer timer; timer.seconds() < kSeconds;) {
                rates.push_back(rates_here());
                std::this_thread::sleep_for(std::chrono::milliseconds(2));
            }
        }).join();
        Json json{{"cpu", cpu}, {"beside", beside}, {"rates", json_of(rates)}};
        json["rates"].erase("cpus");
        out << json.dump() << '\n';
    };
    Json all{{"cpus", cpus}, {"order", order}};
    out << all.dump() << '\n';
    for (int times = 0; times < 2; ++times)
        for (const int cpu : order) sample(cpu, "nothing");
    for (const int other : {1, 2, cpus / 2, cpus - 1}) {
        for (const std::string work : {"lanes", "tiles", "steps"}) {
            std::atomic<bool> stop{false};
            std::thread beside([&] {
                run_on(other % cpus);
                while (!stop.load()) {
                    if (work == "tiles") cpu::matrix::peak_tile_products(100);
                    else if (work == "steps") clock_ghz(10'000);
                    else rates_here();
                }
            });
            sample(0, work + " on " + std::to_string(other % cpus));
            stop = true;
            beside.join();
        }
    }
}

}  // namespace tessera::fit
