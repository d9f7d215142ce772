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
__global__ void fill(T* data, std::size_t count, std::uint64_t which) {
    const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
    for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
        data[i] = static_cast<T>(element(i, which));
    }
}

/// How many elements are NaN: rows that nobody has written still hold the poison.
template <class T>
__global__ void count_nan(const T* data, std::size_t count, unsigned long long* found) {
    const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
    unsigned long long mine = 0;
    for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
        mine += __hisnan(data[i]);
    }
    if (mine > 0) atomicAdd(found, mine);
}

/// As plans_of(), without the kernels that would keep the scores of all pairs: they refuse for lack of memory.
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
