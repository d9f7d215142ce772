// SPDX-License-Identifier: Apache-2.0
//
// Bandwidth of L2 and device memory.
#include "micro/measure.cuh"

namespace tessera::micro {
namespace {

constexpr int kThreads = 1024;
constexpr int kBlocksPerSm = 2;
constexpr int kUnrolled = 2;

/// Reads the memory `rounds` times in whole lines, bypassing L1, from a different start each time.
__global__ void __launch_bounds__(kThreads)
    read(const uint4* from, std::size_t count, int rounds, unsigned* sink, long long* clocks) {
    const std::size_t step = std::size_t{gridDim.x} * kThreads;
    const std::size_t first = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
    unsigned any = 0;
    micro::BlockClock clock(clocks);
    for (int round = 0; round < rounds; ++round) {
        for (std::size_t i = first; i + (kUnrolled - 1) * step < count; i += kUnrolled * step) {
            uint4 got[kUnrolled];
#pragma unroll
            for (int u = 0; u < kUnrolled; ++u) got[u] = __ldcg(from + i + u * step);
#pragma unroll
            for (int u = 0; u < kUnrolled; ++u) any |= got[u].x ^ got[u].y ^ got[u].z ^ got[u].w;
        }
    }
    clock.stop();
    if (any == 1) *sink = any;
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    copy(const uint4* from, uint4* to, std::size_t count, long long* clocks) {
    const std::size_t step = std::size_t{gridDim.x} * kThreads;
    const std::size_t first = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
    micro::BlockClock clock(clocks);
    for (std::size_t i = first; i + (kUnrolled - 1) * step < count; i += kUnrolled * step) {
        uint4 got[kUnrolled];
#pragma unroll
        for (int u = 0; u < kUnrolled; ++u) got[u] = __ldcs(from + i + u * step);
#pragma unroll
        for (int u = 0; u < kUnrolled; ++u) __stcs(to + i + u * step, got[u]);
    }
    clock.stop();
}

/// The part of `count` that the loops above touch.
double touched(std::size_t count, int blocks) {
    const std::size_t step = std::size_t{kUnrolled} * static_cast<std::size_t>(blocks) * kThreads;
    return static_cast<double>(count / step * step) * sizeof(uint4);
}

}  // namespace

std::vector<Figure> memory_figures(const Chip& chip) {
    std::vector<Figure> figures;
    const int blocks = kBlocksPerSm * chip.multiprocessors;
    const Buffer<unsigned> sink(1);
    const Buffer<uint4> from(std::size_t{1} << 28);  // 4 GiB
    const Buffer<uint4> to(std::size_t{1} << 27);
    cuda::check(cudaMemset(from.data(), 1, from.bytes()), "cudaMemset");
    const auto reading = [&](Figure figure, std::size_t count, int rounds) {
        figure.work = touched(count, blocks) * rounds;
        figure.threads = kThreads * kBlocksPerSm;
        figures.push_back(timed(figure, blocks, [&](long long* clocks) {
            launch(read, blocks, kThreads, 0, static_cast<const uint4*>(from.data()), count, rounds, sink.data(),
                   clocks);
        }));
    };
    // Sizes in units of one step of all blocks, 8.25 MiB with 132 multiprocessors.
    const std::size_t unit = std::size_t{kUnrolled} * static_cast<std::size_t>(blocks) * kThreads;
    for (const std::size_t units : {1, 2, 3, 4}) {
        const double mib = static_cast<double>(units * unit * sizeof(uint4)) / (1 << 20);
        reading({.name = "L2, read",
                 .variant = std::to_string(static_cast<int>(mib)) + " MiB",
                 .resource = "l2",
                 .unit = "B"},
                units * unit, 480 / static_cast<int>(units));
    }
    reading({.name = "device memory, read",
             .variant = "4 GiB",
             .resource = "dram",
             .unit = "B",
             .nominal_per_second = chip.dram_bytes_per_second},
            from.bytes() / sizeof(uint4), 1);
    const std::size_t count = to.bytes() / sizeof(uint4);
    Figure copying{.name = "device memory, copied",
                   .variant = "2 GiB, read and written",
                   .resource = "dram",
                   .unit = "B",
                   .work = 2 * touched(count, blocks),
                   .nominal_per_second = chip.dram_bytes_per_second,
                   .threads = kThreads * kBlocksPerSm};
    figures.push_back(timed(copying, blocks, [&](long long* clocks) {
        launch(copy, blocks, kThreads, 0, static_cast<const uint4*>(from.data()), to.data(), count, clocks);
    }));
    return figures;
}

}  // namespace tessera::micro
