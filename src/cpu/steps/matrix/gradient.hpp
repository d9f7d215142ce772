// SPDX-License-Identifier: Apache-2.0
//
// Global memory of a backward call on a matrix unit: the inputs packed for its five GEMMs, and dQ in fp32. All of it is
// O(len). The SIMD path's counterpart is steps/simd/gradient.hpp.
#pragma once

#include "cpu/steps/matrix/step.hpp"

namespace tessera::cpu::matrix {

/// The most rows that one fp32 sum takes: queries for dK and dV, keys for dQ. An MMA adds its 32 products pair by
/// pair, so the rounding error grows with the rows. Longer sums are cut into sums of this many rows from the sequence's
/// first row on. fp32 in parts takes six MMAs and needs more digits.
constexpr std::int64_t sum_rows(int parts) { return parts == 1 ? 2048 : 512; }

/// Does a new part of the sum begin at `first`, after rows of `seen` that belong to the previous part?
constexpr bool begins_part(std::int64_t first, const Range& seen, int parts) {
    return first % sum_rows(parts) == 0 && seen.begin < first && first - sum_rows(parts) < seen.end;
}

/// The packed rows of all heads; rows count from the head's first, a multiple of 32.
class GradientMemory {
 public:
    GradientMemory(Arena& arena, const Plan& plan, const Layout& g);

    /// Packs everything and clears dQ. In bf16, sum_delta() completes delta. Returns whether some LSE is too large to
    /// normalise by (inexact_lse()).
    bool prepare(const BackwardCall& call) const;

    /// Writes dQ of queries first .. first + 32 of a head.
    void store_queries(const BackwardArgs& args, const Head& head, std::int64_t first) const;

    /// Writes dsinks. delta must be complete.
    void store_sinks(const BackwardCall& call) const;

    /// The memory of a query head, from query `first` on.
    struct Queries {
        Tiles q_pairs;     // Q^T, pair tiles [depth_tiles][queries / 16]
        Tiles q_rows;      // Q, pair tiles [queries / 32][dim_tiles], finite
        Tiles do_pairs;    // dO^T, pair tiles [depth_tiles_v][queries / 16]
        Tiles do_rows;     // dO, pair tiles [queries / 32][dim_tiles_v], finite
        float* lse;        // [queries], +inf for empty rows
        float* delta;      // [queries], rowsum(P * dP) - dLSE, which is rowsum(dO * O) - dLSE
        float* norm;       // [queries], factors of P, valid where has_norm
        float* dq_t;       // [queries / 32][16 * dim_tiles, 32]: sum over all keys, or over their last part
        double* dq_total;  // sum over the earlier parts of the keys; null: there is one part
        char* has_norm;    // [queries / 32]: some LSE is too large for the row's sum
        char* q_finite;    // [queries / 32]
        char* do_finite;   // [queries / 32]
    };
    Queries queries(const Head& head, std::int64_t first) const;

    /// The memory of a kv head, from key `first` on.
    struct Keys {
        Tiles k_rows;     // K, row tiles [keys / 16][depth_tiles]
        Tiles k_columns;  // K^T, row tiles [dim_tiles][keys / 32], finite
        Tiles v_rows;     // V, row tiles [keys / 16][depth_tiles_v]
        char* k_finite;   // [keys / 32]
        char* v_finite;   // [keys / 32], in fp32
    };
    Keys keys(const Sequence& sequence, std::int64_t kv_head, std::int64_t first) const;

    const Layout& geometry() const { return g_; }

    /// Memory for two HeadTasks of the call that exist at the same time.
    std::int64_t* task_ends(int which) const { return ends_[which]; }

 private:
    bool prepare_queries(const BackwardArgs& args, const Head& head, std::int64_t first) const;
    void prepare_keys(const Head& head, std::int64_t first) const;

    const Problem& problem_;
    Layout g_;
    std::int64_t rows_per_task_;  ///< rows of a packing task
    std::int64_t* ends_[2];       // take_task_ends()
    // [heads_q, padded queries ...] and [heads_kv, padded keys ...]
    Bf16* q_pairs_;
    Bf16* q_rows_;
    Bf16* do_pairs_;
    Bf16* do_rows_;
    float* lse_;
    float* delta_;
    float* norm_;
    float* dq_t_;
    double* dq_total_ = nullptr;
    char* flags_q_;  // [3, heads_q, padded queries / 32]
    Bf16* k_rows_;
    Bf16* k_columns_;
    Bf16* v_rows_;
    char* flags_kv_;  // [2, heads_kv, padded keys / 32]
};

}  // namespace tessera::cpu::matrix
