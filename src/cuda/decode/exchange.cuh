// SPDX-License-Identifier: Apache-2.0
//
// Shared memory through which the consumer warps exchange maxima, sums and P. CTAs of 16 rows compute by mma.sync
// (compute_mma.cuh). CTAs of more rows compute by wgmma on Hopper (compute_wgmma.cuh), and by mma.sync elsewhere. On
// Hopper both have the same bits: the same sums in the same order, 16 products at a time.
#pragma once

#include <cstdint>

#include "cuda/decode/host/config.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TESSERA_DECODE_WGMMA 1
#else
#define TESSERA_DECODE_WGMMA 0
#endif

namespace tessera::cuda::decode {

/// Data of four warps on 16 rows and a tile of keys. Each warp has a slice of 16 keys.
struct SliceExchange {
    uint4 p[Config::kWarps][32];       ///< P as A fragments: [slice][lane]
    float maxima[16][Config::kWarps];  ///< the largest score of a slice: [row][slice]
    float sums[16][Config::kWarps];    ///< after the last tile of a split: the sum of P of a slice
};

/// Are `rows` rows of a CTA computed by wgmma?
constexpr bool by_wgmma(int rows) { return TESSERA_DECODE_WGMMA && rows > 16; }

/// With mma.sync: double-buffered data of each 16 rows, one buffer for the even tiles of a split and one for the odd.
template <int kRows, bool kByWgmma = by_wgmma(kRows)>
struct Exchange {
    SliceExchange of_rows[kRows / 16][2];
};
/// With wgmma, P goes through shared memory in one case only: a row does not see all keys of the tile, and V of the
/// tile has NaN or infinity. [row][two keys].
template <int kRows>
struct Exchange<kRows, true> {
    std::uint32_t p[kRows][Config::kKeys / 2];
};

}  // namespace tessera::cuda::decode
