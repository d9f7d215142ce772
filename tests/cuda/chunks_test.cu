// SPDX-License-Identifier: Apache-2.0
//
// Tiles in shared memory for mma.sync: their layout, their loads, and the two GEMMs of a warp.
#include <cstring>
#include <set>

#include "cuda/on_device.cuh"
#include "cuda/tile/warp_gemms.cuh"

namespace tessera::cuda::test::chunks {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 32;

template <int kHeadDim>
__global__ void offsets(int* out) {  // [kRows][kHeadDim / 8]
    constexpr int kChunks = kHeadDim / kChunk;
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
        out[i] = chunk_offset<kHeadDim>(i / kChunks, i % kChunks);
    }
}

template <int kHeadDim>
__device__ std::uint16_t& element(char* tile, int row, int column) {
    return *reinterpret_cast<std::uint16_t*>(tile + chunk_offset<kHeadDim>(row, column / 8) + column % 8 * 2);
}

/// Loads rows [first_row, first_row + kRows), replaces Inf and NaN if asked to, and writes the rows out one by one.
template <class T, int kHeadDim>
__global__ void load_tile(Source source, int first_row, bool cleaning, std::uint16_t* out, int* met) {
    extern __shared__ __align__(128) char tile[];
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kHeadDim; i += kThreads) {
        element<kHeadDim>(tile, i / kHeadDim, i % kHeadDim) = 0xFFFF;
    }
    __syncthreads();
    load<kRows, kHeadDim, kThreads>(tile, source, first_row);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (cleaning && clean<T, kRows, kHeadDim, kThreads>(tile)) atomicAdd(met, 1);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kHeadDim; i += kThreads) {
        out[i] = element<kHeadDim>(tile, i / kHeadDim, i % kHeadDim);
    }
}

template <int kHeadDim, class T>
__device__ void fill_tile(char* tile, const T* matrix, int rows) {
    for (int i = static_cast<int>(threadIdx.x); i < rows * kHeadDim; i += 32) {
        *reinterpret_cast<T*>(&element<kHeadDim>(tile, i / kHeadDim, i % kHeadDim)) = matrix[i];
    }
}

/// S = Q K^T, then O = P V with a given P. q: [16 * kRowTiles][D], k, v: [8 * kTiles][D], p, s: rows x keys, o: rows x
/// D.
template <class T, int kHeadDim, int kRowTiles, int kTiles, bool kInRegisters>
__global__ void products(const T* q, const T* k, const T* v, const float* p, float* s, float* o) {
    extern __shared__ __align__(128) char memory[];
    constexpr int kQueries = 16 * kRowTiles;
    constexpr int kKeys = 8 * kTiles;
    char* k_tile = memory + kQueries * kHeadDim * 2;
    char* v_tile = k_tile + kKeys * kHeadDim * 2;
    fill_tile<kHeadDim>(memory, q, kQueries);
    fill_tile<kHeadDim>(k_tile, k, kKeys);
    fill_tile<kHeadDim>(v_tile, v, kKeys);
    __syncwarp();
    const int lane = static_cast<int>(threadIdx.x);
    Queries<kHeadDim, kRowTiles, kInRegisters> queries(memory, 0, lane);
    if constexpr (kInRegisters) queries.read_all();
    float scores[kRowTiles][kTiles][4];
    multiply_qk<T>(scores, queries, MatrixAddress<kHeadDim>::chunks_first(k_tile, lane));
    const auto at = [&](int m, int n, int e, int columns) {
        return (16 * m + lane / 4 + e / 2 * 8) * columns + 8 * n + lane % 4 * 2 + e % 2;
    };
    float sums[kRowTiles][kHeadDim / 8][4] = {};
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                s[at(m, n, e, kKeys)] = scores[m][n][e];
                scores[m][n][e] = p[at(m, n, e, kKeys)];
            }
        }
    }
    multiply_pv<T, kHeadDim>(sums, scores, MatrixAddress<kHeadDim>::rows_first(v_tile, 0, lane));
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) o[at(m, n, e, kHeadDim)] = sums[m][n][e];
        }
    }
}

template <int kHeadDim>
void expect_offsets_right() {
    constexpr int kChunks = kHeadDim / kChunk;
    Mirror<int> out(kRows * kChunks);
    run_block(offsets<kHeadDim>, kThreads, 0, out.device());
    out.fetch();
    EXPECT_EQ(std::set<int>(out.host.begin(), out.host.end()).size(), out.host.size());
    for (int i = 0; i < kRows * kChunks; ++i)
        EXPECT_EQ(out.host[static_cast<std::size_t>(i)] / (kHeadDim * 2), i / kChunks);
    for (int first = 0; first < kRows; first += 8) {
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            std::set<int> banks;  // in groups of four: 16 bytes
            for (int row = first; row < first + 8; ++row) {
                banks.insert(out.host[static_cast<std::size_t>(row * kChunks + chunk)] / 16 % 8);
            }
            EXPECT_EQ(banks.size(), 8U) << "rows from " << first << ", chunk " << chunk;
        }
    }
}

/// A source of `rows` rows and `dim` columns, every `column_step`-th element of memory.
template <class T, int kHeadDim>
void expect_load_right(int rows, int dim, int column_step, int first_row) {
    const int stride = 2 * kHeadDim * column_step;
    std::vector<std::uint16_t> numbers(static_cast<std::size_t>(rows * stride));
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<std::uint16_t>(i % 30'000 + 1);  // finite
    const Mirror<std::uint16_t> memory(numbers);
    Mirror<std::uint16_t> out(kRows * kHeadDim);
    Mirror<int> met(1);
    const Source source{.data = reinterpret_cast<const char*>(memory.device()),
                        .row_bytes = stride * 2,
                        .column_bytes = column_step * 2,
                        .rows = rows,
                        .dim = dim,
                        .vector = column_step == 1 && dim % 8 == 0};
    run_block(load_tile<T, kHeadDim>, kThreads, kRows * kHeadDim * 2, source, first_row, true, out.device(),
              met.device());
    out.fetch();
    for (int i = 0; i < kRows * kHeadDim; ++i) {
        const int row = first_row + i / kHeadDim;
        const int column = i % kHeadDim;
        const bool inside = row < rows && column < dim;
        const int expected = inside ? numbers[static_cast<std::size_t>(row * stride + column * column_step)] : 0;
        ASSERT_EQ(out.host[static_cast<std::size_t>(i)], expected) << "row " << row << " column " << column;
    }
    EXPECT_EQ(met.fetch()[0], 0);
}

template <class T>
void expect_clean_right() {
    std::vector<T> values = small_integers<T>(kRows * 64, 11);
    values[1] = T(NAN);
    values[70] = T(INFINITY);
    values[71] = T(-INFINITY);
    values[kRows * 64 - 1] = T(-NAN);
    values[5] = T(std::is_same_v<T, __half> ? 65504.0F : 3.38e38F);  // large, but a number
    const Mirror<T> memory(values);
    Mirror<std::uint16_t> out(kRows * 64);
    Mirror<int> met(1);
    const Source source{reinterpret_cast<const char*>(memory.device()), 128, 2, kRows, 64, true};
    run_block(load_tile<T, 64>, kThreads, kRows * 128, source, 0, true, out.device(), met.device());
    out.fetch();
    for (std::size_t i = 0; i < values.size(); ++i) {
        const bool special = i == 1 || i == 70 || i == 71 || i == kRows * 64 - 1;
        const T expected = special ? T(0.0F) : values[i];
        std::uint16_t bits = 0;
        std::memcpy(&bits, &expected, 2);
        ASSERT_EQ(out.host[i], bits) << "element " << i;
    }
    EXPECT_GT(met.fetch()[0], 0);
}

template <class T, int kHeadDim, int kRowTiles, int kTiles, bool kInRegisters>
void expect_products_right() {
    constexpr std::size_t kQueries = 16 * kRowTiles, kKeys = 8 * kTiles, kDim = kHeadDim;
    const Mirror<T> q(small_integers<T>(kQueries * kDim, 12)), k(small_integers<T>(kKeys * kDim, 13)),
        v(small_integers<T>(kKeys * kDim, 14));
    std::vector<float> weights;
    for (const T w : small_integers<T>(kQueries * kKeys, 15)) weights.push_back(static_cast<float>(w));
    const Mirror<float> p(weights);
    Mirror<float> s(kQueries * kKeys), o(kQueries * kDim);
    run_block(products<T, kHeadDim, kRowTiles, kTiles, kInRegisters>, 32, (kQueries + 2 * kKeys) * kDim * 2,
              static_cast<const T*>(q.device()), static_cast<const T*>(k.device()), static_cast<const T*>(v.device()),
              static_cast<const float*>(p.device()), s.device(), o.device());
    s.fetch();
    o.fetch();
    for (std::size_t i = 0; i < kQueries; ++i) {
        for (std::size_t j = 0; j < kKeys; ++j) {
            double expected = 0;
            for (std::size_t d = 0; d < kDim; ++d) {
                expected += as_double(q.host[i * kDim + d]) * as_double(k.host[j * kDim + d]);
            }
            ASSERT_EQ(s.host[i * kKeys + j], expected) << "S, query " << i << " key " << j;
        }
        for (std::size_t d = 0; d < kDim; ++d) {
            double expected = 0;
            for (std::size_t j = 0; j < kKeys; ++j) {
                expected += static_cast<double>(weights[i * kKeys + j]) * as_double(v.host[j * kDim + d]);
            }
            ASSERT_EQ(o.host[i * kDim + d], expected) << "O, query " << i << " column " << d;
        }
    }
}

class Chunks : public OnHopper {};

TEST_F(Chunks, offsets_are_a_permutation_in_which_eight_rows_of_a_chunk_meet_all_banks) {
    expect_offsets_right<64>();
    expect_offsets_right<128>();
    expect_offsets_right<256>();
}

TEST_F(Chunks, load_brings_rows_of_any_stride_with_zeros_past_the_end) {
    for (const int first_row : {0, 20}) {
        for (const auto& [dim, column_step] : {std::pair{64, 1}, {40, 1}, {8, 1}, {63, 1}, {1, 1}, {64, 3}}) {
            SCOPED_TRACE("dim " + std::to_string(dim) + ", first row " + std::to_string(first_row));
            expect_load_right<__half, 64>(45, dim, column_step, first_row);
            expect_load_right<__nv_bfloat16, 128>(45, 2 * dim, column_step, first_row);
            expect_load_right<__half, 256>(33, 4 * dim, column_step, first_row);
        }
    }
}

TEST_F(Chunks, clean_replaces_nan_and_infinities_and_nothing_else) {
    expect_clean_right<__nv_bfloat16>();
    expect_clean_right<__half>();
}

TEST_F(Chunks, the_products_of_a_warp_are_exact_for_integers) {
    for_both_types([](auto t) {
        using T = decltype(t);
        expect_products_right<T, 64, 2, 8, true>();
        expect_products_right<T, 64, 1, 8, false>();
        expect_products_right<T, 128, 2, 8, false>();
        expect_products_right<T, 128, 1, 4, true>();
        expect_products_right<T, 256, 1, 4, false>();
    });
}

}  // namespace
}  // namespace tessera::cuda::test::chunks
