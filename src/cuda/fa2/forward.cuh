// SPDX-License-Identifier: Apache-2.0
//
// FlashAttention-2 (Dao, 2023), algorithm 1: a CTA owns a query tile and goes over the key tiles that it sees. O, the
// maximum m and the sum l stay in registers until the end. The next tile of K and V is copied while this tile's GEMMs
// run.
#pragma once

#include <new>

#include "cuda/fa2/mainloop.cuh"
#include "cuda/shared/start.cuh"
#include "cuda/tile/output.cuh"
#include "cuda/tile/residual.cuh"
#include "cuda/tile/sink.cuh"

namespace tessera::cuda::fa2 {

template <class T, Config kConfig>
__device__ __forceinline__ void write_lse(const Launch& launch, const Work& work, const Accumulators<T, kConfig>& out,
                                          const Scale& scale) {
    const Rows& lse = launch.params.lse;
    const Position position = Position::of_thread<kConfig>();
    if (lse.data == nullptr || position.column() != 0) return;
    char* to = lse.data + head_offset(lse, work.batch, work.sequence.first_q, work.head, sizeof(float));
#pragma unroll
    for (int m = 0; m < kConfig.row_tiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = work.q_begin + position.row() + 16 * m + 8 * r;
            if (row >= work.sequence.len_q) continue;
            const float of_keys = out.rows(m).lse(r, scale);
            *reinterpret_cast<float*>(to + row * lse.row * std::int64_t{sizeof(float)}) =
                with_sink_of(launch.params, work.head, of_keys).lse;
        }
    }
}

/// Writes a warp's rows of O, normalised, through the shared memory of Q. Only this warp has read the rows of Q there.
template <class T, Config kConfig>
__device__ __forceinline__ void write_o(const Inputs<T, kConfig>& inputs, const Work& work,
                                        const Accumulators<T, kConfig>& out, const Scale& scale) {
    const ForwardParams& p = inputs.launch.params;
    float factor[kConfig.row_tiles][2];
#pragma unroll
    for (int m = 0; m < kConfig.row_tiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const OnlineSoftmax<T> rows = out.rows(m);
            factor[m][r] = rows.inverse_sum(r) * p.keep_scale;
            if (p.sinks != nullptr) factor[m][r] *= with_sink_of(p, work.head, rows.lse(r, scale)).factor;
        }
    }
    const Position position = Position::of_thread<kConfig>();
    if (inputs.launch.o_residual.data != nullptr) {
        const ResidualTarget target =
            residual_target(inputs.launch.o_residual, work.batch, work.sequence.first_q, work.head, work.sequence.len_q,
                            p.head_dim_v, inputs.launch.vector_residual);
#pragma unroll
        for (int m = 0; m < kConfig.row_tiles; ++m) {
            store_residual<T, kConfig.head_dim / 8>(
                target, work.q_begin + position.row() + 16 * m, position.lane,
                [&](int columns, int e) { return fmaf(out.o[m][columns][e], factor[m][e / 2], 0.0F); });
        }
    }
    stage<T, kConfig.head_dim>(inputs.shared, out.o, factor, position.first_row, position.lane);
    __syncwarp();
    const std::int64_t offset = head_offset(p.o, work.batch, work.sequence.first_q, work.head, sizeof(T));
    const Target target = target_of<T>(p.o, offset, work.sequence.len_q, p.head_dim_v, inputs.launch.vector_o);
    constexpr int kRows = kConfig.rows_per_warp();
    if (work.sanitizes) {
        restore<T, kConfig.head_dim, kRows>(inputs.shared, inputs.v(), work.band, work.q_begin, position.first_row,
                                            position.lane);
    }
    store<kConfig.head_dim, kRows>(inputs.shared, target, work.q_begin, position.first_row, position.lane);
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.blocks_per_sm)
    forward_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    extern __shared__ __align__(128) char memory[];
    // The work struct is in shared memory to save registers: only the code between two tiles needs it.
    __shared__ alignas(Work) char work_memory[sizeof(Work)];
    Work& work = *reinterpret_cast<Work*>(work_memory);
    if (threadIdx.x == 0) new (work_memory) Work(launch, blockIdx.x, kConfig.block_q(), kConfig.block_kv, sizeof(T));
    __syncthreads();
    if (work.q_begin >= work.sequence.len_q) return;

    const ForwardParams& p = launch.params;
    const Inputs<T, kConfig> inputs{launch, work, memory};
    const Position position = Position::of_thread<kConfig>();
    Mainloop<T, kConfig> mainloop{.inputs = inputs,
                                  .work = work,
                                  .scale = kConfig.general ? Scale{} : Scale{p.scale, p.scale * kLog2E},
                                  .queries = {memory, position.first_row, position.lane}};
    if (work.tiles.count() > 0) inputs.load_q();
    if constexpr (kConfig.q_in_registers) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        mainloop.queries.read_all();
    }
    Accumulators<T, kConfig> out(memory);
    for (;;) {
        mainloop.run(out);
        // Inf and NaN in hidden V are rare. Only if they reached O is the work done again without them.
        if (work.sanitizes || work.tiles.all_full() || !__syncthreads_or(out.has_nonfinite())) break;
        if (threadIdx.x == 0) work.sanitizes = true;
        out.clear();
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < kConfig.row_tiles; ++m) {
        OnlineSoftmax<T> rows = out.rows(m);
        rows.finish();
        out.set_rows(m, rows);
    }
    write_lse<T, kConfig>(launch, work, out, mainloop.scale);
    write_o<T, kConfig>(inputs, work, out, mainloop.scale);
}

template <class T, class Shape>
cudaError_t start_forward(const Launch& launch, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of config.h");
    constexpr Config kConfig = Shape::kConfig;
    return start(forward_kernel<T, Shape>, launch.blocks, kConfig.threads(), kConfig.shared_bytes(), launch, stream);
}

}  // namespace tessera::cuda::fa2
