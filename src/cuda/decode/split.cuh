// SPDX-License-Identifier: Apache-2.0
//
// Splits of the keys of one kv head for a tile of rows: O, maximum and sum of P of each row over the keys of a split.
// Two warps load (load.cuh), four compute.
#pragma once

#include "cuda/decode/compute_mma.cuh"
#if TESSERA_DECODE_WGMMA
#include "cuda/decode/compute_wgmma.cuh"
#endif

namespace tessera::cuda::decode {

/// One split, by a consumer warp.
template <class T, class Shape>
__device__ __forceinline__ void compute_split(Shared<Shape>& shared, const Buffers<Shape>& buffers,
                                              PipelineStates<Shape>& at, const Launch& launch, const SplitWork& work,
                                              bool real, int warp, int lane) {
#if TESSERA_DECODE_WGMMA
    if constexpr (by_wgmma(Shape::kConfig.rows)) {
        compute_by_wgmma<T, Shape>(shared, buffers, at, launch, work, real, warp, lane);
        return;
    }
#endif
    if constexpr (!by_wgmma(Shape::kConfig.rows))
        compute_by_mma<T, Shape>(shared, buffers, at, launch, work, real, warp, lane);
}

/// CTAs of a multiprocessor whose registers suffice. By mma.sync, each warp has all rows.
template <class Shape>
inline constexpr int kLeastCtas = by_wgmma(Shape::kConfig.rows) || Shape::kConfig.rows == 16 ? Shape::kConfig.ctas : 1;

template <class T, class Shape>
__global__ void __launch_bounds__(Config::threads(), kLeastCtas<Shape>)
    split_kernel(const __grid_constant__ Launch launch) {
    constexpr Config kConfig = Shape::kConfig;
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(16) char of_struct[sizeof(Shared<Shape>)];
    auto& shared = *reinterpret_cast<Shared<Shape>*>(of_struct);
    static_assert(sizeof(Shared<Shape>) <= kConfig.static_bytes());
    const Buffers<Shape> buffers{memory};
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
#endif
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = uniform(static_cast<int>(threadIdx.x / 32));
    if (threadIdx.x == 0) {
        shared.kv[0].init(32, Config::kWarps);
        shared.kv[1].init(32, Config::kWarps);
        shared.q.init(64, Config::kWarps);
    }
    // Columns past the end of K and V stay 0: no copy writes them.
    const ForwardParams& p = launch.params;
    if (p.head_dim != kConfig.head_dim || p.head_dim_v != kConfig.head_dim) {
        for (int i = static_cast<int>(threadIdx.x) * 16; i < kConfig.shared_bytes(); i += Config::threads() * 16)
            *reinterpret_cast<uint4*>(memory + i) = uint4{};
    }
    __syncthreads();
    if (launch.own_lengths()) {
        const int first = static_cast<int>(blockIdx.x) % launch.groups.divisor() * kMostSequences;
        count_items<Shape>(shared.ends, launch, first, min(static_cast<int>(p.batch) - first, kMostSequences));
    }
    if (warp >= Config::kWarps) {
        load<T, Shape>(shared, buffers, launch, warp - Config::kWarps, lane);
        return;
    }
    PipelineStates<Shape> at;
    for (bool real = false;; real = true) {
        const SplitWork& work = shared.work[at.q.index];
        if (real) {
            shared.q.consumer_wait(at.q);
            if (work.rows == 0) return;
        }
        compute_split<T, Shape>(shared, buffers, at, launch, work, real, warp, lane);
        if (!real) continue;
        shared.q.consumer_release(at.q, lane);
    }
}

}  // namespace tessera::cuda::decode
