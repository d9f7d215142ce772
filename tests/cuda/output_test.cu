// SPDX-License-Identifier: Apache-2.0
//
// O on its way from accumulators to global memory.
#include <cmath>
#include <cstring>
#include <limits>

#include "core/numeric.hpp"
#include "cuda/on_device.cuh"
#include "cuda/tile/output.cuh"

namespace tessera::cuda::test {
namespace {

constexpr int kHeadDim = 64;
constexpr int kRowTiles = 2;
constexpr int kRows = 16 * kRowTiles;

/// One warp: o [kRows][kHeadDim] times factor [kRows], rounded, to rows q_begin ... of the target.
template <class T>
__global__ void put_out(const float* o, const float* factor, Target target, int q_begin) {
    __shared__ __align__(16) char tile[kRows * kHeadDim * 2];
    const int lane = static_cast<int>(threadIdx.x);
    float held[kRowTiles][kHeadDim / 8][4];
    float factors[kRowTiles][2];
    for (int m = 0; m < kRowTiles; ++m) {
        for (int r = 0; r < 2; ++r) {
            const int row = 16 * m + 8 * r + lane / 4;
            factors[m][r] = factor[row];
            for (int n = 0; n < kHeadDim / 8; ++n) {
                for (int e = 0; e < 2; ++e) held[m][n][2 * r + e] = o[row * kHeadDim + 8 * n + lane % 4 * 2 + e];
            }
        }
    }
    stage<T, kHeadDim>(tile, held, factors, 0, lane);
    __syncwarp();
    store<kHeadDim, kRows>(tile, target, q_begin, 0, lane, [](uint4&, int, int) {});
}

/// One thread: a chunk of eight ones, to which the special values of rows [begin, end) of v are added.
template <class T>
__global__ void add_special_values(Source v, int begin, int end, T* out) {
    uint4 chunk;
    T ones[8];
    for (T& one : ones) one = T(1.0F);
    memcpy(&chunk, ones, sizeof(chunk));
    restore<T>(chunk, v, begin, end, 8);
    memcpy(out, &chunk, sizeof(chunk));
}

template <class T>
DType dtype_of() {
    return std::is_same_v<T, __half> ? DType::fp16 : DType::bf16;
}

/// Rows and columns beyond `rows` and `dim` are not to be touched; elements are `column_step` apart.
template <class T>
void expect_put_out(int rows, int dim, int column_step, int q_begin) {
    std::vector<float> o, factor;
    for (int i = 0; i < kRows * kHeadDim; ++i) o.push_back(static_cast<float>(i % 401) * 0.37F - 70);
    for (int i = 0; i < kRows; ++i) factor.push_back(1.0F / static_cast<float>(i + 1));
    o[5] = -0.0F;
    const int stride = kHeadDim * column_step + 8;
    const Mirror<float> o_device(o), factor_device(factor);
    Mirror<std::uint16_t> out(static_cast<std::size_t>((q_begin + kRows) * stride), std::uint16_t{0xABCD});
    std::vector<std::uint16_t> expected = out.host;
    for (int row = q_begin; row < std::min(q_begin + kRows, rows); ++row) {
        for (int column = 0; column < dim; ++column) {
            const int i = (row - q_begin) * kHeadDim + column;
            const float value = o[static_cast<std::size_t>(i)] * factor[static_cast<std::size_t>(row - q_begin)];
            store_from_double(&expected[static_cast<std::size_t>(row * stride + column * column_step)], dtype_of<T>(),
                              value == 0 ? 0.0 : static_cast<double>(value));  // no -0
        }
    }
    const Target target{.data = reinterpret_cast<char*>(out.device()),
                        .row_bytes = stride * 2,
                        .column_bytes = column_step * 2,
                        .rows = rows,
                        .dim = dim,
                        .vector = column_step == 1 && dim % 8 == 0};
    run_block(put_out<T>, 32, 0, static_cast<const float*>(o_device.device()),
              static_cast<const float*>(factor_device.device()), target, q_begin);
    EXPECT_EQ(out.fetch(), expected) << rows << " rows, dim " << dim << ", every " << column_step;
}

class Output : public OnHopper {};

TEST_F(Output, is_normalised_rounded_and_written_where_rows_and_columns_exist) {
    for_both_types([](auto t) {
        using T = decltype(t);
        for (const int dim : {64, 40, 8, 37, 1}) {
            for (const int column_step : {1, 2}) {
                expect_put_out<T>(100, dim, column_step, 64);
                expect_put_out<T>(75, dim, column_step, 64);
                expect_put_out<T>(1, dim, column_step, 0);
            }
        }
    });
}

TEST_F(Output, gets_back_the_nan_and_infinities_of_the_rows_that_it_sees) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    for_both_types([&](auto t) {
        using T = decltype(t);
        constexpr int kKeys = 6, kDim = 16;
        std::vector<T> v(kKeys * kDim, T(3.0F));  // what is finite is in O already
        const auto at = [&](int key, int column) -> T& { return v[static_cast<std::size_t>(key * kDim + 8 + column)]; };
        at(0, 0) = T(kInfinity);  // not seen
        at(1, 1) = T(kInfinity);
        at(2, 2) = T(-kInfinity);
        at(3, 3) = T(NAN);
        at(2, 4) = T(kInfinity);
        at(3, 4) = T(-kInfinity);
        at(4, 5) = T(NAN);  // not seen
        const Mirror<T> device(v);
        Mirror<T> out(8);
        const Source source{reinterpret_cast<const char*>(device.device()), kDim * 2, 2, kKeys, kDim, true};
        run_block(add_special_values<T>, 1, 0, source, 1, 4, out.device());
        out.fetch();
        const float got[] = {static_cast<float>(out.host[0]), static_cast<float>(out.host[1]),
                             static_cast<float>(out.host[2]), static_cast<float>(out.host[5])};
        EXPECT_EQ(got[0], 1.0F);
        EXPECT_EQ(got[1], kInfinity);
        EXPECT_EQ(got[2], -kInfinity);
        EXPECT_EQ(got[3], 1.0F);
        EXPECT_TRUE(std::isnan(static_cast<float>(out.host[3])));
        EXPECT_TRUE(std::isnan(static_cast<float>(out.host[4])));
    });
}

}  // namespace
}  // namespace tessera::cuda::test
