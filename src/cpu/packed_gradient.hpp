// SPDX-License-Identifier: Apache-2.0
//
// Slow memory of a backward call on packed tiles: the inputs in the forms that its five products take, and dQ in
// fp32. All of it is O(len). The counterpart of gradient.hpp.
#pragma once

#include "cpu/packed_panel.hpp"

namespace tessera::cpu {

/// Rows of one head, packed; `rows` counts from the head's first, a multiple of 32.
class PackedGradients {
 public:
    PackedGradients(Arena& arena, const Plan& plan, const PackedGeometry& g);

    /// Packs everything, clears dQ. Returns whether some LSE is too large to normalise by (inexact_lse()).
    bool prepare(const BackwardCall& call) const;

    /// P = exp(S - LSE) needs log(l) to stand in the last bits of LSE = m + log(l), as in gradient.cc; where it can't,
    /// `lse` becomes m and `norm` 1 / l.
    static bool inexact_lse(float lse) { return std::abs(lse) > 256 && std::isfinite(lse); }

    /// Writes dQ of queries first .. first + 32 of a head.
    void store_queries(const BackwardArgs& args, const Head& head, std::int64_t first) const;

    /// Everything of a query head, from query `first` on.
    struct Queries {
        tile::Tiles q_pairs;   // Q^T, pair tiles [depth_tiles][queries / 16]
        tile::Tiles q_rows;    // Q, pair tiles [queries / 32][dim_tiles], finite
        tile::Tiles do_pairs;  // dO^T, pair tiles [depth_tiles_v][queries / 16]
        tile::Tiles do_rows;   // dO, pair tiles [queries / 32][dim_tiles_v], finite
        float* lse;            // [queries], +inf for empty rows
        float* delta;          // [queries], rowsum(dO * O) - dLSE
        float* norm;           // [queries], factors of P, valid where has_norm
        float* dq_t;           // [queries / 32][16 * dim_tiles, 32]
        char* has_norm;        // [queries / 32]: LSE is too large to hold the row's sum
        char* q_finite;        // [queries / 32]
        char* do_finite;       // [queries / 32]
    };
    Queries queries(const Head& head, std::int64_t first) const;

    /// Everything of a kv head, from key `first` on.
    struct Keys {
        tile::Tiles k_rows;     // K, row tiles [keys / 16][depth_tiles]
        tile::Tiles k_columns;  // K^T, row tiles [dim_tiles][keys / 32], finite
        tile::Tiles v_rows;     // V, row tiles [keys / 16][depth_tiles_v]
        char* k_finite;         // [keys / 32]
        char* v_finite;         // [keys / 32], in fp32
    };
    Keys keys(const Member& member, std::int64_t kv_head, std::int64_t first) const;

    const PackedGeometry& geometry() const { return g_; }

 private:
    bool prepare_queries(const BackwardArgs& args, const Head& head, std::int64_t first) const;
    void prepare_keys(const Head& head, std::int64_t first) const;

    const Problem& problem_;
    PackedGeometry g_;
    std::int64_t rows_per_task_;  ///< of a task that packs
    // [heads_q, packed queries ...] and [heads_kv, packed keys ...]
    Bf16* q_pairs_;
    Bf16* q_rows_;
    Bf16* do_pairs_;
    Bf16* do_rows_;
    float* lse_;
    float* delta_;
    float* norm_;
    float* dq_t_;
    char* flags_q_;  // [3, heads_q, packed queries / 32]
    Bf16* k_rows_;
    Bf16* k_columns_;
    Bf16* v_rows_;
    char* flags_kv_;  // [2, heads_kv, packed keys / 32]
};

}  // namespace tessera::cpu
