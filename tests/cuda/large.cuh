// SPDX-License-Identifier: Apache-2.0
//
// Tensors of more than 2^31 elements. They exist on the device only; every element is a function of its index, so that
// the rows that are checked can be computed anywhere.
#pragma once

#include "cuda/stress.cuh"

namespace tessera::cuda::test {

inline constexpr std::int64_t kPast31Bits = std::int64_t{1} << 31;

/// Element `index` of tensor `which`: in (-1, 1), 8 bits of mantissa, so exact in bf16 and fp16.
__host__ __device__ inline float element(std::uint64_t index, std::uint64_t which) {
    std::uint64_t h = (index + which * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9;
    h = (h ^ (h >> 31)) * 0x94D049BB133111EB;
    return static_cast<float>(static_cast<int>(h >> 56) - 128) * (1.0F / 128);
}

template <class T>
__global__ void fill_kernel(T* data, std::size_t count, std::uint64_t which) {
    const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
    for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
        data[i] = static_cast<T>(element(i, which));
    }
}

/// Counts the elements that are NaN: rows that were not written still hold the poison.
template <class T>
__global__ void count_nan(const T* data, std::size_t count, unsigned long long* found) {
    const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
    unsigned long long mine = 0;
    for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
        mine += __hisnan(data[i]);
    }
    if (mine > 0) atomicAdd(found, mine);
}

/// Fills a tensor that lies in all of `memory`.
template <class T>
void fill(const Memory& memory, std::uint64_t which) {
    fill_kernel<<<4096, 256>>>(static_cast<T*>(memory.data()), memory.bytes() / sizeof(T), which);
}

/// Has every element of a tensor been written that was poisoned with bytes of 0xFF?
template <class T>
void expect_written(const Memory& memory) {
    const Mirror<unsigned long long> found(1);
    count_nan<<<4096, 256>>>(static_cast<const T*>(memory.data()), memory.bytes() / sizeof(T), found.device());
    unsigned long long count = 0;
    const cudaError_t status = cudaMemcpy(&count, found.device(), sizeof(count), cudaMemcpyDeviceToHost);
    ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
    EXPECT_EQ(count, 0U) << "elements were not written";
}

/// Bytes of `rows` rows of `heads` heads of `row_bytes` each.
inline std::size_t bytes_of(std::int64_t rows, std::int64_t heads, std::int64_t row_bytes) {
    return static_cast<std::size_t>(rows * heads * row_bytes);
}

/// A tensor [rows][heads][dim] of a Problem in memory: of the queries or of the keys, dense or ragged.
inline TensorView large_view(const Problem& p, const Memory& memory, bool of_queries, std::int64_t dim, DType dtype) {
    const std::int64_t heads = of_queries ? p.heads_q : p.heads_kv;
    if (p.ragged) return dense_view(memory.data(), dtype, {of_queries ? p.total_q : p.total_kv, heads, dim}, kDevice);
    return dense_view(memory.data(), dtype, {p.batch, of_queries ? p.len_q : p.len_kv, heads, dim}, kDevice);
}

inline TensorView large_lse_view(const Problem& p, const Memory& memory) {
    if (p.ragged) return dense_view(memory.data(), DType::fp32, {p.heads_q, p.total_q}, kDevice);
    return dense_view(memory.data(), DType::fp32, {p.batch, p.heads_q, p.len_q}, kDevice);
}

/// plans_of() without the kernels that would store the scores of all pairs, which refuse for lack of memory.
inline std::vector<Plan> plans_without_scores(const Problem& problem, Pass pass = Pass::forward) {
    std::vector<Plan> plans;
    for (const KernelInfo& kernel : kernels()) {
        if (kernel.backend != Backend::cuda || kernel.pass != pass || kernel.schedule == Schedule::standard) continue;
        check::Ran refused;
        if (auto how = check::detail::plan_for(problem, kernel, {}, refused)) plans.push_back(*how);
    }
    return plans;
}

}  // namespace tessera::cuda::test
