// SPDX-License-Identifier: Apache-2.0
//
// Flash-Decoding (Dao et al., 2023): the keys are split among CTAs, and a second kernel combines the partial results by
// their LSE.
#pragma once

#include "cuda/decode/combine.cuh"
#include "cuda/decode/split.cuh"
#include "cuda/shared/start.cuh"

namespace tessera::cuda::decode {

template <class T, class Shape>
cudaError_t start_decode(const Launch& launch, std::int64_t blocks, cudaStream_t stream) {
    static_assert(Shapes::kHas<Shape>, "not in the list of config.h");
    constexpr int kHeadDim = Shape::kConfig.head_dim;
    if (blocks > 0) {
        const cudaError_t status = start(split_kernel<T, Shape>, blocks * launch.groups.divisor(), Config::threads(),
                                         Shape::kConfig.shared_bytes(), launch, stream);
        if (status != cudaSuccess) return status;
    }
    const Start when = blocks > 0 && launch.overlaps ? Start::programmatic : Start::in_order;
    const std::int64_t rows = (launch.end_query - launch.first_query) * launch.params.heads_q;
    if (launch.max_splits > kSerialSplits)
        return start(combine_kernel<T, kHeadDim, true>, rows, 32 * kSegments, 0, launch, stream, when);
    return start(combine_kernel<T, kHeadDim, false>, (rows + kRowsOfCta - 1) / kRowsOfCta, 32 * kRowsOfCta, 0, launch,
                 stream, when);
}

}  // namespace tessera::cuda::decode
