// SPDX-License-Identifier: Apache-2.0
//
// The rates that the threads of this host reach within a few microseconds of each kind of work.
#pragma once

#include <atomic>
#include <iosfwd>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "parallel.hpp"

namespace tessera::fit {

using Json = nlohmann::ordered_json;

/// The rates of a thread: GHz of a chain of dependent steps, GFLOP/s of the SIMD path and of bf16 tiles.
struct Rates {
    double clock = 0, lanes = 0, tiles = 0;
    int cpu = -1;
};

/// Runs body(worker) on `threads` threads at once: all start together.
template <class Body>
void on_all(int threads, const Body& body) {
    std::atomic<int> here{0};
    default_parallel_for(threads, threads, [&](std::int64_t, int worker) {
        ++here;
        while (here.load() < threads) std::this_thread::yield();
        body(worker);
    });
}

/// The rates of `threads` threads that run at once.
std::vector<Rates> rates_of(int threads);

Json json_of(const std::vector<Rates>& rates);

/// The first CPU of each core, then the others.
std::vector<int> cores_in_turn(int cpus);

/// Pins the calling thread to `cpu`.
void run_on(int cpu);

/// Samples the rates of each CPU for a quarter of a second, twice in turn; then those of CPU 0 beside a thread on
/// another CPU that repeats one load ("lanes": all kinds; "tiles"; "steps"). Writes a header and a line of JSON each.
void write_states(std::ostream& out);

}  // namespace tessera::fit
