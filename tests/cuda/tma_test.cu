// SPDX-License-Identifier: Apache-2.0
//
// TMA and stmatrix. Loaded boxes have the layout of tile/swizzle_panel.cuh, with zeros outside of the tensor, and
// stores write nothing outside.
#include <set>

#include "cuda/on_device.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/shared/tensor_map.hpp"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/swizzle_panel.cuh"

namespace tessera::cuda::test {
namespace {

constexpr int kBoxRows = 24;
constexpr std::size_t kPanelBytes = kBoxRows * kPanelRowBytes;

struct Box {
    int column, row, head, batch;
};

/// A tensor [batch][len][heads][dim] whose elements are all different.
struct Numbered {
    static constexpr int kBatch = 2, kLen = 37, kHeads = 3, kDim = 72;
    static constexpr RowsShape kShape{kBatch, kLen, kHeads, kDim};
    Mirror<std::uint16_t> data{numbers()};

    static std::vector<std::uint16_t> numbers() {
        std::vector<std::uint16_t> values(std::size_t{kBatch} * kLen * kHeads * kDim);
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint16_t>(i + 1);
        return values;
    }
    CUtensorMap map() const {
        const Rows rows{.data = reinterpret_cast<char*>(data.device()),
                        .batch = kLen * kHeads * kDim,
                        .row = kHeads * kDim,
                        .head = kDim,
                        .column = 1};
        return tensor_map(rows, kShape, DType::bf16, kBoxRows);
    }
    /// Index of an element of a box, or -1 when that is outside of the tensor.
    static int index(const Box& box, int row, int column) {
        const int at_row = box.row + row;
        const int at_column = box.column + column;
        const bool inside = at_row >= 0 && at_row < kLen && at_column >= 0 && at_column < kDim && box.head >= 0 &&
                            box.head < kHeads && box.batch >= 0 && box.batch < kBatch;
        return inside ? ((box.batch * kLen + at_row) * kHeads + box.head) * kDim + at_column : -1;
    }
};

constexpr Box kBoxes[] = {{0, 0, 0, 0}, {0, 5, 2, 1}, {64, 0, 1, 0}, {0, 30, 1, 1}, {64, 30, 2, 1}};
constexpr Box kOutside[] = {{0, 40, 0, 0}, {128, 0, 0, 0}, {0, 0, 3, 0}, {0, 0, 0, 2}};
/// For loads only: a store to a negative row is an illegal instruction (seen on an H200).
constexpr Box kNegative[] = {{0, -10, 1, 0}, {-32, 3, 1, 1}};

__device__ std::uint16_t& panel_element(char* panel, int row, int column) {
    return *reinterpret_cast<std::uint16_t*>(panel + swizzled(row, column / 8) + column % 8 * 2);
}

__global__ void load_box(const __grid_constant__ CUtensorMap map, Box box, std::uint16_t* out) {
    extern __shared__ __align__(1024) char panel[];
    __shared__ ptx::Mbarrier full;
    for (int i = static_cast<int>(threadIdx.x); i < kBoxRows * 64; i += 128) {
        panel_element(panel, i / 64, i % 64) = 0xFFFF;
    }
    ptx::fence_proxy_async();
    if (threadIdx.x == 0) {
        ptx::prefetch_tensor_map(map);
        ptx::mbarrier_init(full, 1);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::mbarrier_arrive_expect(full, kPanelBytes);  // all of the box, whatever lies outside
        ptx::tma_load_4d(panel, map, box.column, box.row, box.head, box.batch, full, ptx::CacheHint::evict_first);
    }
    wait(full, 0);
    for (int i = static_cast<int>(threadIdx.x); i < kBoxRows * 64; i += 128)
        out[i] = panel_element(panel, i / 64, i % 64);
}

__global__ void store_box(const __grid_constant__ CUtensorMap map, Box box) {
    extern __shared__ __align__(1024) char panel[];
    for (int i = static_cast<int>(threadIdx.x); i < kBoxRows * 64; i += 128) {
        panel_element(panel, i / 64, i % 64) = static_cast<std::uint16_t>(0x8000 + i);
    }
    ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::tma_store_4d(panel, map, box.column, box.row, box.head, box.batch);
        ptx::tma_store_commit();
        ptx::tma_store_wait_read();  // from here on the shared memory may be used for something else
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kBoxRows * 64; i += 128)
        panel_element(panel, i / 64, i % 64) = 0xFFFF;
    __syncthreads();
    if (threadIdx.x == 0) ptx::tma_store_wait();
}

__global__ void panel_offsets(int* offsets) {  // [64 rows][8 chunks]
    for (int i = static_cast<int>(threadIdx.x); i < 64 * 8; i += 128) offsets[i] = swizzled(i / 8, i % 8);
}

/// Four 8 x 8 matrices below each other: [32][8].
__global__ void store_matrices(const std::uint32_t* registers, std::uint16_t* out) {
    __shared__ __align__(16) std::uint16_t matrices[32 * 8];
    const std::uint32_t* mine = registers + 4 * threadIdx.x;
    ptx::stmatrix_x4(ptx::shared_address(matrices + 8 * threadIdx.x), mine[0], mine[1], mine[2], mine[3]);
    __syncwarp();
    for (int i = 0; i < 8; ++i) out[8 * threadIdx.x + i] = matrices[8 * threadIdx.x + i];
}

class Tma : public OnHopper {};

void expect_loads_right(std::span<const Box> boxes) {
    const Numbered tensor;
    for (const Box& box : boxes) {
        Mirror<std::uint16_t> out(kBoxRows * 64);
        run_block(load_box, 128, kPanelBytes, tensor.map(), box, out.device());
        out.fetch();
        for (int i = 0; i < kBoxRows * 64; ++i) {
            const int index = Numbered::index(box, i / 64, i % 64);
            ASSERT_EQ(out.host[static_cast<std::size_t>(i)], index < 0 ? 0 : index + 1)
                << "box " << box.column << " " << box.row << " " << box.head << " " << box.batch << ", element " << i;
        }
    }
}

void expect_stores_right(std::span<const Box> boxes) {
    for (const Box& box : boxes) {
        SCOPED_TRACE("box " + std::to_string(box.column) + " " + std::to_string(box.row) + " " +
                     std::to_string(box.head) + " " + std::to_string(box.batch));
        Numbered tensor;
        run_block(store_box, 128, kPanelBytes, tensor.map(), box);
        if (testing::Test::HasFatalFailure()) return;
        std::vector<std::uint16_t> expected = tensor.data.host;
        for (int i = 0; i < kBoxRows * 64; ++i) {
            const int index = Numbered::index(box, i / 64, i % 64);
            if (index >= 0) expected[static_cast<std::size_t>(index)] = static_cast<std::uint16_t>(0x8000 + i);
        }
        ASSERT_EQ(tensor.data.fetch(), expected);
    }
}

TEST_F(Tma, loads_a_box_in_the_layout_of_panels_with_zeros_outside_of_the_tensor) {
    expect_loads_right(kBoxes);
    expect_loads_right(kOutside);
    expect_loads_right(kNegative);
}

TEST_F(Tma, stores_a_box_and_nothing_past_the_end_of_the_tensor) { expect_stores_right(kBoxes); }

TEST_F(Tma, stores_nothing_of_a_box_that_lies_outside) { expect_stores_right(kOutside); }

TEST_F(Tma, panel_offsets_are_a_permutation_in_which_eight_rows_of_a_chunk_meet_all_banks) {
    Mirror<int> offsets(64 * 8);
    run_block(panel_offsets, 128, 0, offsets.device());
    offsets.fetch();
    EXPECT_EQ(std::set<int>(offsets.host.begin(), offsets.host.end()).size(), 64U * 8);
    for (int chunk = 0; chunk < 8; ++chunk) {
        for (int first = 0; first < 64; first += 8) {
            std::set<int> banks;  // in groups of four: 16 bytes
            for (int row = first; row < first + 8; ++row) {
                const int offset = offsets.host[static_cast<std::size_t>(row * 8 + chunk)];
                EXPECT_EQ(offset / kPanelRowBytes, row);
                banks.insert(offset / 16 % 8);
            }
            EXPECT_EQ(banks.size(), 8U);
        }
    }
}

TEST_F(Tma, stmatrix_stores_row_lane_over_4_and_columns_from_twice_lane_mod_4) {
    std::vector<std::uint32_t> registers(32 * 4);
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
        for (std::uint32_t m = 0; m < 4; ++m) {
            const std::uint32_t first = m * 64 + lane / 4 * 8 + 2 * (lane % 4);  // numbers of the elements
            registers[lane * 4 + m] = first | (first + 1) << 16;
        }
    }
    const Mirror<std::uint32_t> in(registers);
    Mirror<std::uint16_t> out(32 * 8);
    run_block(store_matrices, 32, 0, static_cast<const std::uint32_t*>(in.device()), out.device());
    out.fetch();
    for (std::size_t i = 0; i < out.host.size(); ++i) EXPECT_EQ(out.host[i], i);
}

}  // namespace
}  // namespace tessera::cuda::test
