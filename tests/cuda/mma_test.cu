// SPDX-License-Identifier: Apache-2.0
//
// The instructions of one warp: mma.m16n8k16, ldmatrix, cp.async.
#include "cuda/on_device.cuh"
#include "cuda/ptx/mma.cuh"

namespace tessera::cuda::test {
namespace {

/// D = A B^T + 1000: a: [16][16], b: [8][16] (n, k), d: [32 lanes][4].
template <class T>
__global__ void product(const T* a, const T* b, float* d) {
    const int lane = static_cast<int>(threadIdx.x);
    const int row = lane / 4;
    const int k = lane % 4 * 2;
    const auto pair = [](const T* at) { return *reinterpret_cast<const std::uint32_t*>(at); };
    const std::uint32_t operand[4] = {pair(a + row * 16 + k), pair(a + (row + 8) * 16 + k), pair(a + row * 16 + k + 8),
                                      pair(a + (row + 8) * 16 + k + 8)};
    float sum[4] = {1000, 1000, 1000, 1000};
    ptx::mma<T>(sum, operand, pair(b + row * 16 + k), pair(b + row * 16 + k + 8));
    for (int i = 0; i < 4; ++i) d[lane * 4 + i] = sum[i];
}

/// Four 8 x 8 matrices of the numbers 0, 1, 2 ...: [32][8]; out: [32 lanes][4].
template <bool kTransposed>
__global__ void load_matrices(std::uint32_t* out) {
    __shared__ __align__(16) std::uint16_t matrices[32 * 8];
    const int lane = static_cast<int>(threadIdx.x);
    for (int i = 0; i < 8; ++i) matrices[lane * 8 + i] = static_cast<std::uint16_t>(lane * 8 + i);
    __syncwarp();
    std::uint32_t got[4];
    if constexpr (kTransposed) ptx::ldmatrix_x4_trans(got, ptx::shared_address(matrices + lane * 8));
    else ptx::ldmatrix_x4(got, ptx::shared_address(matrices + lane * 8));
    for (int m = 0; m < 4; ++m) out[lane * 4 + m] = got[m];
}

/// Each thread copies one chunk in each of two groups; every third is not valid. Reads the chunks after each wait.
__global__ void copy(const uint4* from, uint4* first, uint4* second) {
    __shared__ uint4 to[2][128];
    const int thread = static_cast<int>(threadIdx.x);
    for (auto& half : to) half[thread] = make_uint4(~0U, ~0U, ~0U, ~0U);
    const bool valid = thread % 3 != 0;
    for (int group = 0; group < 2; ++group) {
        const void* source = valid ? static_cast<const void*>(from + 128 * group + thread) : nullptr;  // never read
        ptx::cp_async_16(ptx::shared_address(&to[group][thread]), source, valid);
        ptx::cp_async_commit();
    }
    ptx::cp_async_wait<1>();
    first[thread] = to[0][thread];
    ptx::cp_async_wait<0>();
    second[thread] = to[1][thread];
}

class Mma : public OnHopper {};

TEST_F(Mma, is_the_product_in_the_layout_that_its_comment_gives) {
    for_both_types([](auto t) {
        using T = decltype(t);
        const Mirror<T> a(small_integers<T>(16 * 16, 5));
        const Mirror<T> b(small_integers<T>(8 * 16, 6));
        Mirror<float> d(32 * 4);
        run_block(product<T>, 32, 0, static_cast<const T*>(a.device()), static_cast<const T*>(b.device()), d.device());
        d.fetch();
        for (std::size_t i = 0; i < d.host.size(); ++i) {
            const std::size_t row = i / 4 / 4 + i % 4 / 2 * 8;
            const std::size_t column = i / 4 % 4 * 2 + i % 2;
            double expected = 1000;
            for (std::size_t k = 0; k < 16; ++k) {
                expected += as_double(a.host[row * 16 + k]) * as_double(b.host[column * 16 + k]);
            }
            EXPECT_EQ(d.host[i], expected) << "row " << row << " column " << column;
        }
    });
}

TEST_F(Mma, ldmatrix_gives_lane_l_row_l_over_4_and_columns_from_twice_l_mod_4) {
    Mirror<std::uint32_t> out(32 * 4);
    run_block(load_matrices<false>, 32, 0, out.device());
    out.fetch();
    for (std::uint32_t i = 0; i < 128; ++i) {
        const std::uint32_t first = i % 4 * 64 + i / 4 / 4 * 8 + i / 4 % 4 * 2;
        EXPECT_EQ(out.host[i], first | (first + 1) << 16) << "lane " << i / 4;
    }
}

TEST_F(Mma, ldmatrix_trans_gives_the_same_of_each_matrix_transposed) {
    Mirror<std::uint32_t> out(32 * 4);
    run_block(load_matrices<true>, 32, 0, out.device());
    out.fetch();
    for (std::uint32_t i = 0; i < 128; ++i) {
        const std::uint32_t first = i % 4 * 64 + i / 4 % 4 * 2 * 8 + i / 4 / 4;  // rows are columns
        EXPECT_EQ(out.host[i], first | (first + 8) << 16) << "lane " << i / 4;
    }
}

TEST_F(Mma, cp_async_copies_what_is_valid_and_writes_zeros_for_what_is_not) {
    std::vector<uint4> numbers(256);
    for (std::uint32_t i = 0; i < 256; ++i) numbers[i] = make_uint4(4 * i + 1, 4 * i + 2, 4 * i + 3, 4 * i + 4);
    const Mirror<uint4> from(numbers);
    Mirror<uint4> first(128);
    Mirror<uint4> second(128);
    run_block(copy, 128, 0, static_cast<const uint4*>(from.device()), first.device(), second.device());
    first.fetch();
    second.fetch();
    for (std::uint32_t i = 0; i < 128; ++i) {
        for (const auto& [got, base] : {std::pair{first.host[i], 4 * i}, std::pair{second.host[i], 4 * (128 + i)}}) {
            EXPECT_EQ(got.x, i % 3 == 0 ? 0 : base + 1);
            EXPECT_EQ(got.y, i % 3 == 0 ? 0 : base + 2);
            EXPECT_EQ(got.z, i % 3 == 0 ? 0 : base + 3);
            EXPECT_EQ(got.w, i % 3 == 0 ? 0 : base + 4);
        }
    }
}

}  // namespace
}  // namespace tessera::cuda::test
