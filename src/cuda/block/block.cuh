// SPDX-License-Identifier: Apache-2.0
//
// A decode step's attention block in one persistent, cooperative launch (a megakernel). A CTA has 12 or 16 consumer
// warps and two producer warps. The producers prefetch: weights and cached keys do not depend on this launch, so they
// wait only for empty stages. The next phase's data is on its way while the consumers wait for the results of other
// CTAs.
#pragma once

#include "cuda/block/attention.cuh"
#include "cuda/block/combine.cuh"
#include "cuda/block/gemm.cuh"
#include "cuda/block/norm.cuh"

namespace tessera::cuda::block {

/// Epilogue of the first GEMM: adds the bias, rounds, and sends the results to the CTAs whose splits need the head.
struct SendQkv {
    const Launch& launch;
    unsigned number;
    Biases biases{};

    __device__ __forceinline__ void begin(int /*row*/, int column) { biases.read(launch.qkv, column); }
    __device__ __forceinline__ void end(int row, int column, const float2& dot_products) const {
        const float2 sum = biases.added(launch.qkv, dot_products);
        ptx::store_relaxed(launch.qkv_words + (std::int64_t{row} * launch.qkv.rows + column) / 2,
                           word_of(ptx::pack<Element>(sum.x, sum.y), number));
    }
};

/// Counts this launch. When the last CTA arrives, all have read the number. By one thread.
__device__ __forceinline__ void count_launch(Header& header, unsigned number) {
    if (ptx::add_acq_rel(&header.arrived, 1) != gridDim.x - 1) return;
    header.arrived = 0;
    header.launches = number;
}

template <class Shape>
__device__ __forceinline__ void load_all(const Block<Shape>& block) {
    const Launch& launch = block.launch;
    const auto mark = [&](Mark m) {
        if (block.lane == 0) record(launch, m);
    };
    BlockPipelineState at;
    const int which = block.warp - Shape::kConfig.warps;
    if (which == 0) {
        load_units(block, launch.qkv, at);
        ptx::mbarrier_arrive(block.shared.weights_asked);
        mark(Mark::loads_qkv);
        ptx::griddepcontrol_wait();
    } else {
        ptx::griddepcontrol_wait();
        const unsigned before = *static_cast<volatile unsigned*>(&launch.header->launches);
        const unsigned number = before + 1 == 0 ? 1 : before + 1;  // 0 is the number of words that were never written
        find_sequences(block);
        if (block.lane == 0) block.shared.number = number;
        ptx::mbarrier_arrive(block.shared.known);
        read_tables(block);
        ptx::mbarrier_arrive(block.shared.tables_known);
        if (block.lane == 0) count_launch(*launch.header, number);
        // The other producer has acquired all stages of the first GEMM, so this warp may skip them: its next waits are
        // for the round before.
        wait_for_phase(block.shared.weights_asked, 0, Wait::weights_asked);
        at = BlockPipelineState::after(stages_of_units<Shape>(launch.qkv), launch.layout.stages);
    }
    wait_for_phase(block.shared.known, 0, Wait::known);
    load_keys(block, at, which);
    if (which == 0) {
        mark(Mark::loads_keys);
        load_units(block, launch.output, at);
        mark(Mark::loads_output);
    }
    finish_loads();
}

template <class Shape>
__device__ __forceinline__ void compute_all(const Block<Shape>& block) {
    const Launch& launch = block.launch;
    const int thread = 32 * block.warp + block.lane;
    const auto mark = [&](Mark m) {
        if (thread == 0) record(launch, m);
    };
    ptx::griddepcontrol_wait();
    mark(Mark::inputs);
    BlockPipelineState at;
    if (static_cast<int>(blockIdx.x) < launch.qkv.rows / Config::kUnitRows) {
        norm_rows(block);
        mark(Mark::normed);
        wait_for_phase(block.shared.known, 0, Wait::known);
        SendQkv send{launch, block.shared.number};
        multiply_units(block, launch.qkv, at, send);
    }
    mark(Mark::qkv_done);
    wait_for_phase(block.shared.known, 0, Wait::known);
    wait_for_phase(block.shared.tables_known, 0, Wait::tables);
    const unsigned number = block.shared.number;
    attend(block, at, number);
    mark(Mark::attention_done);
    combine(block, number);
    mark(Mark::combined);
    gather_output(block, number);
    mark(Mark::output_ready);
    FinishOutput finish{launch};
    multiply_units(block, launch.output, at, finish);
    mark(Mark::end);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1) block_kernel(const __grid_constant__ Launch launch) {
    extern __shared__ __align__(1024) char memory[];
    const Block<Shape> block{launch, *reinterpret_cast<Shared<Shape>*>(memory), memory,
                             uniform(static_cast<int>(threadIdx.x / 32)), static_cast<int>(threadIdx.x % 32)};
    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) record(launch, Mark::start);
    block.init_barriers();
    __syncthreads();
    if (block.warp >= Shape::kConfig.warps) load_all(block);
    else compute_all(block);
}

template <class Shape>
FixedBytes fixed_bytes() {
    constexpr int kGroupBytes = static_cast<int>(sizeof(Group<Shape::kConfig.head_dim>));
    return {static_cast<int>(sizeof(Shared<Shape>)) - kGroupBytes, kGroupBytes};
}

template <class Shape>
cudaError_t start_block(const Launch& launch, int blocks, bool programmatic, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of config.h");
    const cudaError_t status =
        cudaFuncSetAttribute(block_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.layout.bytes);
    if (status != cudaSuccess) return status;
    cudaLaunchAttribute attributes[2]{};
    // A cooperative launch begins only when all of its CTAs fit on the device. So the CTAs of two launches never wait
    // for each other.
    attributes[0].id = cudaLaunchAttributeCooperative;
    attributes[0].val.cooperative = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(Shape::kConfig.threads()));
    config.dynamicSmemBytes = static_cast<std::size_t>(launch.layout.bytes);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = programmatic ? 2 : 1;
    return cudaLaunchKernelEx(&config, block_kernel<Shape>, launch);
}

}  // namespace tessera::cuda::block
