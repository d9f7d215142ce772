// SPDX-License-Identifier: Apache-2.0
//
// Throughput of TMA alone, from L2 to shared memory, and of stores to shared memory.
#include "cuda/ptx/tma.cuh"
#include "cuda/shared/tensor_map.hpp"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/swizzle_panel.cuh"
#include "micro/measure.cuh"

namespace tessera::micro {
namespace {

using namespace tessera::cuda;

constexpr int kBoxRows = 128;
constexpr int kBoxBytes = kBoxRows * kPanelRowBytes;
constexpr int kMaxBoxes = 8;
constexpr int kOwnRows = 1024;  // rows of each multiprocessor: 128 KiB; all together stay in L2

/// Copies boxes in a loop. Block b begins at row b * `begin_step` and wraps around after `period` rows.
__global__ void copy_boxes(const __grid_constant__ CUtensorMap map, int boxes, int rounds, int begin_step, int period,
                           long long* clocks) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ ptx::Mbarrier full[kMaxBoxes];
    if (threadIdx.x == 0) {
        for (auto& barrier : full) ptx::mbarrier_init(barrier, 1);
        ptx::fence_mbarrier_init();
    }
    BlockClock clock(clocks);
    if (threadIdx.x == 0) {
        const int begin = static_cast<int>(blockIdx.x) * begin_step;
        int row = 0;
        for (int round = 0; round <= rounds; ++round) {
            for (int box = 0; box < boxes; ++box, row += kBoxRows) {
                if (round > 0) wait(full[box], (round - 1) & 1);
                if (round == rounds) continue;
                ptx::mbarrier_arrive_expect(full[box], kBoxBytes);
                ptx::tma_load_4d(memory + box * kBoxBytes, map, 0, begin + row % period, 0, 0, full[box],
                                 ptx::CacheHint::evict_last);
            }
        }
    }
    clock.stop();
}

__global__ void store_matrices(int rounds, long long* clocks) {
    extern __shared__ __align__(1024) char memory[];
    const std::uint32_t address = ptx::shared_address(memory) + threadIdx.x * 16;
    const std::uint32_t value = random_pair(threadIdx.x);
    BlockClock clock(clocks);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::stmatrix_x4(address + i * 16384, value, ~value, value + 1, value + 2);
    }
    clock.stop();
}

}  // namespace

std::vector<Figure> copy_figures(const Chip& chip) {
    std::vector<Figure> figures;
    const int source_rows = kOwnRows * chip.multiprocessors;
    const Buffer<char> source(static_cast<std::size_t>(source_rows) * kPanelRowBytes);
    cuda::check(cudaMemset(source.data(), 0x3F, source.bytes()), "cudaMemset");
    const RowsShape shape{1, source_rows, 1, kPanelColumns};
    const Rows rows{.data = source.data(), .row = kPanelColumns, .head = kPanelColumns, .column = 1};
    const CUtensorMap map = tensor_map(rows, shape, DType::bf16, kBoxRows);
    for (const bool own : {true, false}) {
        for (const int boxes : {1, 2, 4, 8}) {
            const int rounds = 4000 / boxes;
            Figure figure{.name = "TMA, L2 to shared memory",
                          .variant = std::to_string(boxes) + (own ? " x 16 KiB, own" : " x 16 KiB, same for all"),
                          .resource = "shared",
                          .unit = "B",
                          .work = 1.0 * kBoxBytes * boxes * rounds * chip.multiprocessors,
                          .nominal = 128,
                          .threads = 32};
            figures.push_back(timed(figure, chip.multiprocessors, [&](long long* clocks) {
                launch(copy_boxes, chip.multiprocessors, 32, kMaxBoxes * kBoxBytes, map, boxes, rounds,
                       own ? kOwnRows : 0, kOwnRows, clocks);
            }));
        }
    }
    constexpr int kRounds = 8000, kThreads = 1024;
    Figure figure{.name = "shared memory, written by stmatrix",
                  .resource = "shared",
                  .unit = "B",
                  .work = 4.0 * 16 * kThreads * kRounds * chip.multiprocessors,
                  .nominal = 128,
                  .threads = kThreads};
    figures.push_back(timed(figure, chip.multiprocessors, [&](long long* clocks) {
        launch(store_matrices, chip.multiprocessors, kThreads, 4 * 16384, kRounds, clocks);
    }));
    return figures;
}

}  // namespace tessera::micro
