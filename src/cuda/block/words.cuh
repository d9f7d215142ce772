// SPDX-License-Identifier: Apache-2.0
//
// The exchange between the CTAs of one launch, in words of data and the number of the launch that wrote them. Writing
// is one store (SendQkv in block.cuh, send_partials() in attention.cuh, combine_columns() in combine.cuh). Reading is
// one load, repeated until the word has the number of this launch. There is no flag besides the data, no fence, no
// atomic operation, and nothing to reset: the next launch has another number.
#pragma once

#include "cuda/block/shared.cuh"

namespace tessera::cuda::block {

__device__ __forceinline__ Word word_of(std::uint32_t data, unsigned launch) {
    return static_cast<Word>(launch) << 32 | data;
}
__device__ __forceinline__ unsigned launch_of(Word word) { return static_cast<unsigned>(word >> 32); }
__device__ __forceinline__ std::uint32_t data_of(Word word) { return static_cast<std::uint32_t>(word); }
__device__ __forceinline__ float float_of(Word word) { return __uint_as_float(data_of(word)); }

/// Waits for kPairs pairs of words of this launch, `step` words apart. All loads are issued together.
template <int kPairs>
__device__ __forceinline__ void wait_for(const Word* from, std::int64_t step, Word (&words)[2 * kPairs],
                                         unsigned launch, Wait wait) {
    Watchdog watchdog;
    bool all;
    do {
        all = true;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) ptx::load_relaxed(from + i * step, words[2 * i], words[2 * i + 1]);
#pragma unroll
        for (int i = 0; i < 2 * kPairs; ++i) all = all && launch_of(words[i]) == launch;
        if (!all) watchdog.again(wait);
    } while (!all);
}

}  // namespace tessera::cuda::block
