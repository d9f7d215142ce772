// SPDX-License-Identifier: Apache-2.0
//
// What the threads of this host reach in a few microseconds of each kind of work.
#pragma once

#include <atomic>
#include <iosfwd>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "parallel.hpp"

namespace tessera::fit {

using Json = nlohmann::ordered_json;

/// Rates of a thread: GHz of a chain of dependent steps, GFLOP/s in lanes and of bf16 tiles.
struct Rates {
    double clock = 0, lanes = 0, tiles = 0;
    int cpu = -1;
};

/// body(worker) on so many threads at once: nobody begins before all have come.
template <class Body>
void on_all(int threads, const Body& body) {
    std::atomic<int> here{0};
    default_parallel_for(threads, threads, [&](std::int64_t, int worker) {
        ++here;
        while (here.load() < threads) std::this_thread::yield();
        body(worker);
    });
}

/// Of so many threads at once.
std::vector<Rates> rates_of(int threads);

Json json_of(const std::vector<Rates>& rates);

/// The first CPU of each core, then the others.
std::vector<int> cores_in_turn(int cpus);

/// The calling thread, from now on.
void run_on(int cpu);

/// Rates on each CPU in turn for a quarter of a second, then on the first with another thread on each other CPU of a
/// few, which does nothing but one kind of work; a line of JSON each.
void write_states(std::ostream& out);

}  // namespace tessera::fit
