// SPDX-License-Identifier: Apache-2.0
//
// Flash-Decoding (Dao et al., 2023): few queries on many keys. The keys are split among CTAs, and a second kernel
// combines the partial results by their LSE.
#pragma once

#include "cuda/decode/combine.cuh"
#include "cuda/decode/split.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::decode {

template <class T, class Shape>
cudaError_t start_decode(const Launch& launch, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of config.h");
    const ForwardParams& p = launch.params;
    const std::int64_t splits = p.batch * p.heads_kv * launch.head_tiles * launch.max_splits;
    if (splits > 0) {
        const cudaError_t status =
            start(split_kernel<T, Shape>, splits, 32 * p.len_q, Shape::kConfig.shared_bytes(), launch, stream);
        if (status != cudaSuccess) return status;
    }
    return start(combine_kernel<T, Shape>, launch.rows(), 32 * kCombineWarps, 0, launch, stream,
                 splits > 0 && launch.overlaps ? Start::beside : Start::behind);
}

}  // namespace tessera::cuda::decode
