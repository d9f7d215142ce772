// SPDX-License-Identifier: Apache-2.0
//
// The GEMMs of the block as separate kernels, from the code of the one launch: one runs before append() and attention,
// the other after them.
#pragma once

#include "cuda/block/gemm.cuh"
#include "cuda/block/norm.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::block {

/// Epilogue of the first GEMM: adds the bias and rounds.
struct WriteQkv {
    const Launch& launch;
    Biases biases{};

    __device__ __forceinline__ void begin(int /*row*/, int column) { biases.read(launch.qkv, column); }
    __device__ __forceinline__ void end(int row, int column, const float2& dot_products) const {
        const float2 sum = biases.added(launch.qkv, dot_products);
        *reinterpret_cast<std::uint32_t*>(launch.qkv_rows.data + row * launch.qkv_rows.row_bytes + column * 2) =
            ptx::pack<Element>(sum.x, sum.y);
    }
};

/// Writes the lengths that count the new keys.
__device__ __forceinline__ void write_lengths(const Launch& launch, int thread) {
    if (blockIdx.x != 0 || thread >= launch.batch || launch.lengths == nullptr) return;
    const std::int32_t before = launch.kv_lengths[thread * launch.kv_lengths_step];
    launch.lengths[thread] = before == INT_MAX ? before : before + 1;
}

/// Copies the rows of O into shared memory.
template <class Shape>
__device__ __forceinline__ void copy_output(const Block<Shape>& block) {
    const Launch& launch = block.launch;
    const int columns = launch.output.columns, thread = 32 * block.warp + block.lane;
    for (int row = 0; row < launch.batch; ++row) {
        for (int c = thread; c < columns / 8; c += 32 * Shape::kConfig.warps)
            *reinterpret_cast<uint4*>(block.rows() + row * row_bytes(columns) + c * 16) =
                *reinterpret_cast<const uint4*>(launch.o_rows.data + row * launch.o_rows.row_bytes + c * 16);
    }
    block.sync_consumers();
}

/// One GEMM of the chain. kFirst: the RMS norm and the GEMM with w_qkv; otherwise the GEMM with w_o.
template <class Shape, bool kFirst>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1) gemm_kernel(const __grid_constant__ Launch launch) {
    extern __shared__ __align__(1024) char memory[];
    const Block<Shape> block{launch, *reinterpret_cast<Shared<Shape>*>(memory), memory,
                             uniform(static_cast<int>(threadIdx.x / 32)), static_cast<int>(threadIdx.x % 32)};
    block.init_barriers();
    __syncthreads();
    BlockPipelineState at;
    if (block.warp >= Shape::kConfig.warps) {
        if (block.warp == Shape::kConfig.warps) load_units(block, kFirst ? launch.qkv : launch.output, at);
        finish_loads();
        return;
    }
    if constexpr (kFirst) {
        write_lengths(launch, static_cast<int>(threadIdx.x));
        norm_rows(block);
        WriteQkv finish{launch};
        multiply_units(block, launch.qkv, at, finish);
    } else {
        copy_output(block);
        FinishOutput finish{launch};
        multiply_units(block, launch.output, at, finish);
    }
}

template <class Shape>
cudaError_t start_qkv(const Launch& launch, int blocks, cudaStream_t stream) {
    return start(gemm_kernel<Shape, true>, blocks, Shape::kConfig.threads(), launch.layout.bytes, launch, stream);
}

template <class Shape>
cudaError_t start_output(const Launch& launch, int blocks, cudaStream_t stream) {
    return start(gemm_kernel<Shape, false>, blocks, Shape::kConfig.threads(), launch.layout.bytes, launch, stream);
}

}  // namespace tessera::cuda::block
