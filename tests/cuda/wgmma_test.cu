// SPDX-License-Identifier: Apache-2.0
//
// wgmma, its matrix descriptors and its accumulators. GEMMs of small integers have one right result.
#include "cuda/on_device.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/swizzle_panel.cuh"

namespace tessera::cuda::test::wgmma {
namespace {

constexpr int kRows = 64;
constexpr int kDepth = 128;  // two panels of the inner dimension
constexpr int kSteps = kDepth / 16;

/// Copies a row-major matrix [rows][columns] into panels of 64 columns.
template <class T>
__device__ void fill_panels(char* panels, const T* matrix, int rows, int columns) {
    for (int i = static_cast<int>(threadIdx.x); i < rows * columns; i += static_cast<int>(blockDim.x)) {
        const int row = i / columns;
        const int column = i % columns;
        char* panel = panels + column / kPanelColumns * rows * kPanelRowBytes;
        *reinterpret_cast<T*>(panel + swizzled(row, column % kPanelColumns / 8) + column % 8 * 2) = matrix[i];
    }
}

/// D = A B^T (+ `before`), a: [64][128], b: [kN][128]; d: [128 threads][kN / 2].
template <class T, int kN>
__global__ void product_ss(const T* a, const T* b, float* d, float before, bool accumulate) {
    extern __shared__ __align__(1024) char memory[];
    char* b_panels = memory + kRows * kDepth * 2;
    fill_panels(memory, a, kRows, kDepth);
    fill_panels(b_panels, b, kN, kDepth);
    ptx::fence_proxy_async();
    __syncthreads();
    float sum[kN / 2];
    for (float& s : sum) s = before;
    ptx::warpgroup_fence_operand(sum);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const int panel = step / 4;
        const int in_panel = step % 4 * kStepColumns;
        ptx::wgmma_ss<kN, T>(sum, row_descriptor(memory + panel * kRows * kPanelRowBytes) + in_panel,
                             row_descriptor(b_panels + panel * kN * kPanelRowBytes) + in_panel, accumulate || step > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(sum);
    for (int i = 0; i < kN / 2; ++i) d[static_cast<int>(threadIdx.x) * (kN / 2) + i] = sum[i];
}

/// D = A B (+ `before`), A in registers; a: [64][128], b: [128][kN]. kRowsOfB: b is B^T, [kN][128].
template <class T, int kN, bool kRowsOfB>
__global__ void product_rs(const T* a, const T* b, float* d, float before, bool accumulate) {
    extern __shared__ __align__(1024) char memory[];
    fill_panels(memory, b, kRowsOfB ? kN : kDepth, kRowsOfB ? kDepth : kN);
    ptx::fence_proxy_async();
    __syncthreads();
    const int thread = static_cast<int>(threadIdx.x);
    const int row = thread / 32 * 16 + thread % 32 / 4;
    std::uint32_t operand[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = 16 * step + 8 * (i / 2) + thread % 4 * 2;
            operand[step][i] = *reinterpret_cast<const std::uint32_t*>(a + (row + 8 * (i % 2)) * kDepth + column);
        }
    }
    float sum[kN / 2];
    for (float& s : sum) s = before;
    ptx::warpgroup_fence_operand(sum);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const bool adds = accumulate || step > 0;
        if constexpr (kRowsOfB) {
            const auto panel = row_descriptor(memory + step / 4 * kN * kPanelRowBytes);
            ptx::wgmma_rs_rows<kN, T>(sum, operand[step], panel + step % 4 * kStepColumns, adds);
        } else {
            ptx::wgmma_rs<kN, T>(sum, operand[step], column_descriptor(memory, kDepth) + step * kStepRows, adds);
        }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(sum);
    for (int i = 0; i < kN / 2; ++i) d[thread * (kN / 2) + i] = sum[i];
}

/// D = A B (+ `before`), both in shared memory; a: [64][128], b: [128][kN].
template <class T, int kN>
__global__ void product_ss_columns(const T* a, const T* b, float* d, float before, bool accumulate) {
    extern __shared__ __align__(1024) char memory[];
    char* b_panels = memory + kRows * kDepth * 2;
    fill_panels(memory, a, kRows, kDepth);
    fill_panels(b_panels, b, kDepth, kN);
    ptx::fence_proxy_async();
    __syncthreads();
    float sum[kN / 2];
    for (float& s : sum) s = before;
    ptx::warpgroup_fence_operand(sum);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        ptx::wgmma_ss_columns<kN, T>(
            sum, row_descriptor(memory + step / 4 * kRows * kPanelRowBytes) + step % 4 * kStepColumns,
            column_descriptor(b_panels, kDepth) + step * kStepRows, accumulate || step > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(sum);
    for (int i = 0; i < kN / 2; ++i) d[static_cast<int>(threadIdx.x) * (kN / 2) + i] = sum[i];
}

/// Row and column in D of a thread's accumulator `index` (ptx/wgmma.cuh).
int row_of(int thread, int index) { return 16 * (thread / 32) + thread % 32 / 4 + 8 * (index / 2 % 2); }
int column_of(int thread, int index) { return 8 * (index / 4) + 2 * (thread % 4) + index % 2; }

/// `b_of(n, k)`: element of B.
template <class T, class ElementOfB>
void expect_product(const std::vector<float>& d, const std::vector<T>& a, int n, double before,
                    const ElementOfB& b_of) {
    for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < n / 2; ++i) {
            const int row = row_of(thread, i);
            const int column = column_of(thread, i);
            double expected = before;
            for (int k = 0; k < kDepth; ++k) {
                expected += as_double(a[static_cast<std::size_t>(row * kDepth + k)]) * b_of(column, k);
            }
            ASSERT_EQ(d[static_cast<std::size_t>(thread * n / 2 + i)], expected)
                << "row " << row << " column " << column;
        }
    }
}

template <class T, int kN>
void expect_ss_right(bool accumulate) {
    SCOPED_TRACE("n " + std::to_string(kN));
    Mirror<T> a(small_integers<T>(kRows * kDepth, 1));
    Mirror<T> b(small_integers<T>(kN * kDepth, 2));
    Mirror<float> d(128 * kN / 2);
    const float before = accumulate ? 1000.0F : NAN;
    run_block(product_ss<T, kN>, 128, (kRows + kN) * kDepth * 2, a.device(), b.device(), d.device(), before,
              accumulate);
    expect_product(d.fetch(), a.host, kN, accumulate ? 1000 : 0,
                   [&](int n, int k) { return as_double(b.host[static_cast<std::size_t>(n * kDepth + k)]); });
}

template <class T, int kN, bool kRowsOfB>
void expect_rs_right(bool accumulate) {
    SCOPED_TRACE("n " + std::to_string(kN));
    Mirror<T> a(small_integers<T>(kRows * kDepth, 3));
    Mirror<T> b(small_integers<T>(kN * kDepth, 4));
    Mirror<float> d(128 * kN / 2);
    const float before = accumulate ? 1000.0F : NAN;
    const int panels = kRowsOfB ? kDepth / kPanelColumns : (kN + kPanelColumns - 1) / kPanelColumns;
    run_block(product_rs<T, kN, kRowsOfB>, 128, panels * (kRowsOfB ? kN : kDepth) * kPanelRowBytes, a.device(),
              b.device(), d.device(), before, accumulate);
    expect_product(d.fetch(), a.host, kN, accumulate ? 1000 : 0, [&](int n, int k) {
        return as_double(b.host[static_cast<std::size_t>(kRowsOfB ? n * kDepth + k : k * kN + n)]);
    });
}

template <class T, int kN>
void expect_ss_columns_right(bool accumulate) {
    SCOPED_TRACE("n " + std::to_string(kN));
    Mirror<T> a(small_integers<T>(kRows * kDepth, 5));
    Mirror<T> b(small_integers<T>(kN * kDepth, 6));
    Mirror<float> d(128 * kN / 2);
    const float before = accumulate ? 1000.0F : NAN;
    const int panels = (kN + kPanelColumns - 1) / kPanelColumns;
    run_block(product_ss_columns<T, kN>, 128, kRows * kDepth * 2 + panels * kDepth * kPanelRowBytes, a.device(),
              b.device(), d.device(), before, accumulate);
    expect_product(d.fetch(), a.host, kN, accumulate ? 1000 : 0,
                   [&](int n, int k) { return as_double(b.host[static_cast<std::size_t>(k * kN + n)]); });
}

template <class T, int... kN>
void expect_every_n_right(bool accumulate) {
    (expect_ss_right<T, kN>(accumulate), ...);
    (expect_rs_right<T, kN, false>(accumulate), ...);
    (expect_rs_right<T, kN, true>(accumulate), ...);
    (expect_ss_columns_right<T, kN>(accumulate), ...);
}

class Wgmma : public OnHopper {};

TEST_F(Wgmma, is_the_product_for_every_n_whatever_the_accumulators_held) {
    for_both_types([](auto t) { expect_every_n_right<decltype(t), 32, 64, 80, 96, 128, 192, 256>(false); });
}

TEST_F(Wgmma, adds_to_the_accumulators_when_it_is_told_to) {
    for_both_types([](auto t) { expect_every_n_right<decltype(t), 32, 64, 80, 96, 128, 192, 256>(true); });
}

}  // namespace
}  // namespace tessera::cuda::test::wgmma
