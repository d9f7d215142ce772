// SPDX-License-Identifier: Apache-2.0
//
// The GEMM with a matrix of weights, [batch, columns] x [rows, columns]^T, by mma.m16n8k16 with 8 rows of weights as B.
// A CTA computes units of 8 rows. Their columns are divided among the consumer warps in chunks of 32: chunk c belongs
// to warp c % warps. A warp adds its chunks in order, in two sums, and the sums of the warps are added in order. So the
// order depends on the number of columns and on the kernel's number of warps alone, and a unit is done soon after its
// last bytes have come.
#pragma once

#include "cuda/block/shared.cuh"

namespace tessera::cuda::block {

/// Loads the weights of the CTA's units, by a producer warp. A stage has some columns of the eight rows of a unit.
template <class Shape>
__device__ __forceinline__ void load_units(const Block<Shape>& block, const Matrix& matrix, BlockPipelineState& at) {
    constexpr Config kConfig = Shape::kConfig;
    constexpr int kBytes = 32 * 16;                               // of a row, by one instruction
    constexpr int kParts = kConfig.stage_columns() * 2 / kBytes;  // of a row of a stage
    const int units = matrix.rows / Config::kUnitRows, own = block.lane * 16;
    for (int unit = static_cast<int>(blockIdx.x); unit < units; unit += static_cast<int>(gridDim.x)) {
        const char* from = matrix.data + unit * Config::kUnitRows * matrix.row_bytes + own;
        for (int first = 0; first < matrix.columns; first += kConfig.stage_columns(), block.next(at)) {
            const int bytes = min(matrix.columns - first, kConfig.stage_columns()) * 2 - own;
            const std::uint32_t to = ptx::shared_address(block.stage(at)) + own;
            block.producer_acquire(at);
#pragma unroll
            for (int row = 0; row < Config::kUnitRows; ++row) {
#pragma unroll
                for (int part = 0; part < kParts; ++part)
                    ptx::cp_async_16_if(part * kBytes < bytes, to + row * kConfig.stage_row_bytes() + part * kBytes,
                                        from + row * matrix.row_bytes + first * 2 + part * kBytes,
                                        ptx::CacheHint::evict_first);
            }
            ptx::cp_async_mbarrier_arrive(block.shared.full[at.index]);
        }
    }
}

/// Waits for the loads of this warp, which must not exit earlier.
__device__ __forceinline__ void finish_loads() {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
}

/// The number of stages that the CTA's units take.
template <class Shape>
__device__ __forceinline__ int stages_of_units(const Matrix& matrix) {
    constexpr int kColumns = Shape::kConfig.stage_columns();
    const int units = matrix.rows / Config::kUnitRows, ctas = static_cast<int>(gridDim.x);
    return (units - static_cast<int>(blockIdx.x) + ctas - 1) / ctas * ((matrix.columns + kColumns - 1) / kColumns);
}

/// Multiplies the CTA's units with the rows in shared memory, by all consumer warps. `finish` is the epilogue:
/// finish.begin(row, column) prefetches what finish.end(row, column, sums) needs for results `column` and `column` + 1.
template <class Shape, class Finish>
__device__ __forceinline__ void multiply_units(const Block<Shape>& block, const Matrix& matrix, BlockPipelineState& at,
                                               Finish& finish) {
    constexpr Config kConfig = Shape::kConfig;
    constexpr int kWarps = kConfig.warps, kChunks = kConfig.stage_columns() / Config::kChunk;
    constexpr int kChunksOfWarp = (kChunks + kWarps - 1) / kWarps;
    const int lane = block.lane, warp = block.warp;
    const int units = matrix.rows / Config::kUnitRows;
    // Lane l has the address of row l % 8, columns 8 * (l / 8) on, of a chunk. Rows of x past the last are the last.
    const std::uint32_t own_x = ptx::shared_address(block.rows()) +
                                min(lane % 8, block.launch.batch - 1) * row_bytes(matrix.columns) + lane / 8 * 16;
    const int own_weights = lane % 8 * kConfig.stage_row_bytes() + lane / 8 * 16;
    const int row = lane / 4;
    int number = 0;
    for (int unit = static_cast<int>(blockIdx.x); unit < units; unit += static_cast<int>(gridDim.x), ++number) {
        const int column = unit * Config::kUnitRows + lane % 4 * 2;
        const bool runs_epilogue = warp == number % kWarps && row < block.launch.batch;
        if (runs_epilogue) finish.begin(row, column);
        float sums[2][4] = {};
        int begin = warp;  // the warp's first chunk of the stage
        for (int first = 0; first < matrix.columns; first += kConfig.stage_columns()) {
            const int chunks = min(matrix.columns - first, kConfig.stage_columns()) / Config::kChunk;
            block.consumer_wait(at);
            const std::uint32_t weights = ptx::shared_address(block.stage(at)) + own_weights;
#pragma unroll
            for (int i = 0; i < kChunksOfWarp; ++i) {
                const int chunk = begin + i * kWarps;
                if (chunk >= chunks) break;
                std::uint32_t x[4], w[4];
                ptx::ldmatrix_x4(w, weights + chunk * Config::kChunk * 2);
                ptx::ldmatrix_x4(x, own_x + (first + chunk * Config::kChunk) * 2);
                ptx::mma<Element>(sums[0], {x[0], 0, x[1], 0}, w[0], w[1]);
                ptx::mma<Element>(sums[1], {x[2], 0, x[3], 0}, w[2], w[3]);
            }
            block.release(at);
            begin -= kChunks % kWarps;  // chunks of all stages are counted together
            if (begin < 0) begin += kWarps;
        }
        auto& of_warps = block.shared.sums[number % 2];
        of_warps[warp][lane] = {__fadd_rn(sums[0][0], sums[1][0]), __fadd_rn(sums[0][1], sums[1][1])};
        block.sync_consumers();
        if (!runs_epilogue) continue;
        float2 sum = of_warps[0][lane];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) {
            const float2 part = of_warps[w][lane];
            sum = {__fadd_rn(sum.x, part.x), __fadd_rn(sum.y, part.y)};
        }
        finish.end(row, column, sum);
    }
}

/// The bias of two neighbouring results; 0 without one.
struct Biases {
    float first = 0, second = 0;

    __device__ __forceinline__ void read(const Matrix& matrix, int column) {
        if (matrix.bias == nullptr) return;
        const auto* from = reinterpret_cast<const Element*>(matrix.bias) + column * matrix.bias_step;
        first = __bfloat162float(from[0]);
        second = __bfloat162float(from[matrix.bias_step]);
    }
    __device__ __forceinline__ float2 added(const Matrix& matrix, const float2& sum) const {
        if (matrix.bias == nullptr) return sum;
        return {__fadd_rn(sum.x, first), __fadd_rn(sum.y, second)};
    }
};

/// Epilogue of the output GEMM: bias and residual are added in fp32, then rounded once.
struct FinishOutput {
    const Launch& launch;
    Biases biases{};
    std::uint32_t residual = 0;  ///< two numbers

    __device__ __forceinline__ void begin(int row, int column) {
        biases.read(launch.output, column);
        residual = *reinterpret_cast<const std::uint32_t*>(launch.residual.data + row * launch.residual.row_bytes +
                                                           column * 2);
    }
    __device__ __forceinline__ void end(int row, int column, const float2& dot_products) const {
        const float2 sum = biases.added(launch.output, dot_products);
        *reinterpret_cast<std::uint32_t*>(launch.result.data + row * launch.result.row_bytes + column * 2) =
            ptx::pack<Element>(__fadd_rn(sum.x, ptx::unpack<Element>(residual, 0)),
                               __fadd_rn(sum.y, ptx::unpack<Element>(residual, 1)));
    }
};

}  // namespace tessera::cuda::block
