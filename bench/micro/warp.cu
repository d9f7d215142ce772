// SPDX-License-Identifier: Apache-2.0
//
// Throughput of warp-level instructions: mma.sync and ldmatrix.
#include "cuda/ptx/mma.cuh"
#include "micro/measure.cuh"

namespace tessera::micro {
namespace {

using namespace tessera::cuda;

constexpr int kAccumulators = 8;  // independent MMAs of a warp

__global__ void multiply(int rounds, float* sink, long long* clocks) {
    float d[kAccumulators][4] = {};
    std::uint32_t a[4];
    for (std::uint32_t i = 0; i < 4; ++i) a[i] = random_pair(threadIdx.x * 8 + i);
    const std::uint32_t b[2] = {random_pair(threadIdx.x * 8 + 4), random_pair(threadIdx.x * 8 + 5)};
    BlockClock clock(clocks);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
        for (int i = 0; i < 4 * kAccumulators; ++i) ptx::mma<__nv_bfloat16>(d[i % kAccumulators], a, b[0], b[1]);
    }
    clock.stop();
    float sum = 0;
    for (const auto& tile : d) sum += tile[0] + tile[1] + tile[2] + tile[3];
    if (sum == 0.123F) *sink = sum;
}

/// Lanes read 16 bytes each, 512 consecutive bytes per warp: no bank conflicts.
__global__ void load_matrices(int rounds, std::uint32_t* sink, long long* clocks) {
    extern __shared__ __align__(1024) char memory[];
    for (unsigned i = threadIdx.x; i < 65536 / 4; i += blockDim.x)
        reinterpret_cast<std::uint32_t*>(memory)[i] = random_pair(i);
    const std::uint32_t address = ptx::shared_address(memory) + threadIdx.x * 16;
    std::uint32_t any = 0;
    BlockClock clock(clocks);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            std::uint32_t got[4];
            ptx::ldmatrix_x4(got, address + i * 16384);
            any |= got[0];
        }
    }
    clock.stop();
    if (any == 1) *sink = any;
}

}  // namespace

std::vector<Figure> warp_figures(const Chip& chip) {
    std::vector<Figure> figures;
    const Buffer<float> sink(1);
    for (const int warps : {4, 8, 16}) {
        const int rounds = 4'000'000 / (warps * 32);
        Figure figure{.name = "mma.sync m16n8k16",
                      .variant = std::to_string(warps) + " warps",
                      .resource = "tensor",
                      .unit = "FLOP",
                      .work = 2.0 * 16 * 8 * 16 * 4 * kAccumulators * rounds * warps * chip.multiprocessors,
                      .nominal = 4096,
                      .threads = 32 * warps};
        figures.push_back(timed(figure, chip.multiprocessors, [&](long long* clocks) {
            launch(multiply, chip.multiprocessors, 32 * warps, 0, rounds, sink.data(), clocks);
        }));
    }
    constexpr int kRounds = 8000, kThreads = 1024;
    Figure figure{.name = "shared memory, read by ldmatrix",
                  .resource = "shared",
                  .unit = "B",
                  .work = 4.0 * 16 * kThreads * kRounds * chip.multiprocessors,
                  .nominal = 128,
                  .threads = kThreads};
    figures.push_back(timed(figure, chip.multiprocessors, [&](long long* clocks) {
        launch(load_matrices, chip.multiprocessors, kThreads, 65536, kRounds,
               reinterpret_cast<std::uint32_t*>(sink.data()), clocks);
    }));
    return figures;
}

}  // namespace tessera::micro
