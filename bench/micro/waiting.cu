// SPDX-License-Identifier: Apache-2.0
//
// Latencies of a kernel launch, of a ping-pong handover between warpgroups, and of a test of a barrier.
#include "cuda/ptx/barrier.cuh"
#include "measure/timer.hpp"
#include "micro/measure.cuh"

namespace tessera::micro {
namespace {

using namespace tessera::cuda;

__global__ void nothing() {}

/// Two warpgroups alternate through named barriers, as in fa3's ping-pong scheduling.
__global__ void take_turns(int rounds, long long* clocks) {
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    if (warpgroup == 1) ptx::named_barrier_arrive(1, 256);
    BlockClock clock(clocks);
#pragma unroll 1
    for (int i = 0; i < rounds; ++i) {
        ptx::named_barrier_sync(1 + warpgroup, 256);
        ptx::named_barrier_arrive(2 - warpgroup, 256);
    }
    if (warpgroup == 0) ptx::named_barrier_sync(1, 256);
    clock.stop();
}

__global__ void meet(int rounds, long long* clocks) {
    BlockClock clock(clocks);
#pragma unroll 1
    for (int i = 0; i < rounds; ++i) ptx::named_barrier_sync(1, static_cast<int>(blockDim.x));
    clock.stop();
}

/// Tests a completed phase of an mbarrier repeatedly.
__global__ void look(int rounds, int* sink, long long* clocks) {
    __shared__ ptx::Mbarrier barrier;
    if (threadIdx.x == 0) ptx::mbarrier_init(barrier, 1);
    BlockClock clock(clocks);
    int said = 0;
#pragma unroll 1
    for (int i = 0; i < rounds; ++i) said += ptx::mbarrier_try_wait(barrier, 1);
    clock.stop();
    if (said == 1) *sink = said;
}

/// One thread arrives and waits for the phase that its arrival completes.
__global__ void arrive_and_wait(int rounds, long long* clocks) {
    __shared__ ptx::Mbarrier barrier;
    if (threadIdx.x == 0) ptx::mbarrier_init(barrier, 1);
    BlockClock clock(clocks);
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < rounds; ++i) {
            ptx::mbarrier_arrive(barrier);
            while (!ptx::mbarrier_try_wait(barrier, static_cast<std::uint32_t>(i) & 1)) {
            }
        }
    }
    clock.stop();
}

}  // namespace

std::vector<Figure> waiting_figures(const Chip& chip) {
    constexpr int kRounds = 20'000, kLaunches = 2'000;
    std::vector<Figure> figures;
    const auto add = [&](const char* name, const char* variant, const char* unit, int threads, double events,
                         auto&& start) {
        Figure figure{.name = name, .variant = variant, .unit = unit, .work = events, .threads = threads};
        figures.push_back(timed(figure, chip.multiprocessors, start));
    };
    const Buffer<int> sink(1);
    add("launches, one after the other", "empty kernel", "launch", 32, kLaunches, [&](long long*) {
        for (int i = 0; i < kLaunches; ++i) launch(nothing, 1, 32, 0);
    });
    add("launch, and wait for its end", "empty kernel", "launch", 32, 200, [&](long long*) {
        for (int i = 0; i < 200; ++i) {
            launch(nothing, 1, 32, 0);
            cuda::check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
        }
    });
    add("named barrier, turn to the other warpgroup", "", "turn", 256, 2.0 * kRounds,
        [&](long long* clocks) { launch(take_turns, chip.multiprocessors, 256, 0, kRounds, clocks); });
    for (const int threads : {128, 256, 384}) {
        add("named barrier, all meet",
            threads == 128   ? "128"
            : threads == 256 ? "256"
                             : "384",
            "barrier", threads, kRounds,
            [&](long long* clocks) { launch(meet, chip.multiprocessors, threads, 0, kRounds, clocks); });
    }
    add("mbarrier, look at a phase that has ended", "1 warp", "look", 32, kRounds,
        [&](long long* clocks) { launch(look, chip.multiprocessors, 32, 0, kRounds, sink.data(), clocks); });
    add("mbarrier, arrive and see the phase end", "1 thread", "phase", 32, kRounds,
        [&](long long* clocks) { launch(arrive_and_wait, chip.multiprocessors, 32, 0, kRounds, clocks); });
    return figures;
}

}  // namespace tessera::micro
