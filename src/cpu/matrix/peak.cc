// SPDX-License-Identifier: Apache-2.0
#include "cpu/matrix/peak.hpp"

#include "cpu/matrix/primitives.hpp"

namespace tessera::cpu::matrix {

double peak_tile_products(std::int64_t rounds) {
    const Primitives* primitives = primitives_of_unit();
    if (primitives == nullptr) return 0;
    constexpr std::int64_t kDepth = 8;  // 16 KiB of left and of right tiles
    struct alignas(64) Memory {
        Bf16 a[2 * kDepth * kTileElements] = {};
        Bf16 b[2 * kDepth * kTileElements] = {};
        float c[32 * 32] = {};
    };
    Memory memory;
    const Session session(*primitives);
    for (std::int64_t round = 0; round < rounds; ++round) {
        primitives->multiply({.m = 2,
                              .n = 2,
                              .k = kDepth,
                              .a = {memory.a, kDepth * kTileElements, kTileElements},
                              .b = {memory.b, 2 * kTileElements, kTileElements},
                              .c = memory.c,
                              .c_stride = 32});
    }
    return 2.0 * 32 * 32 * kDepth * kTileDepth * static_cast<double>(rounds);
}

}  // namespace tessera::cpu::matrix
