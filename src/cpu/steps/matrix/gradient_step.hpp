// SPDX-License-Identifier: Apache-2.0
//
// One tile of the backward on a matrix unit: queries by keys, from scores to sums. The SIMD path's counterpart is
// simd::backward_tile() in steps/simd/gradient_step.hpp.
#pragma once

#include "cpu/steps/matrix/gradient.hpp"

namespace tessera::cpu::matrix {

/// Tile memory of one worker. A strip is 32 keys by all queries of the tile.
struct GradientScratch {
    float* s;                    // [32, block_q]
    float* dp;                   // [32, block_q]
    float* bias_or_dropout;      // [32, block_q]: bias
    float* factors;              // [32, block_q]: dropout
    float* cap_slope;            // [32, block_q]
    float* visible;              // [32, block_q]
    double* sums;                // [2, block_q]: row sums of P and of P * dP
    Bf16* p_rows;                // row tiles [2][block_q / 32]
    Bf16* ds_rows;               // row tiles [2][block_q / 32]
    Bf16* ds_pairs;              // pair tiles [block_kv / 32][block_q / 16]
    float* dk;                   // [block_kv, 16 * dim_tiles]
    float* dv;                   // [block_kv, 16 * dim_tiles_v]
    double* dk_total = nullptr;  // like dk and dv, for the parts before the last; owned by the caller
    double* dv_total = nullptr;

    GradientScratch(Arena& arena, const Layout& g, std::int64_t block_q, std::int64_t block_kv);
};

/// Selects the outputs of a tile.
struct Wanted {
    bool keys;     ///< dK and dV, into scratch.dk and scratch.dv
    bool queries;  ///< dQ, into GradientMemory
};

/// Adds the contribution of a range of queries and a range of keys to the sums; both ranges begin at multiples of 32.
/// The cut into tiles changes no bits, as long as a tile of keys begins wherever a part does.
void backward_tile(const GradientMemory& memory, const GradientScratch& scratch, TilePanel& work, const Range& queries,
                   const Range& keys, const BackwardArgs& args, Wanted wanted);

/// Adds rowsum(P * dP) to `delta` of `queries`, at most block_q from a multiple of 32 on. Used in bf16, like
/// simd::GradientMemory::sum_delta().
void sum_delta(const GradientMemory& memory, const GradientScratch& scratch, TilePanel& work, const BackwardArgs& args,
               const Range& queries);

/// Fills `norm` for 32 queries if an LSE is too large for the row's sum; otherwise does nothing.
void fill_norm(const GradientMemory& memory, const GradientScratch& scratch, TilePanel& work, const BackwardArgs& args,
               std::int64_t first);

}  // namespace tessera::cpu::matrix
