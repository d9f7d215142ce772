// SPDX-License-Identifier: Apache-2.0
//
// The rate of wgmma, by shape, source of A and number of warpgroups; alone, and while TMA writes shared
// memory.
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/shared/tensor_map.hpp"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/swizzle_panel.cuh"
#include "micro/measure.cuh"

namespace tessera::micro {
namespace {

using namespace tessera::cuda;

constexpr int kDepth = 128;  // columns of A: two panels
constexpr int kSteps = kDepth / 16;
constexpr int kRoundSteps = 64;          // wgmma of one round, between two waits
constexpr double kTensorNominal = 4096;  // FLOP per multiprocessor and clock, 16 bits, dense
constexpr double kClocks = 4e6;          // approximate clocks of a launch

constexpr int kBoxRows = 128;
constexpr int kBoxBytes = kBoxRows * kPanelRowBytes;
constexpr int kMaxBoxes = 4;
constexpr int kOwnRows = 1024;  // rows of each multiprocessor: 128 KiB; all together stay in L2

/// TMA copies that run beside the MMAs: `boxes` of them are in flight at any time; 0: none.
struct Copies {
    CUtensorMap map;
    int boxes;
    unsigned long long* bytes;  // copied, over all blocks
};

template <int kN, int kWarpgroups>
struct Shared {
    alignas(1024) char a[kWarpgroups][64 * kDepth * 2];
    alignas(1024) char b[kN * kDepth * 2 + 8192];  // as [kN][128], or [128][kN] in panels of 64 columns
    alignas(1024) char boxes[kMaxBoxes][kBoxBytes];
    ptx::Mbarrier full[kMaxBoxes];
    int finished;  // warpgroups
};

/// One thread keeps copies in flight until all warpgroups are done.
template <class SharedMemory>
__device__ void copy_until_finished(const Copies& copies, SharedMemory& shared, int warpgroups) {
    const auto start = [&](int box, int row) {
        ptx::mbarrier_arrive_expect(shared.full[box], kBoxBytes);
        ptx::tma_load_4d(shared.boxes[box], copies.map, 0, row, 0, 0, shared.full[box], ptx::CacheHint::evict_last);
    };
    unsigned count = 0;
    int row = 0;
    const auto next_row = [&] {
        row = (row + kBoxRows) % kOwnRows;
        return static_cast<int>(blockIdx.x) * kOwnRows + row;
    };
    for (int box = 0; box < copies.boxes; ++box) start(box, next_row());
    bool more = true;
    while (more) {
        more = *static_cast<volatile int*>(&shared.finished) < warpgroups;
        for (int box = 0; box < copies.boxes; ++box) {
            wait(shared.full[box], count & 1);
            if (more) start(box, next_row());
        }
        ++count;
    }
    atomicAdd(copies.bytes, static_cast<unsigned long long>(count) * copies.boxes * kBoxBytes);
}

template <int kN, bool kFromRegisters, int kWarpgroups, bool kCopying>
__global__ void __launch_bounds__(128 * (kWarpgroups + kCopying), 1)
    multiply(int rounds, const __grid_constant__ Copies copies, float* sink, long long* clocks) {
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<Shared<kN, kWarpgroups>*>(memory);
    const int thread = static_cast<int>(threadIdx.x);
    auto* words = reinterpret_cast<std::uint32_t*>(memory);
    for (int i = thread; i < static_cast<int>(sizeof(shared.a) + sizeof(shared.b)) / 4;
         i += static_cast<int>(blockDim.x)) {
        words[i] = random_pair(static_cast<std::uint32_t>(i));
    }
    ptx::fence_proxy_async();
    if (thread == 0) {
        for (auto& barrier : shared.full) ptx::mbarrier_init(barrier, 1);
        ptx::fence_mbarrier_init();
        shared.finished = 0;
    }
    BlockClock clock(clocks);
    const int warpgroup = thread / 128;
    if (warpgroup == kWarpgroups) {
        if (thread % 128 == 0 && copies.boxes > 0) copy_until_finished(copies, shared, kWarpgroups);
    } else {
        std::uint32_t operand[kSteps][4];
        for (int i = 0; i < 4 * kSteps; ++i)
            operand[i / 4][i % 4] = random_pair(static_cast<std::uint32_t>(thread * 32 + i));
        const std::uint64_t a = row_descriptor(shared.a[warpgroup]);
        const std::uint64_t b = kFromRegisters ? column_descriptor(shared.b, kDepth) : row_descriptor(shared.b);
        float d[kN / 2] = {};
#pragma unroll 1
        for (int round = 0; round < rounds; ++round) {
            ptx::warpgroup_fence_operand(d);
            ptx::wgmma_fence();
#pragma unroll
            for (int i = 0; i < kRoundSteps; ++i) {
                const int step = i % kSteps;
                if constexpr (kFromRegisters) {
                    ptx::wgmma_rs<kN, __nv_bfloat16>(d, operand[step], b + step * kStepRows, true);
                } else {
                    const int in_panel = step % 4 * kStepColumns;
                    ptx::wgmma_ss<kN, __nv_bfloat16>(d, a + step / 4 * (64 * kPanelRowBytes >> 4) + in_panel,
                                                     b + step / 4 * (kN * kPanelRowBytes >> 4) + in_panel, true);
                }
            }
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
        }
        ptx::warpgroup_fence_operand(d);
        float sum = 0;
        for (const float value : d) sum += value;
        if (sum == 0.123F) *sink = sum;
        if (thread % 128 == 0) atomicAdd(&shared.finished, 1);
    }
    clock.stop();
}

template <int kN, bool kFromRegisters, int kWarpgroups, bool kCopying = false>
Figure rate(const Chip& chip, Copies copies = {}) {
    const int rounds = static_cast<int>(kClocks / (kRoundSteps * kN / 2.0 * kWarpgroups));
    Figure figure{.name = kFromRegisters ? "wgmma, A in registers" : "wgmma, A in shared memory",
                  .variant = "n " + std::to_string(kN) + ", " + std::to_string(kWarpgroups) +
                             (kWarpgroups > 1 ? " warpgroups" : " warpgroup"),
                  .resource = "tensor",
                  .unit = "FLOP",
                  .work = 2.0 * 64 * kN * 16 * kRoundSteps * rounds * kWarpgroups * chip.multiprocessors,
                  .nominal = kTensorNominal,
                  .threads = 128 * kWarpgroups};
    if (kCopying) figure.variant += ", " + std::to_string(copies.boxes) + " copies";
    const Buffer<float> sink(1);
    return timed(figure, chip.multiprocessors, [&](long long* clocks) {
        launch(multiply<kN, kFromRegisters, kWarpgroups, kCopying>, chip.multiprocessors,
               128 * (kWarpgroups + kCopying), sizeof(Shared<kN, kWarpgroups>), rounds, copies, sink.data(), clocks);
    });
}

/// Adds the MMA rate beside copies, and the rate of the copies.
template <int kN, bool kFromRegisters, int kWarpgroups>
void add_beside_copies(std::vector<Figure>& figures, const Chip& chip, int boxes) {
    const int source_rows = kOwnRows * chip.multiprocessors;
    const Buffer<char> source(static_cast<std::size_t>(source_rows) * kPanelRowBytes);
    cuda::check(cudaMemset(source.data(), 0x3F, source.bytes()), "cudaMemset");
    const Buffer<unsigned long long> bytes(1);
    cuda::check(cudaMemset(bytes.data(), 0, bytes.bytes()), "cudaMemset");
    const RowsShape shape{1, source_rows, 1, kPanelColumns};
    const Rows rows{.data = source.data(), .row = kPanelColumns, .head = kPanelColumns, .column = 1};
    const Copies copies{tensor_map(rows, shape, DType::bf16, kBoxRows), boxes, bytes.data()};
    Figure products = rate<kN, kFromRegisters, kWarpgroups, true>(chip, copies);
    unsigned long long copied = 0;
    cuda::check(cudaMemcpy(&copied, bytes.data(), sizeof(copied), cudaMemcpyDeviceToHost), "cudaMemcpy");
    Figure brought = products;
    brought.name = "copies beside it";
    brought.resource = "shared";
    brought.unit = "B";
    brought.work = static_cast<double>(copied) / 8;  // one launch before the timed seven
    brought.nominal = 128;
    figures.push_back(products);
    figures.push_back(brought);
}

template <bool kFromRegisters, int kN>
void add_shape(std::vector<Figure>& figures, const Chip& chip) {
    figures.push_back(rate<kN, kFromRegisters, 1>(chip));
    figures.push_back(rate<kN, kFromRegisters, 2>(chip));
    // Three warpgroups have 168 registers a thread: too few for 128 accumulators and A.
    if constexpr (!(kFromRegisters && kN == 256)) figures.push_back(rate<kN, kFromRegisters, 3>(chip));
}

template <bool kFromRegisters, int... kN>
void add_shapes(std::vector<Figure>& figures, const Chip& chip) {
    (add_shape<kFromRegisters, kN>(figures, chip), ...);
}

}  // namespace

std::vector<Figure> wgmma_figures(const Chip& chip) {
    std::vector<Figure> figures;
    add_shapes<false, 64, 80, 96, 128, 192, 256>(figures, chip);
    add_shapes<true, 64, 128, 192, 256>(figures, chip);
    for (const int boxes : {1, 2, 4}) {
        add_beside_copies<128, false, 2>(figures, chip, boxes);
        add_beside_copies<128, true, 2>(figures, chip, boxes);
    }
    add_beside_copies<64, false, 2>(figures, chip, 4);
    add_beside_copies<64, true, 3>(figures, chip, 4);
    add_beside_copies<256, false, 2>(figures, chip, 4);
    add_beside_copies<128, false, 3>(figures, chip, 4);
    return figures;
}

}  // namespace tessera::micro
